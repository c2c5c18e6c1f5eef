// Activations times panels: int8 per token and group of 32 against quantized weights, bfloat16 against bfloat16.
//
// A row's sum runs over its groups in order, with the same operations on the same values whether one row is computed
// or eight share a pass over a panel. So the bits do not depend on the number of rows.
#pragma once
#include <algorithm>

#include "ahead.h"
#include "dots.h"
#include "scales.h"
#include "weights.h"

// Rows share a pass over a panel, and what it takes to read and unpack, in tiles: of PASS_ROWS, whose sums wait in memory,
// and what is left in smaller ones, the last of which registers hold.
constexpr int fewer(int rows) { return rows > 24 ? 24 : rows > 8 ? 8 : rows / 2; }

// Which of a group's zeros is what a zero of 8, 16 or 128 adds, and Q6_K's of 32 for either half: ready to begin a sum with.
constexpr int ZEROS = 5;
constexpr int zero_at(int zero) { return zero == 8 ? 0 : zero == 16 ? 1 : zero == 128 ? 2 : 3; }
constexpr bool rounds_minima(Format format) { return FROM_MIDDLE && has_minima(format); }
// The quant that products take for 0.
constexpr int zero_of(Format format) {
  return rounds_minima(format) ? 1 << (LAYOUTS[format].bits - 1) : LAYOUTS[format].zero;
}

// Where a row lies: its first group and the sum of that, and so many rows side by side, from it on and in all.
struct Place {
  size_t first, first_sum;
  int left, stride;
  size_t group(int g) const { return first + size_t(g) * stride; }
  size_t sum(int g) const { return first_sum + size_t(g / TOGETHER) * TOGETHER * stride + g % TOGETHER; }
};

// Rows ready to be multiplied. A tile holds group after group, and of each group its rows side by side.
struct Rows {
  int8_t* q;
  float* step;     // what quants are multiplied with
  int32_t* zeros;  // what the weights' zero adds: by format, `all` numbers apart
  Sum* sums;       // step * sum of q: row by row, TOGETHER groups after another
  uint16_t* b;     // the row in bfloat16
  int count, cols;
  size_t all;      // groups of all rows
  int groups() const { return cols / GROUP; }
  // The first row of a tile.
  Rows at(int row) const {
    const size_t g = size_t(row) * groups();
    return {q + GROUP * g, step + g, zeros + g, sums + row * sums_of(cols), b + GROUP * g, count - row, cols, all};
  }
  Place place(int row) const {
    int start = row / PASS_ROWS * PASS_ROWS, stride = PASS_ROWS;
    for (;; stride = fewer(stride)) {
      for (; row - start >= stride && count - start >= stride;) start += stride;
      if (count - start >= stride) break;
    }
    const int before = row - start;
    return {size_t(start) * groups() + before, start * sums_of(cols) + TOGETHER * before, stride - before, stride};
  }
  // Whether the group comes last, without those that it should be together with.
  bool lonely(int g) const { return g + 1 == groups() && (g + 1) % TOGETHER; }
  static size_t sums_of(int cols) { return round_up(cols / GROUP, TOGETHER); }
  static size_t bytes(size_t rows, int cols) {
    return rows * (3 * cols + size_t(cols / GROUP) * 4 * (1 + ZEROS) + sums_of(cols) * sizeof(Sum));
  }
  static Rows in(uint8_t* memory, int count, int cols) {
    const size_t g = size_t(count) * (cols / GROUP);
    float* step = (float*)(memory + GROUP * g);
    int32_t* zeros = (int32_t*)(step + g);
    Sum* sums = (Sum*)(zeros + ZEROS * g);
    return {(int8_t*)memory, step, zeros, sums, (uint16_t*)(sums + count * sums_of(cols)), count, cols, g};
  }
};

// What the matrices of a layer multiply.
struct Kinds {
  bool ints = false, bf16 = false;
  void add(Format format) { (format == BF16 ? bf16 : ints) = true; }
};

inline void quantize_group(F a, F b, Rows rows, Place place, int g) {
  const size_t at = place.group(g);
  I qa, qb;
  const float step = to_int8(a, b, qa, qb);
  store_int8(rows.q + at * GROUP, qa), store_int8(rows.q + at * GROUP + 16, qb);
  const int32_t first = sum(qa), second = sum(qb);
  auto adds = [&](int which, int32_t sum) { rows.zeros[which * rows.all + at] = sum; };
  for (int zero : {8, 16, 128}) adds(zero_at(zero), -zero * (first + second));
  adds(zero_at(32), -32 * first), adds(zero_at(32) + 1, -32 * second);
  rows.step[at] = step;
  Sum* out = rows.sums + place.sum(g);
  put_sum(out, step * float(first + second));
  if (rows.lonely(g)) put_sum(out + 1, 0);
}

