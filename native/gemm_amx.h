// Activations times panels on AMX: both in bfloat16, sums in float32. Replaces gemm.h.
//
// A row's sum runs over its groups in order, one instruction per group, for one row and for 32. So the bits do not
// depend on the number of rows.
#pragma once
#include <memory>

#include "prefetch.h"
#include "unpack_amx.h"

constexpr bool rounds_minima(Format) { return false; }  // not separately from weights

// The place of a row: its first group, the number of rows from it to the end of its tile, and the tile's rows.
struct Place {
  size_t first;
  int left, stride;
  size_t group(int g) const { return first + size_t(g) * stride; }
};

// Packed rows for products. A tile of rows holds one group after another, each with the tile's rows side by side.
struct Rows {
  uint16_t* b;
  int count, cols;
  int groups() const { return cols / GROUP; }
  bool idle_behind(int) const { return false; }
  int tile_rows(int start) const { return std::clamp(count - start, 0, TILE); }
  Place place(int row) const {
    const int start = row / TILE * TILE, before = row - start, stride = tile_rows(start);
    return {size_t(start) * groups() + before, stride - before, stride};
  }
  static constexpr int MAX_IDLE = 0;  // see rows.h
  static size_t bytes(size_t rows, int cols) { return 2 * rows * cols; }
  static size_t tiled_bytes(size_t rows, int cols) { return bytes(rows, cols); }
  static Rows in(uint8_t* memory, int count, int cols) { return {(uint16_t*)memory, count, cols}; }
};

// The number formats that the matrices of a layer multiply: here there is only one.
struct Kinds {
  void add(Format) {}
  void add(Kinds) {}
};

// Stores 32 columns of a row. The middle two of four columns are swapped, so that a mask turns bytes of weights into
// pairs.
inline void put_group(F a, F b, Rows rows, size_t at) {
  const F lift = power_of_two(LIFT);
  const I pairs = (I)_mm512_cvtne2ps_pbh(mul(b, lift), mul(a, lift));
  constexpr int ORDER = 0b11'01'10'00;
  _mm512_storeu_si512(rows.b + at * GROUP, _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(pairs, ORDER), ORDER));
}

// Prefetches all rows at once: see rows.h.
inline void fetch_rows(Kinds, Rows rows) { fetch_near(rows.b, Rows::bytes(rows.count, rows.cols)); }

inline void put_group(Kinds, F a, F b, Rows rows, Place place, int g) { put_group(a, b, rows, place.group(g)); }

// The same for 16 adjacent rows: a[i] and b[i].
inline void put_groups(Kinds, const F* a, const F* b, Rows rows, Place place, int g) {
  for (int i = 0; i < PANEL; i++) put_group(a[i], b[i], rows, place.group(g) + i);
}

inline void clear_idle(Kinds, const Rows&, int) {}

// Copies all groups of a row to a row of other rows.
inline void copy_row(Kinds, Rows from, int row, Rows to, int to_row) {
  const Place source = from.place(row), target = to.place(to_row);
  for (int g = 0; g < from.groups(); g++)
    std::memcpy(to.b + target.group(g) * GROUP, from.b + source.group(g) * GROUP, GROUP * sizeof(*to.b));
}

// The form of 32 columns that products use.
inline void read_group(Kinds, Rows rows, Place place, int g, float* out) {
  const size_t at = place.group(g);
  constexpr int ORDER[] = {0, 2, 1, 3};
  for (int i = 0; i < GROUP; i++) out[i / 4 * 4 + ORDER[i % 4]] = std::ldexp(from_bf16(rows.b[at * GROUP + i]), -LIFT);
}
// A panel's 16 weights of each column, in the form that products use.
inline void read_panel(const Matrix& matrix, int panel, F* out) {
  const F factor = mul(factor_of(matrix), power_of_two(LIFT));
  with_format(matrix.format, [&]<Format T>() {
    Unpacker<T> unpack({&matrix, panel, 0}, 0);
    I w[TILE];
    for (int g = 0; g < matrix.groups(); g++) {
      unpack(g, w);
      for (int i = 0; i < TILE; i++) {
        F* pair = out + g * GROUP + i / 2 * 4 + i % 2;
        pair[0] = mul(firsts(w[i]), factor), pair[2] = mul(seconds(w[i]), factor);
      }
    }
  });
}

constexpr int ROW_BLOCK = 512;       // rows for which weights are unpacked once

