// A team of threads that runs one function at a time on all its members (SPMD), with barriers inside.
//
// Work comes in small pieces. Each member begins with a range of its own, the same one every time, so it can ask for
// the memory of its next pieces ahead of time; who is done takes pieces of the others. So a core that is slow or busy
// elsewhere holds the others up by one piece at most. Waiting spins briefly and then sleeps: on a crowded machine,
// who spins away its time slice gets the next one later.
#pragma once
#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include <immintrin.h>

class Team {
 public:
  explicit Team(int size) : size_(size), next_(size) {
    for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { work(i); });
  }
  ~Team() {
    stop_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }

  // Runs job(member) on all members and returns when all are done.
  void run(const std::function<void(int)>& job) {
    job_ = &job;
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    job(0);
    barrier();
  }

  // All members arrive before any goes on; the last to arrive resets the counters of pieces.
  void barrier() {
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      for (auto& next : next_) next.taken.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      if (size_ > 1) phase_.notify_all();
    } else {
      wait(phase_, phase, 2000);
    }
  }

  // The first of a member's own pieces, of `count`.
  int begin(int count, int member) const { return int(int64_t(count) * member / size_); }

  // Runs piece(i) for every i below count, then finish(), and waits for all members.
  template <class Piece, class Finish>
  void share(int count, int member, const Piece& piece, const Finish& finish) {
    for (int k = 0; k < size_; k++) {
      const int whose = (member + k) % size_, first = begin(count, whose), last = begin(count, whose + 1);
      for (int i; (i = first + next_[whose].taken.fetch_add(1, std::memory_order_relaxed)) < last;) piece(i);
    }
    finish();
    barrier();
  }
  template <class Piece>
  void share(int count, int member, const Piece& piece) {
    share(count, member, piece, [] {});
  }

 private:
  static void wait(std::atomic<int>& value, int old, int spins) {
    for (int spin = 0; spin < spins; spin++) {
      if (value.load(std::memory_order_acquire) != old) return;
      _mm_pause();
    }
    value.wait(old, std::memory_order_acquire);
  }

  void work(int member) {
    for (int seen = 0;; seen++) {
      wait(generation_, seen, 20000);
      if (stop_) return;
      (*job_)(member);
      barrier();
    }
  }

  struct alignas(64) Counter {
    std::atomic<int> taken{0};
  };
  const int size_;
  std::vector<std::thread> threads_;
  std::vector<Counter> next_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int> generation_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};
