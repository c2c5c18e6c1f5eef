// A team of threads that runs one function at a time on all its members (SPMD), with barriers inside.
//
// Work is handed out in small pieces from a counter, so a core that is slow or busy elsewhere takes fewer of them and
// holds the others up by one piece at most. Waiting spins briefly, then yields, and between steps it sleeps.
#pragma once
#include <sched.h>

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include <immintrin.h>

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int i = 1; i < size; i++) threads_.emplace_back([this, i] { work(i); });
  }
  ~Team() {
    stop_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  int size() const { return size_; }

  void run(const std::function<void(int)>& job) {
    job_ = &job;
    running_.store(size_ - 1);
    next_.store(0);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    job(0);
    wait([&] { return running_.load(std::memory_order_acquire) == 0; });
  }

  // All members arrive before any goes on; the last to arrive resets the counter of pieces.
  void barrier() {
    if (size_ == 1) return void(next_.store(0, std::memory_order_relaxed));
    const int phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      next_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
    } else {
      wait([&] { return phase_.load(std::memory_order_acquire) != phase; });
    }
  }

  // Runs piece(i) for every i below count, each on whichever member comes first, and then waits for all.
  template <class Piece>
  void share(int count, const Piece& piece) {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count;) piece(i);
    barrier();
  }

 private:
  template <class Done>
  static void wait(const Done& done) {
    for (int spin = 0; !done(); spin++) {
      if (spin < 4000)
        _mm_pause();
      else
        sched_yield();
    }
  }

  void work(int index) {
    int seen = 0;
    while (true) {
      for (int spin = 0; spin < 20000 && generation_.load(std::memory_order_acquire) == seen; spin++) _mm_pause();
      generation_.wait(seen, std::memory_order_acquire);
      seen++;
      if (stop_) return;
      (*job_)(index);
      running_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<int> generation_{0};
  alignas(64) std::atomic<int> running_{0};
  alignas(64) std::atomic<int> next_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<int> phase_{0};
};
