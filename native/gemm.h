// Activations times panels: int8 per token and group of 32 against quantized weights, bfloat16 against bfloat16.
//
// A row's sum runs over its groups in order, with the same operations on the same values whether one row is computed
// or several share a pass over a panel. So the bits do not depend on the number of rows.
#pragma once
#include <algorithm>

#include "prefetch.h"
#include "int8_dots.h"
#include "gemm_ordered.h"
#include "gemm_two.h"
#include "rows.h"

// A panel's 16 weights of each column, in the form that products use.
inline void read_panel(const Matrix& matrix, int panel, F* out) {
  const uint8_t *p = matrix.panel(panel), *quants = p + matrix.scale_bytes();
  with_format(matrix.format, [&]<Format T>() {
    constexpr Layout L = LAYOUTS[T];
    for (int g = 0; g < matrix.groups(); g++, quants += group_bytes(L.bits), out += GROUP) {
      if constexpr (T == BF16) {
        for (int c = 0; c < GROUP; c += 2) {
          const I pairs = load_bytes(quants + c / 2 * LINE);
          out[c] = firsts(pairs), out[c + 1] = seconds(pairs);
        }
      } else {
        I w[8];
        F scale, second;
        load_group<L.bits, L.floats>(quants, w);
        load_scales<T>(p + g * GROUP / L.block * L.scale_bytes, g % (L.block / GROUP), scale, second);
        for (int j = 0; j < 8; j++) {
          const F by = T == Q6_K && j >= 4 ? second : scale, plus = T == Q6_K ? zero() : second;
          const F q[] = {byte_of<0>(w[j]), byte_of<1>(w[j]), byte_of<2>(w[j]), byte_of<3>(w[j])};
          for (int c = 0; c < 4; c++) out[4 * j + c] = fma(sub(q[c], set1(L.zero)), by, plus);
        }
      }
    }
  });
}

// Adds a group's part of the sums of M rows, which begin at `at`. Products start with the correction for the weights'
// zero point (an exact integer); the first and the last 16 columns of Q6_K have separate scales. Rows are interleaved,
// since a row's next product waits for its last one.
template <Format T, bool MINIMA, int M>
inline void add_rows(F* acc, const QuantsOf<T, M>& w, F scale, F second, Minima minima, const Rows& rows, size_t at,
                     const Sum* of) {
  I sums[M];
  const int32_t* zeros = rows.zeros + zero_at(zero_of(T)) * rows.all + at;
  const int8_t* q = rows.q + at * GROUP;
  auto step = [&](int m) { return set1(rows.step[at + m]); };
  for (int m = 0; m < M; m++) sums[m] = zero_of(T) ? int_set1(zeros[m]) : int_zero();
  if constexpr (T == Q6_K) {
    F products[M];
    w.template dot<0, 4, M>(q, sums);
    for (int m = 0; m < M; m++) {
      if (LOOKS_UP)
        acc[m] = fma(to_float(sums[m]), mul(scale, step(m)), acc[m]);
      else
        products[m] = mul(to_float(sums[m]), scale);
    }
    for (int m = 0; m < M; m++) sums[m] = int_set1(zeros[rows.all + m]);
    w.template dot<4, 4, M>(q, sums);
    for (int m = 0; m < M; m++) {
      if (LOOKS_UP)
        acc[m] = fma(to_float(sums[m]), mul(second, step(m)), acc[m]);
      else
        acc[m] = fma(fma(to_float(sums[m]), second, products[m]), step(m), acc[m]);
    }
  } else {
    w.template dot<0, 8, M>(q, sums);
    for (int m = 0; m < M; m++) acc[m] = fma(to_float(sums[m]), mul(scale, step(m)), acc[m]);
  }
  if constexpr (MINIMA)
    for (int m = 0; m < M; m++) acc[m] = add_minima(acc[m], minima, of + TOGETHER * m);
}

template <Format T, bool MINIMA, int M>
[[gnu::always_inline]] inline void add_group(F* acc, const QuantsOf<T, M>& w, F scale, F second, Minima minima,
                                             const Rows& rows, int g) {
  constexpr int SOME = std::min(M, DOT_ROWS);
  const size_t at = size_t(g) * M;
  const Sum* of = rows.sums + size_t(g / TOGETHER) * TOGETHER * M;
#ifdef BY_HAND
  if constexpr (M > DOT_ROWS) {
    ManyScales scales[T == Q6_K ? 2 : 1];
    scales[0].make(scale);
    if constexpr (T == Q6_K) scales[1].make(second);
    return add_rows_in_order<T, MINIMA, M>(acc, w, scales, minima, rows, at, of);
  }
#endif
  for (int m = 0; m < M; m += SOME)
    add_rows<T, MINIMA, SOME>(acc + m, w, scale, second, minima, rows, at + m, of + TOGETHER * m);
}

