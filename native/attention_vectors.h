// Products of attention in vector registers, for any number of rows. A row's bits do not depend on the others.
#pragma once
#include <algorithm>

#include "attention_pages.h"

constexpr int QUERY_ROWS = 32;  // rows of a chunk that share converted keys and values

// Scores of R rows against two pages of keys.
template <int R, class Source>
void score_pages(const Half* queries, const Source& keys, int first, int second, int dim, float* out) {
  F acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero();
  for (int d = 0; d < dim; d += 2) {
    const Pairs a = keys(first, PAGE_SIZE * d, 0, PAGE_SIZE), b = keys(second, PAGE_SIZE * d, 0, PAGE_SIZE);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      acc[r][0] = dot_pairs(acc[r][0], a, queries + r * dim + d);
      acc[r][1] = dot_pairs(acc[r][1], b, queries + r * dim + d);
    }
  }
  for (int r = 0; r < R; r++) store(out + r * KEYS, acc[r][0]), store(out + r * KEYS + PAGE_SIZE, acc[r][1]);
}

// Sums of 16 C columns of these pages' values for R rows, weighted.
template <int R, int C, class Source>
void sum_columns(const Half* shares, const Source& values, int pages, int dim, int d, const Partial* out) {
  F acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  for (int page = 0; page < pages; page++)
    for (int k = 0; k < PAGE_SIZE; k += 2) {
      Pairs v[C];
      for (int c = 0; c < C; c++) v[c] = values(page, k * dim, d + 16 * c, dim);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = dot_pairs(acc[r][c], v[c], shares + r * KEYS + page * PAGE_SIZE + k);
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out[r].out + d + 16 * c, acc[r][c]);
}

template <int R, class Source>
void sum_values(const Half* shares, const Source& values, int pages, int dim, const Partial* out) {
  constexpr int C = 2 * TILE_ROWS / R >= 4 ? 4 : 2;
  int d = 0;
  for (; d + 16 * C <= dim; d += 16 * C) sum_columns<R, C>(shares, values, pages, dim, d, out);
  for (; d < dim; d += 32) sum_columns<R, 2>(shares, values, pages, dim, d, out);
}

// Calls step<R>(row) for rows in tiles of TILE_ROWS, and once for what is left.
template <int R = TILE_ROWS, class Step>
inline void in_row_tiles(int count, int row, const Step& step) {
  for (; count - row >= R; row += R) step.template operator()<R>(row);
  if constexpr (R > 1)
    if (row < count) in_row_tiles<R - 1>(count, row, step);
}

// The two products of attention with a split's `count` pages, whose keys come first in `pages` and then their values:
// as they lie, or as pairs, made once for many rows.
class Products {
 public:
  Products(const uint16_t* const* pages, int count, int dim, int rows, Scratch& scratch)
      : pages_(pages), count_(count), dim_(dim), many_(rows > TILE_ROWS) {
    if (many_) pairs_ = make_pairs(pages, count, dim, scratch);
  }
  // weights [rows, KEYS] of queries [rows, dim].
  void score(const Half* queries, int rows, float* weights) const {
    from(pages_, pairs_.keys, [&](const auto& keys) {
      for (int i = 0; i < count_; i += 2)
        in_row_tiles(rows, 0, [&]<int R>(int r) {
          const int second = std::min(i + 1, count_ - 1);  // an odd one out is scored twice and looked at once
          score_pages<R>(queries + r * dim_, keys, i, second, dim_, weights + r * KEYS + PAGE_SIZE * i);
        });
    });
  }
  // Sums of values by shares [rows, KEYS].
  void sum(Half* shares, int rows, const Partial* out) const {
    from(pages_ + count_, pairs_.values, [&](const auto& values) {
      in_row_tiles(rows, 0, [&]<int R>(int r) { sum_values<R>(shares + r * KEYS, values, count_, dim_, out + r); });
    });
  }

 private:
  int page_size() const { return PAGE_SIZE * dim_; }
  template <class Step>
  void from(const uint16_t* const* pages, const Half* pairs, const Step& step) const {
    many_ ? step(FromPairs{pairs, page_size()}) : step(FromPage{pages});
  }
  const uint16_t* const* pages_;
  const int count_, dim_;
  const bool many_;
  SidePairs pairs_{};
};
