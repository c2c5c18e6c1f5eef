// Products of two panels at a time, for many rows. Zen 5 and Intel's cores do two 512-bit multiplications and two loads
// per cycle, so they would wait for loads if each loaded activation were used for one product. The operations on a sum,
// and so its bits, are those of one panel.
#pragma once
#include "prefetch.h"
#include "int8_dots.h"
#include "rows.h"

#ifdef __AVX512VNNI__
// A group of both panels.
template <Format T>
struct TwoGroups {
  I w[2][8];
  F scale[2], second[2];
  Minima minima[2];  // of the group and those that are added with it
  bool due;          // whether it is the last of them
};

// Adds a group's part of the sums of M rows, which begin at `at`.
template <Format T, int M>
inline void add_group_two(F (*acc)[2], const TwoGroups<T>& group, const Rows& rows, size_t at, const Sum* of) {
  const auto& [w, scale, second, minima, due] = group;
  I sums[M][2];
  F products[M][2];
  auto each = [&](const auto& action) {
    for (int m = 0; m < M; m++)
      for (int p = 0; p < 2; p++) action(m, p);
  };
  auto dot = [&]<int FROM, int TO>(int zero) {
    const int32_t* zeros = rows.zeros + zero * rows.all + at;
    for (int m = 0; m < M; m++) sums[m][0] = sums[m][1] = zero_of(T) ? int_set1(zeros[m]) : int_zero();
#pragma GCC unroll 8
    for (int j = FROM; j < TO; j++)
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        const I four = int_set1(word_at(rows.q + (at + m) * GROUP + 4 * j));
        for (int p = 0; p < 2; p++) sums[m][p] = dot4(sums[m][p], w[p][j], four);
      }
  };
  constexpr int ZERO = zero_at(zero_of(T));
  auto add_scaled = [&](const F* scale) {
    each([&](int m, int p) { acc[m][p] = fma(to_float(sums[m][p]), mul(scale[p], set1(rows.step[at + m])), acc[m][p]); });
  };
  if constexpr (T == Q6_K && LOOKS_UP) {
    dot.template operator()<0, 4>(ZERO);
    add_scaled(scale);
    dot.template operator()<4, 8>(ZERO + 1);
    add_scaled(second);
  } else if constexpr (T == Q6_K) {
    dot.template operator()<0, 4>(ZERO);
    each([&](int m, int p) { products[m][p] = mul(to_float(sums[m][p]), scale[p]); });
    dot.template operator()<4, 8>(ZERO + 1);
    each([&](int m, int p) {
      const F product = fma(to_float(sums[m][p]), second[p], products[m][p]);
      acc[m][p] = fma(product, set1(rows.step[at + m]), acc[m][p]);
    });
  } else {
    dot.template operator()<0, 8>(ZERO);
    add_scaled(scale);
  }
  if (has_minima(T) && due) each([&](int m, int p) { acc[m][p] = add_minima(acc[m][p], minima[p], of + TOGETHER * m); });
}

// 16 sums of M rows for each panel, in one pass over both: [2, ROW_BLOCK].
template <Format T, int M>
[[gnu::noinline]] void stream_two(const Job* jobs, Rows rows, F* out, Prefetcher& later) {
  constexpr Layout L = LAYOUTS[T];
  constexpr int per_block = L.block / GROUP;
  constexpr int SOME = DOT_ROWS / 2;
  F acc[M][2];
  for (int m = 0; m < M; m++) acc[m][0] = acc[m][1] = zero();
  const int groups = rows.groups();
  const bool asks = later.due(groups);  // for both panels once: twice as often is slower
  const uint8_t *blocks[2], *quants[2];
  for (int p = 0; p < 2; p++) blocks[p] = jobs[p].begin(), quants[p] = blocks[p] + jobs[p].matrix->scale_bytes();
  constexpr int FAR = 2 * AHEAD;
  Lookahead<T> ahead[] = {{jobs[0], jobs[1].next, FAR}, {jobs[1], jobs[1].after_next, FAR}};
  F before[2] = {zero(), zero()};  // minima of the last group
  for (int g = 0; g < groups; g++) {
    TwoGroups<T> group;
    auto& [w, scale, second, minima, due] = group;
    const bool last = g % TOGETHER == TOGETHER - 1;
    for (int p = 0; p < 2; p++) {
      load_group<L.bits, L.floats>(quants[p], w[p]);
      quants[p] += group_bytes(L.bits), ahead[p].step();
      load_factors<T>(blocks[p] + g / per_block * L.scale_bytes, g % per_block, scale[p], second[p]);
      minima[p] = last ? minima_of(before[p], second[p]) : minima_of(second[p], zero());
      before[p] = second[p];
    }
    due = last || g + 1 == groups;
    if (asks) later.step();
    const Sum* of = rows.sums + size_t(g / TOGETHER) * TOGETHER * M;
    for (int m = 0; m < M; m += SOME) add_group_two<T, SOME>(acc + m, group, rows, size_t(g) * M + m, of + TOGETHER * m);
  }
  for (int m = 0; m < M; m++)
    for (int p = 0; p < 2; p++) out[p * ROW_BLOCK + m] = acc[m][p];
}

inline bool waits_for_loads() {
  static const bool waits = INTEL || __builtin_cpu_supports("avx512vp2intersect");  // of AMD's cores, those of Zen 5
  return waits;
}

// 16 outputs of each of the first rows for two panels: sums [2, ROW_BLOCK]. Returns the number of rows computed: those
// in tiles of at least DOT_ROWS, or none.
inline int multiply_two(const Job* jobs, Rows rows, int count, F* out, Prefetcher& later) {
  if (!waits_for_loads() || jobs[0].matrix->format != jobs[1].matrix->format) return 0;
  int done = 0;
  with_format(jobs->matrix->format, [&]<Format T>() {
    in_tiles<PASS_ROWS>(count, 0, [&]<int M>(int row) {
      if constexpr (T != BF16 && M >= DOT_ROWS) stream_two<T, M>(jobs, rows.at(row), out + row, later), done = row + M;
    });
  });
  return done;
}
#else
inline int multiply_two(const Job*, Rows, int, F*, Prefetcher&) { return 0; }
#endif
