// Ranks: processes that run a pass together, over memory that they share. Each computes a part of every product's
// outputs, in whole units, and reads all inputs. So no sum is split, and bits do not depend on the number of ranks.
//
// The activations of a pass lie in shared memory: what a rank computes is at once where the others read it, and a
// gather of inputs is only a meeting, at which all ranks wait until all have come. Every rank has the same meetings in
// the same order, as they follow from the batch alone.
//
// Where ranks have no common memory, each has its own, which meetings make equal (mirrored_memory.h).
//
// Rank 0 gives commands, and the others follow. If a rank is lost or late, all meetings are over at once: passes run to
// their ends with any numbers, and their results are not used.
#pragma once
#include <atomic>
#include <thread>

#include "memory.h"
#include "mirrored_memory.h"
#include "pause.h"
#include "run.h"
#include "system.h"

constexpr int MOST_RANKS = 64;

// Regions of the shared memory, for data of different life. All are sparse: an untouched page takes no memory.
enum Region { BATCH, PASS, REST, COMMON, TOKENS, PRODUCT, REGIONS };

// The beginning of the shared memory, zeroed at first.
struct Control {
  struct alignas(LINE) Counter {
    std::atomic<uint32_t> value;
  };
  Counter met[MOST_RANKS];         // meetings that a rank has come to, modulo 2^32
  Counter commands;                // given by rank 0
  Counter sleepers;                // threads of any rank that sleep
  std::atomic<uint32_t> lost;      // 0, or 1 + a rank that is lost, or LATE + it
  alignas(LINE) uint8_t command[LINE * 8];  // a struct of its sender
};
constexpr uint32_t LATE = 1000;

class Ranks {
 public:
  const int rank, size;

  // `memory`: the Control, then `bytes` of regions. `cores`: where a pass of rank 0 runs, as it is not pinned itself.
  Ranks(uint8_t* memory, size_t bytes, int rank, int size, double patience_s, const Cores& cores)
      : rank(rank), size(size), control_(*(Control*)memory), regions_(memory + round_up(sizeof(Control), HUGE_PAGE)),
        region_bytes_(bytes / REGIONS / LINE * LINE), patience_(int64_t(patience_s * 1e9)), cores_(cores) {}

  // Ranks without common memory. `twin` is as large as the memory. Both functions return 0, or not if a rank is lost:
  // `exchange` sends this rank's changes to all others and lets `mirror` make theirs; `tell`, of rank 0, sends a command
  // with its data.
  using Exchange = int (*)(const uint8_t* changes, int64_t bytes);
  using Tell = int (*)(const uint8_t* command, int64_t size, const uint8_t* data, int64_t bytes);
  void part(uint8_t* twin, Exchange exchange, Tell tell) {
    mirror = std::make_unique<Mirror>((uint8_t*)&control_, twin), exchange_ = exchange, tell_ = tell;
  }
  std::unique_ptr<Mirror> mirror;  // null if they have common memory

  uint8_t* region(Region which) const { return regions_ + region_bytes_ * which; }
  size_t region_bytes() const { return region_bytes_; }
  uint32_t lost() const { return control_.lost.load(std::memory_order_acquire); }
  bool leads() const { return rank == 0; }

  // The part of `count` equal pieces that is this rank's.
  int first(int count) const { return begin_of(count, rank, size); }
  int last(int count) const { return begin_of(count, rank + 1, size); }

  // Marks a rank as lost, unless one is, and wakes whoever waits for any.
  void lose(uint32_t why) {
    uint32_t none = 0;
    control_.lost.compare_exchange_strong(none, why);
    for (int i = 0; i < size; i++) wake(control_.met[i].value);
    wake(control_.commands.value);
  }

  // The number of the next meeting, when none is under way.
  uint32_t next_meeting() const { return control_.met[rank].value.load(std::memory_order_relaxed); }

