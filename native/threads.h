// A team of threads that runs one function at a time on all its members (SPMD), phase after phase.
//
// The work of a phase comes in small pieces. Each member begins with a range of its own, the same one every time, so
// it can ask for the memory of its next pieces ahead of time; who is done takes pieces of the others. A phase is over
// when all its pieces are done: nobody waits for a member, so one whose core was given to another process holds up
// nothing but the piece that it is in.
//
// In a pure run not even that. Its pieces write final numbers only, to places where nothing else is written as long as
// the run or a member in it lasts. So two members may compute the same piece: who waits for one does it again, and a
// run may be over while a member that lost its core is still in it.
//
// Threads share cores evenly with those of other processes. So beside a busy one a team that gets less time than it
// has members wakes a reserve, which sleeps otherwise.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include <immintrin.h>
#include <time.h>

#include "rounding.h"

class Team {
 public:
  using Job = std::function<void(int member)>;

  explicit Team(int size)
      : size_(size), all_(size > 1 ? size * (1 + RESERVES) : 1), seats_(new Seat[all_]), runs_(all_ + 1) {
    for (int i = 1; i < all_; i++) threads_.emplace_back([this, i] { work(i); });
  }
  ~Team() {
    stop_ = true;
    for (auto* word : {&generation_, &calls_}) word->fetch_add(2), word->notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }  // without the reserve
  int all() const { return all_; }

  // Runs have numbers below this; there is always a vacant one, that nobody is in.
  int runs() const { return int(runs_.size()); }
  int vacant() const {
    for (int i = 0;; i = (i + 1) % runs())
      if (runs_[i].users == 0) return i;
  }

  // Runs job(member), of `phases` phases at most, on all members that come before it is over, as a run that is vacant.
  // Returns when all phases are over, and unless it is pure no member is in it any more.
  void run(int number, int phases, bool pure, Job job) {
    Run& run = runs_[number];
    run.open(phases, size_, all_, pure, std::move(job), generation_ + 1);
    seats_[0].run = &run, open_ = number;
    const auto began = Clock::now();
    const Time used = processor_time();
    generation_++;
    generation_.notify_all();
    run.job(0);
    generation_++;
    if (!pure) return wait_for(run);
    watch(Clock::now() - began, processor_time() - used);
  }
  void run(int phases, Job job) { run(vacant(), phases, false, std::move(job)); }

  // Waits until no member is in a run.
  void settle() {
    for (Run& run : runs_) wait_for(run);
  }

  // The first of a member's own pieces, of `count`.
  int first(int count, int member) const { return begin(count, member % size_); }

  // Whether the member's next phase is over, since somebody is beyond it.
  bool late(int member) const {
    const Run& run = *seats_[member].run;
    const int next = run.places[member].phase.load(std::memory_order_relaxed);
    for (int i = 0; i < all_; i++)
      if (run.places[i].phase.load(std::memory_order_acquire) > next + 1) return true;
    return false;
  }

