// Activations times panels: int8 per token and group of 32 against quantized weights, bfloat16 against bfloat16.
//
// A row's sum runs over its groups in order, with the same operations on the same values whether one row is computed
// or eight share a pass over a panel. So the bits do not depend on the number of rows.
#pragma once
#include <algorithm>

#include "ahead.h"
#include "dots.h"
#include "weights.h"

// Rows share a pass over a panel, and what it takes to read and unpack, in tiles: of PASS_ROWS, whose sums wait in memory,
// and what is left in smaller ones, the last of which registers hold.
constexpr int fewer(int rows) { return rows > 24 ? 24 : rows > 8 ? 8 : rows / 2; }

// Which of a group's zeros is what a zero of 8, 16 or 128 adds, and Q6_K's of 32 for either half: ready to begin a sum with.
constexpr int ZEROS = 5;
constexpr int zero_at(int zero) { return zero == 8 ? 0 : zero == 16 ? 1 : zero == 128 ? 2 : 3; }

// Rows ready to be multiplied. A tile holds group after group, and of each group its rows side by side.
struct Rows {
  int8_t* q;
  float* scale;
  float* weighted;  // scale * sum of q: what a minimum is multiplied with
  int32_t* zeros;   // what the weights' zero adds: by format, `all` numbers apart
  uint16_t* b;      // the row in bfloat16
  int count, cols;
  size_t all;       // groups of all rows
  int groups() const { return cols / GROUP; }
  // The first row of a tile.
  Rows at(int row) const {
    const size_t g = size_t(row) * groups();
    return {q + GROUP * g, scale + g, weighted + g, zeros + g, b + GROUP * g, count - row, cols, all};
  }
  // Where a row's first group lies, in groups, and how far the next one is.
  void place(int row, size_t& first, int& stride) const {
    int start = row / PASS_ROWS * PASS_ROWS;
    for (stride = PASS_ROWS;; stride = fewer(stride)) {
      for (; row - start >= stride && count - start >= stride;) start += stride;
      if (count - start >= stride) break;
    }
    first = size_t(start) * groups() + (row - start);
  }
  static size_t bytes(size_t rows, int cols) { return rows * (3 * cols + size_t(cols / GROUP) * (8 + 4 * ZEROS)); }
  static Rows in(uint8_t* memory, int count, int cols) {
    const size_t g = size_t(count) * (cols / GROUP);
    float* floats = (float*)(memory + GROUP * g);
    int32_t* ints = (int32_t*)(floats + 2 * g);
    return {(int8_t*)memory, floats, floats + g, ints, (uint16_t*)(ints + ZEROS * g), count, cols, g};
  }
};

// What the matrices of a layer multiply.
struct Kinds {
  bool ints = false, bf16 = false;
  void add(Format format) { (format == BF16 ? bf16 : ints) = true; }
};

inline void quantize_group(F a, F b, Rows rows, size_t at) {
  I qa, qb;
  const float scale = to_int8(a, b, qa, qb);
  store_int8(rows.q + at * GROUP, qa), store_int8(rows.q + at * GROUP + 16, qb);
  const int32_t first = sum(qa), second = sum(qb);
  auto adds = [&](int which, int32_t sum) { rows.zeros[which * rows.all + at] = sum; };
  for (int zero : {8, 16, 128}) adds(zero_at(zero), -zero * (first + second));
  adds(zero_at(32), -32 * first), adds(zero_at(32) + 1, -32 * second);
  rows.scale[at] = scale, rows.weighted[at] = scale * float(first + second);
}

inline void round_group(F a, F b, Rows rows, size_t at) {
  store_bf16(rows.b + at * GROUP, a), store_bf16(rows.b + at * GROUP + 16, b);
}

// 32 columns at a place.
inline void put_group(Kinds kinds, F a, F b, Rows rows, size_t at) {
  if (kinds.ints) quantize_group(a, b, rows, at);
  if (kinds.bf16) round_group(a, b, rows, at);
}

// What products take for those 32 columns.
inline void read_group(Kinds kinds, Rows rows, size_t at, float* out) {
  for (int i = 0; i < GROUP; i++)
    out[i] = kinds.ints ? rows.scale[at] * float(rows.q[at * GROUP + i]) : from_bf16(rows.b[at * GROUP + i]);
}
// A panel's 16 weights of each column, as products take them.
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
        load_group<L.bits>(quants, w);
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

