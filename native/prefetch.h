// Prefetch of data that a member reads in a later phase, in small steps during its work in this one. Multiplying few
// rows is limited by instructions and attention by memory, so memory is kept busy while weights are unpacked.
#pragma once
#include <cstdint>
#include <vector>

#include "memory.h"
#include "simd.h"
#include "system.h"

// Bytes that a member may prefetch for a later phase: half of a core's L2 cache, as weights pass through it too.
inline size_t ahead_bytes() {
  static const int64_t cache = level_two_cache();
  return size_t(cache > 0 ? cache : 1 << 20) / 2;
}

class Prefetcher {
 public:
  // Begins to prefetch pieces of `bytes` each, at these offsets from `base`, in the order of use. `steps` steps are
  // left; prefetching starts as late as possible, since weights evict data from the cache. `offsets` must stay valid
  // until end().
  void begin(const uint8_t* base, const std::vector<size_t>& offsets, size_t bytes, int steps) {
    base_ = base, next_ = offsets.data(), last_ = next_ + offsets.size(), bytes_ = bytes, at_ = 0;
    wait_ = steps - int(offsets.size() * bytes / (LINES * LINE));
  }
  void end() { next_ = last_ = nullptr; }

  // Whether to take one step for each of the next `groups` groups of weights.
  bool due(int groups) {
    if (next_ == last_) return false;
    return (wait_ -= groups) < 0;
  }
  // Prefetches the next few lines, if any are left.
  void step() {
    if (next_ == last_) return;
    const uint8_t* from = base_ + *next_ + at_;
    for (int i = 0; i < LINES; i++) fetch(from + LINE * i);
    if ((at_ += LINES * LINE) >= bytes_) next_++, at_ = 0;
  }

 private:
  static constexpr int LINES = 4;
  const uint8_t* base_ = nullptr;
  const size_t *next_ = nullptr, *last_ = nullptr;
  size_t bytes_ = 0, at_ = 0;
  int wait_ = 0;
};
