// A decoder, the team that runs it, and the memory of both.
#pragma once
#include "pass.h"
#include "sketch.h"

struct Model : Decoder {
  Team* team;
  struct Private {  // of a member
    int member;
    Buffer row, prepared, sums, scales, sketched, found, gathered, gathered_scales, added;
    Workspace work;
    Scratch scratch;
    Buffer states;                         // of a head with a state, and where its rows are
    std::vector<const float*> state_rows;
    std::vector<const void*> state_written;
    std::vector<Query> queries;
    std::vector<Partial> outs;
    std::vector<Job> candidates, jobs;
    std::vector<Choice> choices;
    Routes routes;
    uint32_t meeting = 0;  // of ranks, the next
    Live live;             // what it makes equal
  };
  std::vector<Private> own;
  std::vector<Pass> passes;  // [runs of the team]
  Buffer common;             // of runs that do not overlap
  std::vector<Product> products;
  std::vector<Search> searches;
  std::unique_ptr<Sketch> sketch;  // of the head
  Ranks* ranks = nullptr;  // with which it computes; null if alone

  Model(const Config& config, const Matrix* embed, Team* team)
      : Decoder{config, embed, {}, nullptr, {}, nullptr, {}}, team(team), own(team->all()), passes(team->runs()),
        products(team->runs()), searches(team->runs()) {
    for (int i = 0; i < team->all(); i++) own[i].member = i;
  }

  // Lets it compute with other ranks, which have its other parts.
  void join(Ranks& with) {
    ranks = &with;
    for (Pass& pass : passes) pass.share(with);
    for (Product& product : products) product.share(with);
    for (Search& search : searches) search.share(with);
    common.lend(with.region(COMMON), with.region_bytes());
  }

  // body(own) as a job of the team, after which all ranks have done it.
  template <class Body>
  Team::Job job(const Body& body) {
    const uint32_t meeting = ranks ? ranks->next_meeting() : 0;
    return [this, body, meeting](int member) {
      own[member].meeting = meeting;
      body(own[member]);
      meet(own[member]);
      own[member].work.end();
    };
  }

  // Called after a phase whose results other ranks read, or whose inputs they may write next.
  void meet(Private& own) {
    if (ranks) ranks->meet(own.meeting++, own.live);
  }
  // As Team::share, for pieces that any rank can compute: each takes a part.
  template <class Piece>
  void share(int count, Private& own, const Piece& piece) {
    const int first = first_of(count);
    team->share(last_of(count) - first, own.member, [&](int i) { piece(first + i); });
  }
  // The same, followed by a meeting.
  template <class Piece>
  void spread(int count, Private& own, const Piece& piece) {
    share(count, own, piece);
    meet(own);
  }
  // As Team::share_once.
  template <class Piece>
  void share_once(int count, Private& own, const Piece& piece) {
    const int first = first_of(count);
    team->share_once(last_of(count) - first, own.member, [&](int i) { piece(first + i); });
  }
  // The part of `count` pieces that is this rank's.
  int first_of(int count) const { return ranks ? ranks->first(count) : 0; }
  int last_of(int count) const { return ranks ? ranks->last(count) : count; }
};