  // Called by each thread of a rank that has done all that precedes meeting `number`. Returns when all ranks have, and
  // `live` is the same in all.
  void meet(uint32_t number, const Live& live = {}) {
    if (mirror) return meet_apart(number, live);
    std::atomic<uint32_t>& own = control_.met[rank].value;
    for (uint32_t seen = own.load(std::memory_order_relaxed); int32_t(seen - (number + 1)) < 0;)
      if (own.compare_exchange_weak(seen, number + 1, std::memory_order_acq_rel)) {
        tell(own);
        break;
      }
    for (int i = 1; i < size; i++) {
      const int other = (rank + i) % size;
      std::atomic<uint32_t>& theirs = control_.met[other].value;
      wait(theirs, [&](uint32_t value) { return int32_t(value - (number + 1)) >= 0; }, other);
    }
  }

  // By rank 0: the command that all others are to follow, which must be over before the next.
  template <class Command>
  void give(const Command& command, std::span<const uint8_t> data = {}) {
    static_assert(sizeof(Command) <= sizeof(control_.command));
    if (mirror) {
      mirror->settle(data);
      if (tell_((const uint8_t*)&command, sizeof(command), data.data(), int64_t(data.size()))) lose(1);
      return;
    }
    std::memcpy(control_.command, &command, sizeof(command));
    control_.commands.value.fetch_add(1, std::memory_order_acq_rel);
    tell(control_.commands.value);
  }
  // By the others: the next command. False if a rank is lost.
  template <class Command>
  bool take(Command& command) {
    const uint32_t next = ++taken_;
    wait(control_.commands.value, [&](uint32_t value) { return int32_t(value - next) >= 0; }, -1);
    std::memcpy(&command, control_.command, sizeof(command));
    return !lost();
  }

  // Keeps the calling thread of rank 0 on its cores while it exists.
  struct Pinned : Cores::Pinned {
    explicit Pinned(const Ranks& ranks) : Cores::Pinned(ranks.cores_) {}
  };

 private:
  static constexpr Time QUICKLY{50'000}, SOON{2'000'000};  // waiting with the core, and offering it to others
  static constexpr int64_t NAP_NS = 20'000'000;

  void tell(std::atomic<uint32_t>& word) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
    if (control_.sleepers.value.load(std::memory_order_relaxed)) wake(word);
  }

  // Waits until done(word), or a rank is lost. `other`: the rank that is waited for, -1 for a command, which may take
  // any time.
  template <class Done>
  void wait(std::atomic<uint32_t>& word, const Done& done, int other) {
    auto over = [&] { return done(word.load(std::memory_order_acquire)) || lost(); };
    if (over()) return;
    const auto began = Clock::now();
    for (Time waited{};; waited = Clock::now() - began) {
      for (int i = 0; i < 16; i++) {
        if (over()) return;
        pause_core();
      }
      if (waited > SOON) break;
      if (waited > QUICKLY) sched_yield();
    }
    while (!over()) {
      control_.sleepers.value.fetch_add(1, std::memory_order_seq_cst);
      const uint32_t value = word.load(std::memory_order_seq_cst);
      if (!done(value)) sleep_on(word, value, NAP_NS);
      control_.sleepers.value.fetch_sub(1, std::memory_order_relaxed);
      if (other >= 0 && Time(Clock::now() - began).count() > patience_) lose(LATE + uint32_t(other));
    }
  }

  // One thread exchanges for all of this rank.
  void meet_apart(uint32_t number, const Live& live) {
    std::atomic<uint32_t>& own = control_.met[rank].value;
    uint32_t expected = number;
    if (!begun_.compare_exchange_strong(expected, number + 1))
      return wait(own, [&](uint32_t value) { return int32_t(value - (number + 1)) >= 0; }, -1);
    const auto changes = mirror->changes(live);
    if (!lost() && exchange_(changes.data(), int64_t(changes.size()))) lose(1);
    own.store(number + 1, std::memory_order_release);
    tell(own);
  }

  Exchange exchange_ = nullptr;
  Tell tell_ = nullptr;
  std::atomic<uint32_t> begun_{0};  // meetings
  Control& control_;
  uint8_t* const regions_;
  const size_t region_bytes_;
  const int64_t patience_;
  const Cores cores_;
  uint32_t taken_ = 0;  // commands

 public:
  // What orders name by number, the same in every rank: models, and the memory of KV pools where this process has it.
  std::vector<void*> models;
  struct Pool {
    uint8_t* data;
    size_t bytes;
    std::vector<int64_t> strides;  // [groups, 3], of this rank's heads; none where pages are in memory of all ranks
  };
  std::vector<Pool> pools;
};
