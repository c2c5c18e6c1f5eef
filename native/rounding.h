// Counts that do not divide evenly.
#pragma once
#include <cstddef>
#include <cstdint>

constexpr size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }
constexpr int ceil_div(int count, int part) { return (count + part - 1) / part; }
// The size of equal parts that are at most `most`.
constexpr int even_part(int count, int most) { return ceil_div(count, ceil_div(count, most)); }
// The beginning of one of several equal parts.
constexpr int begin_of(int count, int part, int parts) { return int(int64_t(count) * part / parts); }

// Calls step<M>(row) for tiles of M rows, the largest first, until all `count` are done.
template <int M, class Step>
inline void in_tiles(int count, int row, const Step& step) {
  for (; count - row >= M; row += M) step.template operator()<M>(row);
  if constexpr (M > 1) in_tiles<M / 2>(count, row, step);
}
