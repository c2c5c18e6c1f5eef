// The shared state of a run: how much of each phase every member has taken and done.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <numeric>
#include <vector>

#include "rounding.h"

using Clock = std::chrono::steady_clock;
using Time = std::chrono::nanoseconds;

constexpr int RESERVES = 1;  // for each member

struct alignas(64) Tally {                   // one member in one phase
  std::atomic<int> taken{0};                 // parts of its range that any member has taken
  std::atomic<int> done[1 + RESERVES] = {};  // pieces done by it and by its reserve
  std::atomic<int64_t> busy{0};              // duration of its pieces, if they were timed

  void clear() {
    taken.store(0, std::memory_order_relaxed), busy.store(0, std::memory_order_relaxed);
    for (auto& count : done) count.store(0, std::memory_order_relaxed);
  }
};

struct Run {
  using Job = std::function<void(int member)>;
  struct alignas(64) Place {
    std::atomic<int> phase{0};  // the member's next phase
  };

  Job job;
  std::atomic<bool> pure{false};
  uint32_t id = 0;
  int size = 0, room = 0;                    // members, phases
  std::unique_ptr<Tally[]> tallies;          // [phase, member]
  std::unique_ptr<std::atomic<int>[]> over;  // [phase], to sleep on
  std::unique_ptr<Place[]> places;           // [member], with the reserve
  alignas(64) std::atomic<int> users{0};     // members in it, except the first

  void open(int phases, int members, int all, bool is_pure, Job its_job, uint32_t its_id) {
    if (phases > room) {
      room = phases;
      tallies.reset(new Tally[size_t(phases) * members]);
      over.reset(new std::atomic<int>[phases]());
      places.reset(new Place[all]);
    }
    const int used = places[0].phase;  // phases of the last run: the first member goes through all
    for (int i = 0; i < used * members; i++) tallies[i].clear();
    for (int i = 0; i < used; i++) over[i].store(0, std::memory_order_relaxed);
    for (int i = 0; i < all; i++) places[i].phase.store(0, std::memory_order_relaxed);
    job = std::move(its_job), pure = is_pure, id = its_id, size = members;
  }

  Tally* phase(int number) const { return &tallies[size_t(number) * size]; }
  int done(int number) const {
    int sum = 0;
    for (int i = 0; i < size; i++)
      for (auto& count : phase(number)[i].done) sum += count.load(std::memory_order_acquire);
    return sum;
  }

  // The beginning of each member's range of a phase, as a share of 1, from the members' speeds in the last timed
  // phases. These phases are over, so all members compute the same. False if no member is known to be much slower than
  // others.
  bool weigh(int next, std::vector<double>& cuts) const {
    constexpr int LAST = 4;
    constexpr double NOISE = 1.15;
    cuts.assign(size + 1, 0);
    for (int seen = 0; seen < LAST && next-- > 0;) {
      const Tally* last = phase(next);
      double all = 0;
      bool timed = true;
      for (int i = 0; i < size; i++) timed &= last[i].busy > 0, all += speed(last[i]);
      for (int i = 0; i < size && timed; i++) cuts[i + 1] += speed(last[i]) / all;
      seen += timed;
    }
    const auto [least, most] = std::minmax_element(cuts.begin() + 1, cuts.end());
    if (*most <= *least * NOISE) return false;
    std::partial_sum(cuts.begin(), cuts.end(), cuts.begin());
    for (double& cut : cuts) cut /= cuts.back();
    return true;
  }

  // The name of a piece, which is not reused for a long time.
  static constexpr int PIECE_BITS = 26, PHASE_BITS = 14;
  uint64_t name(int phase, int piece) const {
    return (uint64_t(id) << PHASE_BITS | uint64_t(phase)) << PIECE_BITS | uint64_t(piece);
  }
  static int piece_of(uint64_t name) { return int(name & ((1 << PIECE_BITS) - 1)); }
  static bool same_phase(uint64_t a, uint64_t b) { return a >> PIECE_BITS == b >> PIECE_BITS; }

 private:
  static double speed(const Tally& tally) { return tally.done[0] / double(std::max<int64_t>(tally.busy, 1)); }
};
