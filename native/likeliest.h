// The largest numbers of a row, which are the candidates of filters.
#pragma once
#include <algorithm>
#include <bit>
#include <functional>
#include <limits>

#include "memory.h"
#include "simd.h"

constexpr int MOST_GROUPED = 64;

// A bound that at least `count` numbers reach, and few more: the smallest maximum of the `count` groups with the
// largest maxima. A group is a lane of some vectors.
inline float least_of(const float* row, int columns, int count, Buffer& memory) {
  const int size = std::clamp(columns / (4 * count), 1, MOST_GROUPED), vectors = columns / (16 * size);
  if (vectors * 16 < count) return -std::numeric_limits<float>::infinity();
  float* tops = memory.get<float>(size_t(vectors) * 16);
  for (int i = 0; i < vectors; i++, row += 16 * size) {
    F highest = load(row);
    for (int k = 1; k < size; k++) highest = max(load(row + 16 * k), highest);  // of a NaN max takes the other
    store(tops + 16 * i, highest);
  }
  std::nth_element(tops, tops + count - 1, tops + vectors * 16, std::greater());
  return tops[count - 1];
}

// The columns of the `count` largest numbers, at least 1, and of all equal to the last of these, except those below the
// floor and -inf; ascending. Returns their number.
inline int likeliest(const float* row, int columns, int count, float floor, int32_t* out, Buffer& memory) {
  if (count < columns) floor = std::max(floor, least_of(row, columns, count, memory));
  floor = std::max(floor, std::numeric_limits<float>::lowest());
  int n = 0, i = 0;
  for (; i + 16 <= columns; i += 16) {
    const F v = load(row + i);
    for (uint32_t lanes = equal_lanes(max(v, set1(floor)), v); lanes; lanes &= lanes - 1)
      out[n++] = i + std::countr_zero(lanes);
  }
  for (; i < columns; i++)
    if (row[i] >= floor) out[n++] = i;
  if (n <= count) return n;
  float* values = memory.get<float>(n);
  for (int k = 0; k < n; k++) values[k] = row[out[k]];
  std::nth_element(values, values + count - 1, values + n, std::greater());
  const float last = values[count - 1];
  return int(std::remove_if(out, out + n, [&](int column) { return row[column] < last; }) - out);
}
