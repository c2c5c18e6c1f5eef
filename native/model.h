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
    std::vector<Query> queries;
    std::vector<Partial> outs;
    std::vector<Job> candidates, jobs;
    std::vector<Choice> choices;
    Routes routes;
  };
  std::vector<Private> own;
  std::vector<Pass> passes;  // [runs of the team]
  Buffer common;             // of runs that do not overlap
  std::vector<Product> products;
  std::vector<Search> searches;
  std::unique_ptr<Sketch> sketch;  // of the head

  Model(const Config& config, const Matrix* embed, Team* team)
      : Decoder{config, embed, {}, {}, {}}, team(team), own(team->all()), passes(team->runs()), products(team->runs()),
        searches(team->runs()) {
    for (int i = 0; i < team->all(); i++) own[i].member = i;
  }

  // body(own) as a job of the team.
  template <class Body>
  Team::Job job(const Body& body) {
    return [this, body](int member) {
      body(own[member]);
      own[member].work.end();
    };
  }
};