// The same of 16 rows that lie side by side.
inline void quantize_groups(const F* a, const F* b, Rows rows, Place place, int g) {
  const size_t at = place.group(g);
  F highest[PANEL];
#pragma GCC unroll 16
  for (int i = 0; i < PANEL; i++) highest[i] = max(abs(a[i]), abs(b[i]));
  const F step = step_of(tops(highest));
  float inverse[PANEL];
  store(inverse, inverse_of(step));
  int8_t* q = rows.q + at * GROUP;
  I qa[PANEL], qb[PANEL];
#pragma GCC unroll 16
  for (int i = 0; i < PANEL; i++, q += GROUP) {
    qa[i] = to_int(mul(a[i], set1(inverse[i]))), qb[i] = to_int(mul(b[i], set1(inverse[i])));
    store_int8(q, qa[i]), store_int8(q + 16, qb[i]);
  }
  const I first = sums(qa), second = sums(qb), both = add(first, second);
  auto adds = [&](int which, int times, I sum) { store(rows.zeros + which * rows.all + at, mul(sum, int_set1(times))); };
  for (int zero : {8, 16, 128}) adds(zero_at(zero), -zero, both);
  adds(zero_at(32), -32, first), adds(zero_at(32) + 1, -32, second);
  store(rows.step + at, step);
  Sum* out = rows.sums + place.sum(g);
  put_sums(out, mul(step, to_float(both)));
  if (rows.lonely(g)) put_sums(out + 1, zero());
}

inline void round_group(F a, F b, Rows rows, size_t at) {
  store_bf16(rows.b + at * GROUP, a), store_bf16(rows.b + at * GROUP + 16, b);
}

// 32 columns of a row.
inline void put_group(Kinds kinds, F a, F b, Rows rows, Place place, int g) {
  if (kinds.ints) quantize_group(a, b, rows, place, g);
  if (kinds.bf16) round_group(a, b, rows, place.group(g));
}

// The same of 16 rows that lie side by side: a[i] and b[i].
inline void put_groups(Kinds kinds, const F* a, const F* b, Rows rows, Place place, int g) {
  if (kinds.ints) quantize_groups(a, b, rows, place, g);
  for (int i = 0; i < PANEL && kinds.bf16; i++) round_group(a[i], b[i], rows, place.group(g) + i);
}

// What products take for those 32 columns.
inline void read_group(Kinds kinds, Rows rows, Place place, int g, float* out) {
  const size_t at = place.group(g);
  for (int i = 0; i < GROUP; i++)
    out[i] = kinds.ints ? rows.step[at] * float(rows.q[at * GROUP + i]) : from_bf16(rows.b[at * GROUP + i]);
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
template <Format T, bool MINIMA, int M, class Scale>
inline void add_rows(F* acc, const Quants<LAYOUTS[T].bits>& w, const Scale& scale, F second, Minima minima, const Rows& rows,
                     size_t at, const Sum* of) {
  I sums[M];
  const int32_t* zeros = rows.zeros + zero_at(zero_of(T)) * rows.all + at;
  const int8_t* q = rows.q + at * GROUP;
  for (int m = 0; m < M; m++) sums[m] = zero_of(T) ? int_set1(zeros[m]) : int_zero();
  if constexpr (T == Q6_K) {
    F products[M];
    w.template dot<0, 4, M>(q, sums);
    for (int m = 0; m < M; m++) products[m] = mul(to_float(sums[m]), scale.by);
    for (int m = 0; m < M; m++) sums[m] = int_set1(zeros[rows.all + m]);
    w.template dot<4, 4, M>(q, sums);
    for (int m = 0; m < M; m++) products[m] = fma(to_float(sums[m]), second, products[m]);
    for (int m = 0; m < M; m++) acc[m] = fma(products[m], set1(rows.step[at + m]), acc[m]);
  } else {
    w.template dot<0, 8, M>(q, sums);
    for (int m = 0; m < M; m++) acc[m] = fma(to_float(sums[m]), scale.times(rows.step + at + m), acc[m]);
  }
  if constexpr (MINIMA)
    for (int m = 0; m < M; m++) acc[m] = add_minima(acc[m], minima, of + TOGETHER * m);
}

template <Format T, bool MINIMA, int M, class Scale>
inline void add_group(F* acc, const Quants<LAYOUTS[T].bits>& w, const Scale& scale, F second, Minima minima, const Rows& rows,
                      int g) {
  constexpr int SOME = std::min(M, DOT_ROWS);
  const size_t at = size_t(g) * M;
  const Sum* of = rows.sums + size_t(g / TOGETHER) * TOGETHER * M;
  for (int m = 0; m < M; m += SOME)
    add_rows<T, MINIMA, SOME>(acc + m, w, scale, second, minima, rows, at + m, of + TOGETHER * m);
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
  F minimum = zero();  // of the group before
  for (int block = 0; block < groups / per_block; block++)
    for (int i = 0; i < per_block; i++, quants += group_bytes(L.bits)) {
      const int g = block * per_block + i;
      const Quants<L.bits> w(quants);
      ahead.step(step);
      if (asks) later.step();
      F by, second;
      load_scales<T>(p + block * L.scale_bytes, i, by, second);
      const std::conditional_t<(M > DOT_ROWS && T != Q6_K), ManyScales, Scale> scale(by);
      if constexpr (has_minima(T)) {
        if (rounds_minima(T)) second = fma(set1(zero_of(T)), by, second);
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
