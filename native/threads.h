// A team of threads that runs one function at a time on all its members (SPMD), phase after phase.
//
// The work of a phase is divided into small pieces. Each member begins with its own range, so that it can prefetch its
// next pieces; then it steals pieces of other members. A phase is over when all its pieces are done: no one waits for a
// member, so a member that lost its core to another process delays only the piece that it is in. If pieces are taken
// many at a time, the lengths of ranges follow the speeds of members in earlier phases: a member that shares its core
// stays slow for a while, and pieces that it has taken cannot be stolen.
//
// In a pure run a member does not even delay its piece. Pieces write only final values, to memory that nothing else
// writes while the run lasts or a member is in it. So two members may compute the same piece: a waiting member computes
// it again, and a run may be over while a member that lost its core is still in it.
//
// The system shares cores evenly among the threads of all processes. So a team that gets less time than it has members
// wakes a reserve of threads, which otherwise sleeps.
#pragma once
#include <cmath>
#include <mutex>
#include <thread>

#include <time.h>

#include "pause.h"
#include "run.h"

class Team {
 public:
  using Job = Run::Job;
  std::recursive_mutex turn;  // held by callers of run(); members do not take it

  // Throws std::system_error if the system allows no more threads.
  explicit Team(int size) : size_(size), all_(size > 1 ? size * (1 + RESERVES) : 1), seats_(new Seat[all_]), runs_(all_ + 1) {
    try {
      for (int i = 1; i < all_; i++) threads_.emplace_back([this, i] { work(i); });
    } catch (...) {
      end();
      throw;
    }
  }
  ~Team() { end(); }
  int size() const { return size_; }  // without the reserve
  int all() const { return all_; }

  // Runs have numbers below this. There is always a vacant one, without members in it.
  int runs() const { return int(runs_.size()); }
  int vacant() const {
    for (int i = 0;; i = (i + 1) % runs())
      if (runs_[i].users == 0) return i;
  }

  // Runs job(member), with at most `phases` phases, in a vacant run, on all members that join before it is over.
  // Returns when all phases are over, and, unless it is pure, all members have left it.
  void run(int number, int phases, bool pure, Job job) {
#ifdef __SANITIZE_THREAD__
    pure = false;  // two members that compute the same piece, to the same bits, are a race for ThreadSanitizer
#endif
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

  // The first piece of a member's own range, of `count` pieces.
  int first(int count, int member) const { return begin(count, member % size_); }

  // Whether the member's next phase is over, since another member is beyond it.
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
    share(seats_[member].run->pure, count, 1, member, [&](int i, int) { piece(i); }, finish);
  }
  template <class Piece>
  void share(int count, int member, const Piece& piece) {
    share(count, member, piece, [] {});
  }
  // Runs parts(first, n) with up to `most` pieces each, or with one piece each if the run is pure.
  template <class Parts, class Finish>
  void share_parts(int count, int most, int member, const Parts& parts, const Finish& finish) {
    const bool pure = seats_[member].run->pure;
    share(pure, count, pure ? 1 : most, member, parts, finish);
  }
  // The same for impure pieces in a run that may be pure.
  template <class Piece>
  void share_once(int count, int member, const Piece& piece) {
    share(false, count, 1, member, [&](int i, int) { piece(i); }, [] {});
  }

 private:
  static constexpr Time PATIENCE{20'000};    // duration of some small pieces
  static constexpr Time BETWEEN{1'000'000};  // time between two steps
  static constexpr Time WINDOW{20'000'000};  // window for measuring processor time
  static constexpr int ALONE = 85;           // percent of wall time at which cores count as not shared

  struct alignas(64) Seat {
    std::atomic<uint64_t> holds{0};  // the name of a piece
    Run* run = nullptr;
    std::vector<double> cuts;        // [members + 1]: beginnings of ranges in a phase, as shares of 1
  };

  int begin(int count, int member) const { return begin_of(count, member, size_); }

  void end() {
    stop_ = true;
    for (auto* word : {&generation_, &calls_}) word->fetch_add(2), word->notify_all();
    for (auto& thread : threads_) thread.join();
  }

  template <class Parts, class Finish>
  void share(bool pure, int count, int most, int member, const Parts& parts, const Finish& finish) {
    Run& run = *seats_[member].run;
    const int phase = run.places[member].phase.load(std::memory_order_relaxed);
    run.places[member].phase.store(phase + 1, std::memory_order_release);
    Tally* tallies = run.phase(phase);
    auto over = [&] { return run.done(phase) == count; };
    if (over()) return;
    const auto began = Clock::now();
    Tally& tally = tallies[member % size_];
    std::atomic<int>& own = tally.done[member / size_];
    std::vector<double>& cuts = seats_[member].cuts;
    const bool by_speed = most > 1 && run.weigh(phase, cuts);
    auto begin_range = [&](int whose) { return by_speed ? int(std::lround(count * cuts[whose])) : begin(count, whose); };
    for (int k = 0; k < size_; k++) {
      const int whose = (member + k) % size_, first = begin_range(whose), last = begin_range(whose + 1);
      if (first == last) continue;
      const int part = most > 1 ? even_part(last - first, most) : 1;
      for (int i; (i = first + part * tallies[whose].taken.fetch_add(1, std::memory_order_relaxed)) < last;) {
        const uint64_t name = run.name(phase, i);
        const int n = std::min(part, last - i);
        seats_[member].holds.store(name, std::memory_order_release);
        const auto start = most > 1 ? Clock::now() : began;
        parts(i, n);
        if (most > 1) tally.busy.fetch_add(Time(Clock::now() - start).count(), std::memory_order_relaxed);
        count_once(seats_[member], name, own, n);
      }
    }
    finish();
    if (size_ == 1) return;
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the last member sees that all pieces are done
    if (over()) {
      if (!pure) run.over[phase].store(1, std::memory_order_release), run.over[phase].notify_all();
      return;
    }
    // Pieces may be long. Those that others hold should not take longer than all of ours did.
    if (spin(std::clamp<Time>(Clock::now() - began, PATIENCE, BETWEEN), over)) return;
    if (!pure) return run.over[phase].wait(0, std::memory_order_acquire);
    while (!over())  // some member holds each piece that is not done
      for (int i = 0; i < all_; i++) {
        const uint64_t name = seats_[i].holds.load(std::memory_order_acquire);
        if (!Run::same_phase(name, run.name(phase, 0))) continue;
        parts(Run::piece_of(name), 1);
        count_once(seats_[i], name, own, 1);
      }
  }

  // Counts n pieces once, even if several members computed them.
  static void count_once(Seat& holder, uint64_t name, std::atomic<int>& own, int n) {
    if (holder.holds.compare_exchange_strong(name, 0, std::memory_order_acq_rel))
      own.store(own.load(std::memory_order_relaxed) + n, std::memory_order_release);
  }

  template <class Done>
  static bool spin(Time time, const Done& done) {
    const auto end = Clock::now() + time;
    do {
      for (int i = 0; i < 4; i++) {
        if (done()) return true;
        pause_core();
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
