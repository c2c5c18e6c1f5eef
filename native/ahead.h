// What a member reads in a later phase, asked for a little at a time beside its work in this one. Multiplying few rows
// is held up by instructions and attention by memory: so memory works while weights are unpacked.
#pragma once
#include <unistd.h>

#include <vector>

#include "memory.h"
#include "simd.h"

// Bytes that a member may ask for so long before: half of a core's second-level cache, as weights go through it too.
inline size_t ahead_bytes() {
  static const long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
  return size_t(cache > 0 ? cache : 1 << 20) / 2;
}

class Ahead {
 public:
  // Pieces of `bytes` each, at these offsets from `base`, in the order in which they are wanted: as late as they can be
  // had in so many steps, for weights push out what lies in the cache. `offsets` stay until the end.
  void begin(const uint8_t* base, const std::vector<size_t>& offsets, size_t bytes, int steps) {
    base_ = base, next_ = offsets.data(), last_ = next_ + offsets.size(), bytes_ = bytes, at_ = 0;
    wait_ = steps - int(offsets.size() * bytes / (LINES * LINE));
  }
  void end() { next_ = last_ = nullptr; }

  // Whether to take steps beside the next so many groups of weights, one for each.
  bool due(int groups) {
    if (next_ == last_) return false;
    return (wait_ -= groups) < 0;
  }
  // Asks for the next few lines, if any are left.
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
