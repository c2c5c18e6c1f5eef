// Products of attention in vector registers, for any number of rows. A row's bits do not depend on the others.
#pragma once
#include <algorithm>

#include "attention_pages.h"

constexpr int QUERY_ROWS = 32;  // rows of a chunk for which keys and values are loaded into cache once

// 16 pairs of a page. Optionally the same pairs of a later page are prefetched.
template <bool ASK>
struct PairsOf {
  const uint8_t* const* pages;
  Pairs operator()(int page, int at) const {
    if (ASK) fetch(pages[page + AHEAD_PAGES] + 2 * at);
    if (ASK && ASKS_TWICE) fetch(pages[page + AHEAD_PAGES / 2] + 2 * at);
    return load_pairs((const uint16_t*)pages[page] + at);
  }
};

// The number of sums of 16 that a tile of R rows has for each row.
template <int R>
constexpr int SUMS = TILE_SUMS / R >= 4 ? 4 : (TILE_SUMS / R >= 2 ? 2 : 1);

// Scores of R rows against P pages of keys from `first` on. Beyond `last`, page `last` is scored again.
template <int R, int P, class Source>
void score_pages(const Half* queries, const Source& keys, int first, int last, int dim, float* out) {
  F acc[R][P];
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) acc[r][p] = zero();
  for (int d = 0; d < dim; d += 2) {
    Pairs k[P];
    for (int p = 0; p < P; p++) k[p] = keys(std::min(first + p, last), PAGE_SIZE * d);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      for (int p = 0; p < P; p++) acc[r][p] = dot_pairs(acc[r][p], k[p], queries + r * dim + d);
  }
  for (int r = 0; r < R; r++)
    for (int p = 0; p < P; p++) store(out + r * KEYS + PAGE_SIZE * p, acc[r][p]);
}

// Weighted sums of 16 C columns of these pages' values for R rows.
template <int R, int C, class Source>
void sum_columns(const Half* shares, const Source& values, int pages, int dim, int d, const Partial* out) {
  F acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  for (int page = 0; page < pages; page++)
    for (int k = 0; k < PAGE_SIZE; k += 2) {
      Pairs v[C];
      for (int c = 0; c < C; c++) v[c] = values(page, k * dim + 2 * (d + 16 * c));
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = dot_pairs(acc[r][c], v[c], shares + r * KEYS + page * PAGE_SIZE + k);
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out[r].out + d + 16 * c, acc[r][c]);
}

template <int R, class Source>
void sum_values(const Half* shares, const Source& values, int pages, int dim, const Partial* out) {
  constexpr int C = SUMS<R>, REST = std::min(C, 2);
  int d = 0;
  for (; d + 16 * C <= dim; d += 16 * C) sum_columns<R, C>(shares, values, pages, dim, d, out);
  for (; d < dim; d += 16 * REST) sum_columns<R, REST>(shares, values, pages, dim, d, out);
}

// Calls step<R>(row) for rows in tiles of TILE_ROWS, and once for the rest.
template <int R = TILE_ROWS, class Step>
inline void in_row_tiles(int count, int row, const Step& step) {
  for (; count - row >= R; row += R) step.template operator()<R>(row);
  if constexpr (R > 1)
    if (row < count) in_row_tiles<R - 1>(count, row, step);
}

// The two products of attention with the first `count` pages of a split, in `keys` or `values`. Pages ahead are prefetched
// line by line with the lines of others, and are those that follow in these lists.
struct Products {
  int dim;

  // weights [rows, KEYS] of queries [rows, dim].
  void score(const Half* queries, int rows, const uint8_t* const* keys, int count, float* weights, const Ahead& ahead) const {
    for (int i = 0; i < count; i += 2) {
      in_row_tiles(rows, 0, [&]<int R>(int r) {
        constexpr int P = std::min(2, SUMS<R>);
        from(keys, ahead.pages && r == 0, [&](const auto& pairs) {
          for (int page = i; page < std::min(i + 2, count); page += P)
            score_pages<R, P>(queries + r * dim, pairs, page, count - 1, dim, weights + r * KEYS + PAGE_SIZE * page);
        });
      });
    }
  }
  // Sums of values weighted by shares [rows, KEYS].
  void sum(const Half* shares, int rows, const uint8_t* const* values, int count, const Partial* out,
           const Ahead& ahead) const {
    in_row_tiles(rows, 0, [&]<int R>(int r) {
      from(values, ahead.pages && r == 0,
           [&](const auto& pairs) { sum_values<R>(shares + r * KEYS, pairs, count, dim, out + r); });
    });
  }

 private:
  template <class Step>
  static void from(const uint8_t* const* pages, bool ask, const Step& step) {
    ask ? step(PairsOf<true>{pages}) : step(PairsOf<false>{pages});
  }
};
