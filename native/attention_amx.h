// Products of attention on AMX, for any number of rows. A row's bits do not depend on the others.
#pragma once
#include <algorithm>

#include "attention_pages.h"
#include "tiles.h"

constexpr int QUERY_ROWS = 64;  // rows of a chunk that share converted keys and values

// The two products of attention with a split's `count` pages, whose keys come first in `pages` and then their values.
class Products {
 public:
  Products(const uint16_t* const* pages, int count, int dim, int, Scratch& scratch)
      : count_(count), dim_(dim), pairs_(make_pairs(pages, count, dim, scratch)) {
    // An instruction takes two pages.
    if (count % 2) std::fill_n(pairs_.values + count * page_size(), page_size(), Half(0));
  }
  // weights [rows, KEYS] of queries [rows, dim].
  void score(const Half* queries, int rows, float* weights) const {
    in_pairs(rows, [&](int row, bool two) {
      for (int i = 0; i < count_; i += 2) {
        const int second = std::min(i + 1, count_ - 1);  // an odd one out is scored twice
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int d = 0; d < dim_; d += 32) {
          const Half* q = queries + row * dim_ + d;
          tile_load<4>(q, 2 * dim_), tile_load<6>(pairs_.keys + i * page_size() + d * PAGE_SIZE);
          tile_dot<0, 4, 6>();
          tile_load<7>(pairs_.keys + second * page_size() + d * PAGE_SIZE), tile_dot<1, 4, 7>();
          if (two) tile_load<5>(q + TILE * dim_, 2 * dim_), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
        }
        float *s = weights + row * KEYS + PAGE_SIZE * i, *t = s + PAGE_SIZE * (second - i);
        constexpr int STRIDE = KEYS * sizeof(float);
        tile_store<0>(s, STRIDE), tile_store<1>(t, STRIDE);
        if (two) tile_store<2>(s + TILE * KEYS, STRIDE), tile_store<3>(t + TILE * KEYS, STRIDE);
      }
    });
  }
  // Sums of values by shares [rows, KEYS]. Rows of `out` lie evenly apart.
  void sum(Half* shares, int rows, const Partial* out) const {
    if (count_ % 2)
      for (int row = 0; row < rows; row++) std::fill_n(shares + row * KEYS + PAGE_SIZE * count_, PAGE_SIZE, Half(0));
    const long stride = rows > 1 ? (out[1].out - out[0].out) * sizeof(float) : long(LINE);
    in_pairs(rows, [&](int row, bool two) {
      for (int d = 0; d < dim_; d += 32) {
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int i = 0; i < count_; i += 2) {
          const Half *share = shares + row * KEYS + PAGE_SIZE * i, *v = pairs_.values + i * page_size() + 2 * d;
          constexpr int STRIDE = KEYS * sizeof(Half);
          tile_load<4>(share, STRIDE), tile_load<6>(v, 4 * dim_);
          tile_dot<0, 4, 6>();
          tile_load<7>(v + 32, 4 * dim_), tile_dot<1, 4, 7>();
          if (two) tile_load<5>(share + TILE * KEYS, STRIDE), tile_dot<2, 5, 6>(), tile_dot<3, 5, 7>();
        }
        float* place = out[row].out + d;
        tile_store<0>(place, stride), tile_store<1>(place + 16, stride);
        if (two) place = out[row + TILE].out + d, tile_store<2>(place, stride), tile_store<3>(place + 16, stride);
      }
    });
  }

 private:
  int page_size() const { return PAGE_SIZE * dim_; }
  // Calls step(row, whether there is a second tile of rows).
  template <class Step>
  static void in_pairs(int rows, const Step& step) {
    for (int row = 0; row < rows; row += 2 * TILE) {
      tile_rows().set(std::min(2 * TILE, rows - row));
      step(row, rows - row > TILE);
    }
  }
  const int count_, dim_;
  const SidePairs pairs_;
};