  // Runs piece(i) for every i below count, then finish(), and waits until the phase is over.
  template <class Piece, class Finish>
  void share(int count, int member, const Piece& piece, const Finish& finish) {
    share(seats_[member].run->pure, count, member, piece, finish);
  }
  template <class Piece>
  void share(int count, int member, const Piece& piece) {
    share(count, member, piece, [] {});
  }
  // The same for pieces that are not pure, in a run that may be.
  template <class Piece>
  void share_once(int count, int member, const Piece& piece) {
    share(false, count, member, piece, [] {});
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Time = std::chrono::nanoseconds;
  static constexpr int RESERVES = 1;         // for each member
  static constexpr Time PATIENCE{20'000};    // some small pieces
  static constexpr Time BETWEEN{1'000'000};  // two steps
  static constexpr Time WINDOW{20'000'000};  // to see how much processor time there is
  static constexpr int ALONE = 85;           // percent of it that are as good as all

  struct alignas(64) Tally {                   // of a member in a phase
    std::atomic<int> taken{0};                 // of its range, by anyone
    std::atomic<int> done[1 + RESERVES] = {};  // by it, and by its reserve
  };
  struct alignas(64) Place {
    std::atomic<int> phase{0};  // the member's next one
  };
  struct Run {
    Job job;
    std::atomic<bool> pure{false};
    uint32_t id = 0;
    int room = 0;                              // phases
    std::unique_ptr<Tally[]> tallies;          // [phase, member]
    std::unique_ptr<std::atomic<int>[]> over;  // [phase], to sleep on
    std::unique_ptr<Place[]> places;           // [member]
    alignas(64) std::atomic<int> users{0};     // members in it, but for the first

    void open(int phases, int size, int all, bool is_pure, Job its_job, uint32_t its_id) {
      if (phases > room) {
        room = phases;
        tallies.reset(new Tally[size_t(phases) * size]);
        over.reset(new std::atomic<int>[phases]());
        places.reset(new Place[all]);
      }
      const int used = places[0].phase;  // since it was last open: the first member goes through all phases
      for (int i = 0; i < used * size; i++) {
        tallies[i].taken.store(0, std::memory_order_relaxed);
        for (auto& done : tallies[i].done) done.store(0, std::memory_order_relaxed);
      }
      for (int i = 0; i < used; i++) over[i].store(0, std::memory_order_relaxed);
      for (int i = 0; i < all; i++) places[i].phase.store(0, std::memory_order_relaxed);
      job = std::move(its_job), pure = is_pure, id = its_id;
    }
    // A name that no other piece of any run has for a long time.
    static constexpr int PIECE_BITS = 26, PHASE_BITS = 14;
    uint64_t name(int phase, int piece) const {
      return (uint64_t(id) << PHASE_BITS | uint64_t(phase)) << PIECE_BITS | uint64_t(piece);
    }
    static int piece_of(uint64_t name) { return int(name & ((1 << PIECE_BITS) - 1)); }
    static bool same_phase(uint64_t a, uint64_t b) { return a >> PIECE_BITS == b >> PIECE_BITS; }
  };
  struct alignas(64) Seat {
    std::atomic<uint64_t> holds{0};  // the name of a piece
    Run* run = nullptr;
  };

  int begin(int count, int member) const { return begin_of(count, member, size_); }

  template <class Piece, class Finish>
  void share(bool pure, int count, int member, const Piece& piece, const Finish& finish) {
    Run& run = *seats_[member].run;
    const int phase = run.places[member].phase.load(std::memory_order_relaxed);
    run.places[member].phase.store(phase + 1, std::memory_order_release);
    Tally* tallies = &run.tallies[size_t(phase) * size_];
    auto over = [&] { return done(tallies) == count; };
    if (over()) return;
    const auto began = Clock::now();
    std::atomic<int>& own = tallies[member % size_].done[member / size_];
    for (int k = 0; k < size_; k++) {
      const int whose = (member + k) % size_, first = begin(count, whose), last = begin(count, whose + 1);
      for (int i; (i = first + tallies[whose].taken.fetch_add(1, std::memory_order_relaxed)) < last;) {
        const uint64_t name = run.name(phase, i);
        seats_[member].holds.store(name, std::memory_order_release);
        piece(i);
        count_once(seats_[member], name, own);
      }
    }
    finish();
    if (size_ == 1) return;
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the last to be done sees that all are
    if (over()) {
      if (!pure) run.over[phase].store(1, std::memory_order_release), run.over[phase].notify_all();
      return;
    }
    // Pieces may be long. What others hold should not take longer than all of ours did.
    if (spin(std::clamp<Time>(Clock::now() - began, PATIENCE, BETWEEN), over)) return;
    if (!pure) return run.over[phase].wait(0, std::memory_order_acquire);
    while (!over())  // what is not done is what somebody holds
      for (int i = 0; i < all_; i++) {
        const uint64_t name = seats_[i].holds.load(std::memory_order_acquire);
        if (!Run::same_phase(name, run.name(phase, 0))) continue;
        piece(Run::piece_of(name));
        count_once(seats_[i], name, own);
      }
  }

  int done(const Tally* tallies) const {
    int sum = 0;
    for (int i = 0; i < size_; i++)
      for (auto& done : tallies[i].done) sum += done.load(std::memory_order_acquire);
    return sum;
  }

  // Counts a piece once, however many have computed it.
  static void count_once(Seat& holder, uint64_t name, std::atomic<int>& own) {
    if (holder.holds.compare_exchange_strong(name, 0, std::memory_order_acq_rel))
      own.store(own.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  }

  template <class Done>
  static bool spin(Time time, const Done& done) {
    const auto end = Clock::now() + time;
    do {
      for (int i = 0; i < 4; i++) {
        if (done()) return true;
        _mm_pause();
      }
    } while (Clock::now() < end);
    return false;
  }

  static void wait_for(Run& run) {
    while (!spin(PATIENCE, [&] { return run.users == 0; }))
      if (const int users = run.users) run.users.wait(users);
  }

  static Time processor_time() {  // of all threads
    timespec now;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return std::chrono::seconds(now.tv_sec) + Time(now.tv_nsec);
  }
  void watch(Time wall, Time used) {
    wall_ += wall, used_ += used;
    if (wall_ < WINDOW || all_ == size_) return;
    const bool crowded = used_ < wall_ * size_ * ALONE / 100;
    wall_ = used_ = Time{};
    if (crowded_.exchange(crowded) != crowded) calls_++, calls_.notify_all();
  }

  // Takes part in one run after another. Generations are odd while a run is open.
  void work(int member) {
    for (int last = 0; !stop_;) {
      last = member < size_ ? next_run(last) : next_call(last);
      Run& run = runs_[open_];
      run.users++;
      if (generation_ == last && !stop_) seats_[member].run = &run, run.job(member);
      run.users--;
      run.users.notify_all();
    }
  }
  int next_run(int last) {
    int now;
    auto open = [&] { return now = generation_, stop_ || ((now & 1) && now != last); };
    while (!spin(crowded_ ? PATIENCE : BETWEEN, open)) generation_.wait(now);
    return now;
  }
  int next_call(int last) {  // for the reserve
    for (;;) {
      const int calls = calls_, now = generation_;
      if (stop_) return now;
      if (!crowded_)
        calls_.wait(calls);
      else if ((now & 1) && now != last && runs_[open_].pure)
        return now;
      else
        generation_.wait(now);
    }
  }

  const int size_, all_;
  std::unique_ptr<Seat[]> seats_;  // [member]
  std::vector<Run> runs_;
  std::vector<std::thread> threads_;
  std::atomic<bool> stop_{false}, crowded_{false};
  std::atomic<int> open_{0};  // which run
  Time wall_{}, used_{};      // of pure runs in this window
  alignas(64) std::atomic<int> generation_{0};
  alignas(64) std::atomic<int> calls_{0};  // for the reserve to sleep on
};