// A member's working memory for multiplications, until the end of a pass.
struct Workspace {
  Prefetcher ahead;
  void end() { ahead.end(); }
};

// 16 sums of M rows, in one pass over a panel.
template <Format T, int M>
[[gnu::noinline]] void stream(const Job& job, Rows rows, F* out, Prefetcher& later) {
  constexpr Layout L = LAYOUTS[T];
  constexpr int per_block = L.block / GROUP;
  F few[M > DOT_ROWS ? 1 : M], *acc = M > DOT_ROWS ? out : few;  // few: in registers if all loops are unrolled
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) acc[m] = zero();
  const int groups = rows.groups();
  const bool asks = later.due(groups);
  const uint8_t *p = job.begin(), *quants = p + job.matrix->scale_bytes();
  Lookahead<T> ahead(job, job.next);
  Again<T, M> again(job);
  F minimum = zero();  // of the previous group
  for (int block = 0; block < groups / per_block; block++)
    for (int i = 0; i < per_block; i++, quants += group_bytes(L.bits)) {
      const int g = block * per_block + i;
      const QuantsOf<T, M> w(quants);
      ahead.step();
      again.step();
      if (asks) later.step();
      F scale, second;
      load_factors<T>(p + block * L.scale_bytes, i, scale, second);
      if constexpr (has_minima(T)) {
        if (g % TOGETHER == TOGETHER - 1)
          add_group<T, true, M>(acc, w, scale, second, minima_of(minimum, second), rows, g);
        else if (g + 1 == groups)
          add_group<T, true, M>(acc, w, scale, second, minima_of(second, zero()), rows, g);
        else
          add_group<T, false, M>(acc, w, scale, second, Minima{}, rows, g);
        minimum = second;
      } else {
        add_group<T, false, M>(acc, w, scale, second, Minima{}, rows, g);
      }
    }
#pragma GCC unroll 8
  for (int m = 0; m < M && acc != out; m++) out[m] = acc[m];
}

// M rows of a tile of TILE, from a given row on.
template <int M, int TILE>
[[gnu::noinline]] void stream_bf16(const Job& job, Rows rows, int from, F* out) {
  const uint8_t* p = job.begin();
  Lookahead<BF16> ahead(job, job.next);
  Again<BF16, TILE> again(job);
  F even[M], odd[M];
  for (int m = 0; m < M; m++) even[m] = odd[m] = zero();
  for (int g = 0; g < rows.groups(); g++) {
    ahead.step();
    again.step();
    for (int c = 0; c < GROUP; c += 4, p += 2 * LINE) {
      const I first = load_bytes(p), second = load_bytes(p + LINE);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const uint16_t* b = rows.b + (size_t(g) * TILE + from + m) * GROUP + c;
        even[m] = dot2(even[m], first, b), odd[m] = dot2(odd[m], second, b + 2);
      }
    }
  }
  for (int m = 0; m < M; m++) out[m] = add(even[m], odd[m]);
}

// 16 outputs of each of `count` rows; the first row begins a tile.
inline void multiply(const Job& job, Rows rows, int count, F* out, Workspace& work) {
  with_format(job.matrix->format, [&]<Format T>() {
    in_tiles<PASS_ROWS>(count, 0, [&]<int M>(int row) {
      if constexpr (T == BF16) {
        constexpr int SOME = std::min(M, BF16_ROWS);
        for (int m = 0; m < M; m += SOME) stream_bf16<SOME, M>(job, rows.at(row), m, out + row + m);
      } else {
        stream<T, M>(job, rows.at(row), out + row, work.ahead);
      }
    });
  });
}

inline int most_panels(int, int) { return 2; }  // panels that a member takes at a time, with many rows

// 16 outputs of each of `count` rows from `first` on, for each of n panels: sums [n][ROW_BLOCK]. They end with a block
// or with all rows, and then idle rows are computed too.
inline void multiply(const Job* jobs, int n, Rows rows, int first, int count, F* sums, Workspace& work) {
  if (first + count == rows.count) count = rows.tiled - first;
  for (int row = 0; row < count; row += PASS_ROWS) {  // a tile of rows stays in cache for all n
    const Rows tile = rows.at(first + row);
    const int some = std::min(PASS_ROWS, count - row);
    for (int i = 0, panels; i < n; i += panels) {
      F* out = sums + i * ROW_BLOCK + row;
      const int done = i + 1 < n ? multiply_two(jobs + i, tile, some, out, work.ahead) : 0;
      panels = done ? 2 : 1;
      for (int p = 0; p < panels && done < some; p++)
        multiply(jobs[i + p], tile.at(done), some - done, out + p * ROW_BLOCK + done, work);
    }
  }
}