// The most panels that a member takes at a time, with many rows. Rows that do not stay in the L2 cache are loaded again
// for every part, so all panels of the part should use them at once.
inline int most_panels(int count, int cols) {
  constexpr size_t STAYS = 1 << 20;
  return Rows::bytes(std::min(count, ROW_BLOCK), cols) <= STAYS ? 8 : 28;
}

constexpr int MANY_GROUPS = 18;  // groups unpacked at a time for many rows: three quarters of the L1 cache

// Groups of two panels as tiles.
struct alignas(LINE) Unpacked {
  I groups[2][MANY_GROUPS][TILE];
};

// Prefetch, during products, of the groups to unpack next. The next groups of a panel are used only after all other
// panels, and would be evicted by then.
class Coming {
 public:
  void begin() { pieces_ = 0, bytes_ = 0, at_ = end_ = nullptr; }
  // Adds groups of a panel.
  void add(const Job& job, int first, int count) {
    add(job.scales(first), job.scales(first + count - 1) + job.matrix->layout().scale_bytes);
    add(job.quants(first), job.quants(first + count));
  }
  // Sets the number of steps.
  void spread(int steps) { lines_ = int(bytes_ / LINE) / steps + 1; }
  void step() {
    if (at_ >= end_) {
      if (!pieces_) return;
      at_ = begins_[--pieces_], end_ = ends_[pieces_];
    }
    for (int i = 0; i < lines_; i++, at_ += LINE) fetch(at_);
  }

 private:
  void add(const uint8_t* from, const uint8_t* to) { begins_[pieces_] = from, ends_[pieces_++] = to, bytes_ += to - from; }
  const uint8_t *begins_[4], *ends_[4], *at_, *end_;  // a panel's scales and quants
  int pieces_, lines_;
  size_t bytes_;
};

// A member's working memory for multiplications, until the end of a pass.
struct Workspace {
  std::unique_ptr<Unpacked> weights = std::make_unique<Unpacked>();
  Prefetcher ahead;
  void end() { ahead.end(), tile_shapes().release(); }
};

// Adds groups of one or two tiles of rows times one or two panels. Weights stay in the L1 cache and rows bypass it; the
// sums `next` are prefetched into it.
template <bool TWO_TILES, bool TWO_PANELS>
inline void dot_groups(const uint16_t* a, int a_rows, const uint16_t* b, int b_rows, const Unpacked& w, int count,
                       const F* next, Coming& coming) {
  for (int g = 0; g < count; g++, a += a_rows * GROUP, b += b_rows * GROUP) {
    if (g < TILE)
      for (int i = 2 * g; i < 2 * g + 2; i++) fetch_to_change(next + i), fetch_to_change(next + ROW_BLOCK + i);
    coming.step();
    tile_stream<4>(a), tile_load<6>(w.groups[0][g]);
    if constexpr (TWO_TILES) tile_stream<5>(b);
    if constexpr (TWO_PANELS) tile_load<7>(w.groups[1][g]);
    tile_dot<0, 4, 6>();
    if constexpr (TWO_PANELS) tile_dot<1, 4, 7>();
    if constexpr (TWO_TILES) tile_dot<2, 5, 6>();
    if constexpr (TWO_TILES && TWO_PANELS) tile_dot<3, 5, 7>();
  }
}

// Groups from `g` on of one or two panels, for all rows, from a buffer of unpacked weights. Sums are kept in memory
// while other rows are multiplied.
template <bool TWO_PANELS>
void multiply_groups(const Job* jobs, Rows rows, int first, int count, int g, int n, F* sums, const Unpacked& w,
                     Coming& coming) {
  const int groups = rows.groups();
  for (int row = first; row < first + count; row += 2 * TILE) {
    const int left = first + count - row;
    const bool two = left > TILE;
    tile_shapes().for_products(std::min(2 * TILE, left));
    F *s = sums + (row - first), *t = s + ROW_BLOCK;
    if (g == 0) {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    } else {
      tile_stream<0>(s);
      if (TWO_PANELS) tile_stream<1>(t);
      if (two) tile_stream<2>(s + TILE);
      if (TWO_PANELS && two) tile_stream<3>(t + TILE);
    }
    const int a_rows = rows.tile_rows(row), b_rows = rows.tile_rows(row + TILE);
    const uint16_t* a = rows.b + (size_t(row) * groups + size_t(g) * a_rows) * GROUP;
    const uint16_t* b = rows.b + (size_t(row + TILE) * groups + size_t(g) * b_rows) * GROUP;
    if (two)
      dot_groups<true, TWO_PANELS>(a, a_rows, b, b_rows, w, n, s + 2 * TILE, coming);
    else
      dot_groups<false, TWO_PANELS>(a, a_rows, b, b_rows, w, n, s, coming);
    tile_store<0>(s);
    if (TWO_PANELS) tile_store<1>(t);
    if (two) tile_store<2>(s + TILE);
    if (TWO_PANELS && two) tile_store<3>(t + TILE);
    if (g + n == groups)
      for (int i = 0; i < 1 + TWO_PANELS; i++) {
        F *sum = s + i * ROW_BLOCK, factor = factor_of(*jobs[i].matrix);
        for (int r = 0; r < std::min(2 * TILE, left); r++) sum[r] = mul(sum[r], factor);
      }
  }
}

