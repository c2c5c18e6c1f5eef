// What systems do in different ways: keeping a thread on cores, sleeping until a word of shared memory changes, caches.
#pragma once
#include <atomic>
#include <cstdint>
#include <span>

#include <sched.h>

#ifdef __linux__
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

class Cores {
 public:
  explicit Cores(std::span<const int32_t> cores) {
    CPU_ZERO(&set_);
    for (int core : cores) CPU_SET(core, &set_);
  }

  // Keeps the calling thread on these cores, if there are any, while it exists.
  class Pinned {
   public:
    explicit Pinned(const Cores& cores) : wanted_(CPU_COUNT(&cores.set_) > 0) {
      if (wanted_)
        wanted_ = !sched_getaffinity(0, sizeof(before_), &before_) && !sched_setaffinity(0, sizeof(cores.set_), &cores.set_);
    }
    ~Pinned() {
      if (wanted_) sched_setaffinity(0, sizeof(before_), &before_);
    }
    Pinned(const Pinned&) = delete;

   private:
    bool wanted_;
    cpu_set_t before_;
  };

 private:
  cpu_set_t set_;
};

// Sleeps while the word has this value, until another process wakes whoever sleeps on it, at most so long.
inline void sleep_on(std::atomic<uint32_t>& word, uint32_t value, int64_t nanoseconds) {
  const timespec time{0, nanoseconds};
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAIT, value, &time, nullptr, 0);
}
inline void wake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, (uint32_t*)&word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

// Bytes of a core's second-level cache; 0 or less if the system does not say.
inline int64_t level_two_cache() { return sysconf(_SC_LEVEL2_CACHE_SIZE); }
#else  // macOS keeps no thread on a core, and wakes other processes in ways that are not public
#include <algorithm>
#include <chrono>
#include <thread>

#include <sys/sysctl.h>

struct Cores {
  explicit Cores(std::span<const int32_t>) {}
  struct Pinned {
    explicit Pinned(const Cores&) {}
  };
};

inline void sleep_on(std::atomic<uint32_t>&, uint32_t, int64_t nanoseconds) {
  std::this_thread::sleep_for(std::chrono::nanoseconds(std::min<int64_t>(nanoseconds, 50'000)));
}
inline void wake(std::atomic<uint32_t>&) {}

inline int64_t level_two_cache() {  // which several cores share
  int64_t bytes = 0;
  size_t size = sizeof(bytes);
  sysctlbyname("hw.perflevel0.l2cachesize", &bytes, &size, nullptr, 0);
  return bytes;
}
#endif