// A group's share of the sums of M rows, which lie from `at` on. Products begin with what the weights' zero takes off them
// (an exact integer); of Q6_K the first and the last 16 columns have a scale each. Rows take turns, as a row's next product
// waits for its last one.
template <Format T, int M>
inline void add_group(F* acc, const Quants<LAYOUTS[T].bits>& w, F scale, F second, Rows rows, size_t at) {
  constexpr int zero = LAYOUTS[T].zero;
  I sums[M];
  auto begin = [&](int half) {
    const int32_t* zeros = rows.zeros + (zero_at(zero) + half) * rows.all + at;
    for (int m = 0; m < M; m++) sums[m] = zero ? int_set1(zeros[m]) : int_zero();
  };
  const int8_t* q = rows.q + at * GROUP;
  begin(0);
  if constexpr (T == Q6_K) {
    F products[M];
    w.template dot<0, 4, M>(q, sums);
    for (int m = 0; m < M; m++) products[m] = mul(to_float(sums[m]), scale);
    begin(1);
    w.template dot<4, 4, M>(q, sums);
    for (int m = 0; m < M; m++) products[m] = fma(to_float(sums[m]), second, products[m]);
    for (int m = 0; m < M; m++) acc[m] = fma(products[m], set1(rows.scale[at + m]), acc[m]);
  } else {
    w.template dot<0, 8, M>(q, sums);
    for (int m = 0; m < M; m++) acc[m] = fma(to_float(sums[m]), mul(scale, set1(rows.scale[at + m])), acc[m]);
  }
  if constexpr (zero == 0)
    for (int m = 0; m < M; m++) acc[m] = fma(second, set1(rows.weighted[at + m]), acc[m]);
}

// What a member of the team needs for its multiplications, until the end of a pass.
struct Workspace {
  Ahead ahead;
  void end() { ahead.end(); }
};

// 16 sums of M rows, in one pass over a panel.
template <Format T, int M>
[[gnu::noinline]] void stream(const Job& job, Rows rows, F* out, Ahead& later) {
  constexpr Layout L = LAYOUTS[T];
  constexpr int per_block = L.block / GROUP, step = group_bytes(L.bits) + L.scale_bytes / per_block;
  F acc[M];  // those of a small tile are in registers only if all loops over them are unrolled
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) acc[m] = zero();
  const int groups = rows.groups();
  const bool asks = later.due(groups);
  const uint8_t *p = job.begin(), *quants = p + job.matrix->scale_bytes();
  Lookahead ahead(job, p);
  for (int block = 0; block < groups / per_block; block++)
    for (int i = 0; i < per_block; i++, quants += group_bytes(L.bits)) {
      const int g = block * per_block + i;
      const Quants<L.bits> w(quants);
      ahead.step(step);
      if (asks) later.step();
      F scale, second;
      load_scales<T>(p + block * L.scale_bytes, i, scale, second);
      constexpr int SOME = std::min(M, DOT_ROWS);
      for (int m = 0; m < M; m += SOME) add_group<T, SOME>(acc + m, w, scale, second, rows, size_t(g) * M + m);
    }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) out[m] = acc[m];
}

// M rows of a tile of TILE, from one of them on.
template <int M, int TILE>
[[gnu::noinline]] void stream_bf16(const Job& job, Rows rows, int from, F* out) {
  const uint8_t* p = job.begin();
  Lookahead ahead(job, p);
  F even[M], odd[M];
  for (int m = 0; m < M; m++) even[m] = odd[m] = zero();
  for (int g = 0; g < rows.groups(); g++)
    for (int c = 0; c < GROUP; c += 4, p += 2 * LINE) {
      const I first = load_bytes(p), second = load_bytes(p + LINE);
      ahead.step(2 * LINE);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const uint16_t* b = rows.b + (size_t(g) * TILE + from + m) * GROUP + c;
        even[m] = dot2(even[m], first, b), odd[m] = dot2(odd[m], second, b + 2);
      }
    }
  for (int m = 0; m < M; m++) out[m] = add(even[m], odd[m]);
}

// Calls step<M>(row) for tiles of M rows, the largest first, until all `count` are done.
template <int M, class Step>
inline void in_tiles(int count, int row, const Step& step) {
  for (; count - row >= M; row += M) step.template operator()<M>(row);
  if constexpr (M > 1) in_tiles<fewer(M)>(count, row, step);
}

// 16 outputs of each of `count` rows, of which the first begins a tile.
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

constexpr int ROW_BLOCK = round_up(60, PASS_ROWS);  // rows whose activations stay in cache while panels go by: whole tiles
inline int most_panels(int, int) { return 2; }  // for a member to take at a time, of many rows

// 16 outputs of each of `count` rows from `first` on, for each of n panels: sums [n][ROW_BLOCK].
inline void multiply(const Job* jobs, int n, Rows rows, int first, int count, F* sums, Workspace& work) {
  for (int row = 0; row < count; row += PASS_ROWS)  // a tile of rows stays in cache for all n
    for (int i = 0; i < n; i++)
      multiply(jobs[i], rows.at(first + row), std::min(PASS_ROWS, count - row), sums + i * ROW_BLOCK + row, work);
}
