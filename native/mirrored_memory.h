// Ranks without common memory, such as those on several hosts. Each has the whole memory of a pass, and at every meeting
// all are made equal: a rank compares what is in use with a copy from the meeting before, and sends the lines that it
// has changed to all others. No two ranks write the same byte between two meetings, so differences (exclusive or) of all
// ranks add up. This is release consistency with twins and diffs (Keleher et al. 1994, "TreadMarks: Distributed Shared
// Memory on Standard Workstations and Operating Systems", section 2), so kernels need not know of it.
#pragma once
#include <array>
#include <cstring>
#include <span>
#include <vector>

#include "memory.h"

// The bytes that a meeting makes equal: all that is written and read around it. Empty parts count nothing.
using Live = std::array<std::span<uint8_t>, 5>;

class Mirror {
 public:
  // `twin` is zeroed, as the memory is.
  Mirror(uint8_t* memory, uint8_t* twin) : memory_(memory), twin_(twin) {}

  // The lines that this rank has changed since the last meeting. Valid until the next call.
  std::span<const uint8_t> changes(const Live& live) {
    changed_.clear();
    for (auto part : live) {
      if (part.empty()) continue;
      const size_t first = (part.data() - memory_) / LINE, last = (part.data() + part.size() - memory_ + LINE - 1) / LINE;
      for (size_t line = first; line < last; line++) {
        uint8_t *now = memory_ + line * LINE, *before = twin_ + line * LINE;
        if (!std::memcmp(now, before, LINE)) continue;
        Change& change = changed_.emplace_back(Change{line, {}});
        std::memcpy(change.bytes, now, LINE), flip(change.bytes, before), std::memcpy(before, now, LINE);
      }
    }
    return {(const uint8_t*)changed_.data(), changed_.size() * sizeof(Change)};
  }

  // Makes the changes of another rank.
  void apply(const uint8_t* changes, size_t bytes) {
    Change change;
    for (size_t at = 0; at + sizeof(Change) <= bytes; at += sizeof(Change)) {
      std::memcpy(&change, changes + at, sizeof(Change));
      flip(memory_ + change.line * LINE, change.bytes), flip(twin_ + change.line * LINE, change.bytes);
    }
  }

  // Bytes that all ranks have been given.
  void settle(std::span<const uint8_t> given) { std::memcpy(twin_ + (given.data() - memory_), given.data(), given.size()); }

 private:
  struct Change {
    uint64_t line;
    uint8_t bytes[LINE];
  };
  static void flip(uint8_t* to, const uint8_t* bits) {
    for (size_t i = 0; i < LINE; i++) to[i] ^= bits[i];
  }

  uint8_t *const memory_, *const twin_;
  std::vector<Change> changed_;
};
