// Rows of activations, packed for products: int8 with a scale per group of 32 columns, or bfloat16.
#pragma once
#include <algorithm>

#include "rounding.h"
#include "scales.h"
#include "weights.h"

// Rows share a pass over a panel, and so its reading and unpacking, in tiles. Tiles have PASS_ROWS rows, whose sums are
// in memory; the rest is in tiles of half as many, and so on. The sums of the smallest tiles fit in registers.
constexpr int ROW_BLOCK = PASS_ROWS;  // rows whose activations stay in cache for all panels

// The rows of tiles that hold so many. Each tile is a pass over the weights, so three small ones take longer than a large
// one in which some rows are idle.
constexpr int tiled_rows(int count) {
  const int whole = round_up(count, 16);
  return whole - count <= MAX_IDLE_ROWS ? whole : count % 4 == 3 ? count + 1 : count;
}

// The index, in a group's zeros, of the initial value of sums for a zero point: 8, 16, 128, or 32 for each half (Q6_K).
constexpr int ZEROS = 5;
constexpr int zero_at(int zero) { return zero == 8 ? 0 : zero == 16 ? 1 : zero == 128 ? 2 : 3; }
constexpr bool rounds_minima(Format format) { return FROM_MIDDLE && has_minima(format); }
// The quant that represents 0 in products.
constexpr int zero_of(Format format) {
  if (SIGNED_WEIGHTS && LAYOUTS[format].bits == 8) return 0;
  return rounds_minima(format) ? 1 << (LAYOUTS[format].bits - 1) : LAYOUTS[format].zero;
}
// The scales of a block's group, and its minima counted from that quant.
template <Format T>
inline void load_factors(const uint8_t* block, int group, F& scale, F& second) {
  load_scales<T>(block, group, scale, second);
  if (rounds_minima(T)) second = fma(set1(zero_of(T)), scale, second);
}

// The place of a row: its first group and that group's sum, the rows from it to the end of its tile, and those in it.
struct Place {
  size_t first, first_sum;
  int left, stride;
  size_t group(int g) const { return first + size_t(g) * stride; }
  size_t sum(int g) const { return first_sum + size_t(g / TOGETHER) * TOGETHER * stride + g % TOGETHER; }
};

// Packed rows. A tile holds one group after another, each with the tile's rows side by side.
struct Rows {
  static constexpr int MAX_IDLE = MAX_IDLE_ROWS;
  int8_t* q;
  float* step;     // scales of quants
  int32_t* zeros;  // corrections for the weights' zero points: by format, with stride `all`
  Sum* sums;       // step * sum of q: by row, in blocks of TOGETHER groups
  uint16_t* b;     // the row in bfloat16
  int count, tiled, cols;  // tiled: `count`, and idle rows that fill a tile
  size_t all;              // groups of all rows
  int groups() const { return cols / GROUP; }
  // Whether idle rows begin there.
  bool idle_behind(int row) const { return row == count && count != tiled; }
  // The rows from `row` on, which begins a tile.
  Rows at(int row) const {
    const size_t g = size_t(row) * groups();
    return {q + GROUP * g, step + g, zeros + g, sums + row * sums_of(cols), b + GROUP * g, count - row,
            tiled - row,   cols,     all};
  }
  Place place(int row) const {
    int start = row / PASS_ROWS * PASS_ROWS, stride = PASS_ROWS;
    for (;; stride /= 2) {
      for (; row - start >= stride && tiled - start >= stride;) start += stride;
      if (tiled - start >= stride) break;
    }
    const int before = row - start;
    return {size_t(start) * groups() + before, start * sums_of(cols) + TOGETHER * before, stride - before, stride};
  }
  // Whether the group is the last, and its block of TOGETHER groups is incomplete.
  bool lonely(int g) const { return g + 1 == groups() && (g + 1) % TOGETHER; }
  static size_t sums_of(int cols) { return round_up(cols / GROUP, TOGETHER); }
  static size_t bytes(int count, int cols) { return tiled_bytes(tiled_rows(count), cols); }
  static size_t tiled_bytes(size_t rows, int cols) {
    return rows * (3 * cols + size_t(cols / GROUP) * 4 * (1 + ZEROS) + sums_of(cols) * sizeof(Sum));
  }
  static Rows in(uint8_t* memory, int count, int cols) {
    const int tiled = tiled_rows(count);
    const size_t g = size_t(tiled) * (cols / GROUP);
    float* step = (float*)(memory + GROUP * g);
    int32_t* zeros = (int32_t*)(step + g);
    Sum* sums = (Sum*)(zeros + ZEROS * g);
    return {(int8_t*)memory, step, zeros, sums, (uint16_t*)(sums + tiled * sums_of(cols)), count, tiled, cols, g};
  }
};

// The formats of activations that the matrices of a layer multiply.
struct Kinds {
  bool ints = false, bf16 = false;
  uint32_t zeros = 0;  // bit mask of the group's zeros that they use
  void add(Format format) {
    (format == BF16 ? bf16 : ints) = true;
    if (format != BF16 && zero_of(format)) zeros |= (format == Q6_K ? 3 : 1) << zero_at(zero_of(format));
  }
  void add(const Kinds& other) { ints |= other.ints, bf16 |= other.bf16, zeros |= other.zeros; }
  // Calls action(index, zero point, half) for each; `half` is the half of the group, or -1 for both.
  template <class Action>
  void each_zero(const Action& action) const {
    constexpr int OF[ZEROS] = {8, 16, 128, 32, 32}, HALF[ZEROS] = {-1, -1, -1, 0, 1};
    for (int which = 0; which < ZEROS; which++)
      if (zeros >> which & 1) action(which, OF[which], HALF[which]);
  }
};

