// The communication of ranks alone, to be timed: the gathers of a pass, and the all-reduce of partial sums that they
// stand in for (Shoeybi et al. 2019, arXiv:1909.08053).
#pragma once
#include "ranks.h"

// One gather of [rows, bytes]: each rank stores its columns, and reads those of all others. Places alternate, as in a
// pass, so that one meeting is enough.
inline uint64_t gather_once(Ranks& ranks, int rows, int bytes, int round, uint32_t meeting) {
  uint8_t* const all = ranks.region(PRODUCT) + size_t(round % 2) * rows * bytes;
  const int first = ranks.first(bytes / LINE) * int(LINE), last = ranks.last(bytes / LINE) * int(LINE);
  for (int row = 0; row < rows; row++) std::memset(all + size_t(row) * bytes + first, round + row, last - first);
  ranks.meet(meeting);
  uint64_t sum = 0;
  for (int row = 0; row < rows; row++)
    for (int at = 0; at < bytes; at += LINE)
      if (at < first || at >= last) sum += *(const uint64_t*)(all + size_t(row) * bytes + at);
  return sum;
}

// One all-reduce of [rows, columns] float32: each rank stores its partial sums, adds its columns of all ranks' in the
// order of ranks, and reads all results.
inline float reduce_once(Ranks& ranks, int rows, int columns, int round, uint32_t meeting) {
  const size_t count = size_t(rows) * columns;
  float* const base = (float*)ranks.region(PRODUCT) + size_t(round % 2) * (ranks.size + 1) * count;
  float* const own = base + count * (1 + ranks.rank);
  for (size_t i = 0; i < count; i += 16) store(own + i, set1(float(round)));
  ranks.meet(meeting);
  const int first = ranks.first(columns / 16) * 16, last = ranks.last(columns / 16) * 16;
  for (int row = 0; row < rows; row++)
    for (int c = first; c < last; c += 16) {
      const size_t at = size_t(row) * columns + c;
      F sum = load(base + count + at);
      for (int rank = 1; rank < ranks.size; rank++) sum = add(sum, load(base + count * (1 + rank) + at));
      store(base + at, sum);
    }
  ranks.meet(meeting + 1);
  F seen = zero();
  for (size_t i = 0; i < count; i += 16) seen = add(seen, load(base + i));
  return first_lane(seen);
}

// Nanoseconds of `rounds` gathers of [rows, width] bytes, or of all-reduces of as many numbers.
inline int64_t exchange(Ranks& ranks, int rows, int width, int rounds, bool sums) {
  uint32_t meeting = ranks.next_meeting();
  volatile double kept = 0;
  ranks.meet(meeting++);
  const auto began = Clock::now();
  for (int round = 0; round < rounds; round++) {
    if (sums)
      kept = kept + reduce_once(ranks, rows, width, round, meeting), meeting += 2;
    else
      kept = kept + double(gather_once(ranks, rows, width, round, meeting)), meeting++;
  }
  ranks.meet(meeting);
  return Time(Clock::now() - began).count();
}