// One panel and at most two tiles of rows, whose sums stay in tiles. A group is multiplied some time after it was
// unpacked, as a load into a tile waits for recent stores; unpacking and products overlap.
template <Format T, bool TWO_TILES>
[[gnu::noinline]] void multiply_few(const Job& job, Rows rows, int first, int count, F* sums, Workspace& work) {
  constexpr int DELAY = 2, ROOM = 4;
  const int groups = rows.groups(), a_rows = rows.tile_rows(first), b_rows = rows.tile_rows(first + TILE);
  const uint16_t* a = rows.b + size_t(first) * groups * GROUP;
  const uint16_t* b = a + size_t(TILE) * groups * GROUP;
  I(*weights)[TILE] = work.weights->groups[0];
  Unpacker<T> unpack(job, 0);
  Lookahead<T> ahead(job, job.next);
  const bool asks = work.ahead.due(groups);
  tile_shapes().for_products(count);
  tile_zero<0>();
  if (TWO_TILES) tile_zero<2>();
  for (int g = 0; g < groups + DELAY; g++) {
    if (g < groups) ahead.step(), unpack(g, weights[g % ROOM]);
    if (asks) work.ahead.step();
    if (g < DELAY) continue;
    tile_load<6>(weights[(g - DELAY) % ROOM]), tile_load<4>(a), tile_dot<0, 4, 6>();
    if (TWO_TILES) tile_load<5>(b), tile_dot<2, 5, 6>();
    a += a_rows * GROUP, b += b_rows * GROUP;
  }
  tile_store<0>(sums);
  if (TWO_TILES) tile_store<2>(sums + TILE);
  const F factor = factor_of(*job.matrix);
  for (int r = 0; r < count; r++) sums[r] = mul(sums[r], factor);
}

// Multiplies all panels with one cached part of the rows after another.
inline void multiply_many(const Job* jobs, int n, Rows rows, int first, int count, F* sums, Workspace& work) {
  Unpacked& w = *work.weights;
  Coming coming;
  const int groups = rows.groups(), part = even_part(groups, MANY_GROUPS);
  auto size_of = [&](int g) { return std::min(part, groups - g); };
  for (int g = 0; g < groups; g += part) {
    const int size = size_of(g), steps = ceil_div(count, 2 * TILE) * size;
    for (int i = 0; i < n; i += 2) {
      const bool two = i + 1 < n;
      for (int k = 0; k < 1 + two; k++)
        with_format(jobs[i + k].matrix->format, [&]<Format T>() {
          Unpacker<T> unpack(jobs[i + k], g);
          for (int group = 0; group < size; group++) unpack(g + group, w.groups[k][group]);
        });
      auto add = [&](int i, int g) {
        for (int k = i; k < std::min(i + 2, n); k++) coming.add(jobs[k], g, size_of(g));
      };
      coming.begin();
      if (i + 2 < n)
        add(i + 2, g);
      else if (g + size < groups)
        add(0, g + size);
      coming.spread(steps);
      auto* action = two ? multiply_groups<true> : multiply_groups<false>;
      action(jobs + i, rows, first, count, g, size, sums + i * ROW_BLOCK, w, coming);
    }
  }
}

// 16 outputs of each of `count` rows from `first` on, for each of n panels: sums [n][ROW_BLOCK].
inline void multiply(const Job* jobs, int n, Rows rows, int first, int count, F* sums, Workspace& work) {
  if (count > 2 * TILE) return multiply_many(jobs, n, rows, first, count, sums, work);
  for (int i = 0; i < n; i++)
    with_format(jobs[i].matrix->format, [&]<Format T>() {
      auto* action = count > TILE ? multiply_few<T, true> : multiply_few<T, false>;
      action(jobs[i], rows, first, count, sums + i * ROW_BLOCK, work);
    });
}