// Prefetches all rows at once. Parts of them are in the caches of other members, and products would wait for each line.
inline void fetch_rows(Kinds kinds, Rows rows) {
  if (kinds.bf16) fetch_near(rows.b, rows.all * GROUP * sizeof(*rows.b));
  if (!kinds.ints) return;
  fetch_near(rows.q, rows.all * GROUP);
  fetch_near(rows.step, rows.all * sizeof(*rows.step));
  fetch_near(rows.sums, rows.tiled * Rows::sums_of(rows.cols) * sizeof(*rows.sums));
  kinds.each_zero([&](int which, int, int) { fetch_near(rows.zeros + which * rows.all, rows.all * sizeof(*rows.zeros)); });
}

inline void quantize_group(Kinds kinds, F a, F b, Rows rows, Place place, int g) {
  const size_t at = place.group(g);
  I qa, qb;
  const float step = to_int8(a, b, qa, qb);
  store_int8(rows.q + at * GROUP, qa), store_int8(rows.q + at * GROUP + 16, qb);
  const int32_t halves[] = {sum(qa), sum(qb)}, both = halves[0] + halves[1];
  kinds.each_zero(
      [&](int which, int zero, int half) { rows.zeros[which * rows.all + at] = -zero * (half < 0 ? both : halves[half]); });
  rows.step[at] = step;
  Sum* out = rows.sums + place.sum(g);
  put_sum(out, step * float(both));
  if (rows.lonely(g)) put_sum(out + 1, 0);
}

// The same for 16 adjacent rows.
inline void quantize_groups(Kinds kinds, const F* a, const F* b, Rows rows, Place place, int g) {
  const size_t at = place.group(g);
  F highest[PANEL];
#pragma GCC unroll 16
  for (int i = 0; i < PANEL; i++) highest[i] = larger(abs(a[i]), abs(b[i]));
  const F step = step_of(top_sizes(highest));
  float inverse[PANEL];
  store(inverse, inverse_of(step));
  int8_t* q = rows.q + at * GROUP;
  I qa[PANEL], qb[PANEL];
#pragma GCC unroll 16
  for (int i = 0; i < PANEL; i++, q += GROUP) {
    qa[i] = to_int(mul(a[i], set1(inverse[i]))), qb[i] = to_int(mul(b[i], set1(inverse[i])));
    store_int8(q, qa[i]), store_int8(q + 16, qb[i]);
  }
  const I halves[] = {sums(qa), sums(qb)}, both = add(halves[0], halves[1]);
  kinds.each_zero([&](int which, int zero, int half) {
    store(rows.zeros + which * rows.all + at, mul(half < 0 ? both : halves[half], int_set1(-zero)));
  });
  store(rows.step + at, step);
  Sum* out = rows.sums + place.sum(g);
  put_sums(out, mul(step, to_float(both)));
  if (rows.lonely(g)) put_sums(out + 1, zero());
}

inline void round_group(F a, F b, Rows rows, size_t at) {
  store_bf16(rows.b + at * GROUP, a), store_bf16(rows.b + at * GROUP + 16, b);
}

// Stores 32 columns of a row.
inline void put_group(Kinds kinds, F a, F b, Rows rows, Place place, int g) {
  if (kinds.ints) quantize_group(kinds, a, b, rows, place, g);
  if (kinds.bf16) round_group(a, b, rows, place.group(g));
}

// The same for 16 adjacent rows: a[i] and b[i].
inline void put_groups(Kinds kinds, const F* a, const F* b, Rows rows, Place place, int g) {
  if (kinds.ints) quantize_groups(kinds, a, b, rows, place, g);
  for (int i = 0; i < PANEL && kinds.bf16; i++) round_group(a[i], b[i], rows, place.group(g) + i);
}

// Clears a group of idle rows. Their products go nowhere, but processors are slow with very small numbers.
[[gnu::noinline, gnu::cold]] inline void clear_idle(Kinds kinds, const Rows& rows, int g) {
  for (int row = rows.count; row < rows.tiled; row++) {
    const Place place = rows.place(row);
    if (kinds.bf16) std::fill_n(rows.b + place.group(g) * GROUP, GROUP, 0);
    if (!kinds.ints) continue;
    rows.step[place.group(g)] = 0;
    for (int i = 0; i < 1 + rows.lonely(g); i++) put_sum(rows.sums + place.sum(g) + i, 0);
  }
}

// Copies all groups of a row to a row of other rows.
inline void copy_row(Kinds kinds, Rows from, int row, Rows to, int to_row) {
  const Place source = from.place(row), target = to.place(to_row);
  for (int g = 0; g < from.groups(); g++) {
    const size_t at = source.group(g), to_at = target.group(g);
    if (kinds.bf16) std::memcpy(to.b + to_at * GROUP, from.b + at * GROUP, GROUP * sizeof(*to.b));
    if (!kinds.ints) continue;
    std::memcpy(to.q + to_at * GROUP, from.q + at * GROUP, GROUP);
    to.step[to_at] = from.step[at];
    kinds.each_zero([&](int which, int, int) { to.zeros[which * to.all + to_at] = from.zeros[which * from.all + at]; });
    for (int i = 0; i < 1 + from.lonely(g); i++) to.sums[target.sum(g) + i] = from.sums[source.sum(g) + i];
  }
  if (to.idle_behind(to_row + 1))
    for (int g = 0; g < to.groups(); g++) clear_idle(kinds, to, g);
}

// The form of 32 columns that products use.
inline void read_group(Kinds kinds, Rows rows, Place place, int g, float* out) {
  const size_t at = place.group(g);
  for (int i = 0; i < GROUP; i++)
    out[i] = kinds.ints ? rows.step[at] * float(rows.q[at * GROUP + i]) : from_bf16(rows.b[at * GROUP + i]);
}
