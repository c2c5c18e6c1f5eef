// Products of attention on AMX, for any number of rows. A row's bits do not depend on the others. Pages hold pairs in
// the layout of tiles; an instruction adds 32 columns of keys, or the 16 slots of a page of values.
#pragma once
#include <algorithm>

#include "attention_pages.h"
#include "tiles.h"

constexpr int QUERY_ROWS = 64;  // rows of a chunk for which keys and values are loaded into cache once

// The two products of attention with the first `count` pages of a split, in `keys` or `values`.
struct Products {
  int dim;

  // weights [rows, KEYS] of queries [rows, dim].
  void score(const Half* queries, int rows, const uint8_t* const* keys, int count, float* weights, const Ahead& ahead) const {
    in_pairs(rows, [&](int row, bool two) {
      const Half* q = queries + row * dim;
      for (int i = 0; i < count; i += 2) {
        const int second = std::min(i + 1, count - 1);  // with an odd count the last page is scored twice
        const auto k = (const uint16_t*)keys[i], l = (const uint16_t*)keys[second];
        if (row == 0) ahead.ask(i), ahead.ask(second);
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int d = 0; d < dim; d += 32) {
          tile_load<4>(q + d, 2 * dim), tile_load<6>(k + d * PAGE_SIZE), tile_dot<0, 4, 6>();
          tile_load<6>(l + d * PAGE_SIZE), tile_dot<1, 4, 6>();
          if (!two) continue;
          tile_load<4>(q + TILE * dim + d, 2 * dim), tile_dot<3, 4, 6>();
          tile_load<6>(k + d * PAGE_SIZE), tile_dot<2, 4, 6>();
        }
        float *s = weights + row * KEYS + PAGE_SIZE * i, *t = weights + row * KEYS + PAGE_SIZE * second;
        constexpr int STRIDE = KEYS * sizeof(float);
        tile_store<0>(s, STRIDE), tile_store<1>(t, STRIDE);
        if (two) tile_store<2>(s + TILE * KEYS, STRIDE), tile_store<3>(t + TILE * KEYS, STRIDE);
      }
    });
  }
  // Sums of values weighted by shares [rows, KEYS]. Rows of `out` have a constant stride.
  void sum(const Half* shares, int rows, const uint8_t* const* values, int count, const Partial* out,
           const Ahead& ahead) const {
    const long stride = rows > 1 ? (out[1].out - out[0].out) * sizeof(float) : long(LINE);
    in_pairs(rows, [&](int row, bool two) {
      for (int d = 0; d < dim; d += 32) {
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int i = 0; i < count; i++) {
          const Half* share = shares + row * KEYS + PAGE_SIZE * i;
          const uint16_t* v = (const uint16_t*)values[i] + 2 * d;
          if (row == 0 && d == 0) ahead.ask(i);
          constexpr int STRIDE = KEYS * sizeof(Half);
          tile_load<5>(share, STRIDE), tile_load<7>(v, 4 * dim), tile_dot<0, 5, 7>();
          tile_load<7>(v + 32, 4 * dim), tile_dot<1, 5, 7>();
          if (!two) continue;
          tile_load<5>(share + TILE * KEYS, STRIDE), tile_dot<3, 5, 7>();
          tile_load<7>(v, 4 * dim), tile_dot<2, 5, 7>();
        }
        float* place = out[row].out + d;
        tile_store<0>(place, stride), tile_store<1>(place + 16, stride);
        if (two) place = out[row + TILE].out + d, tile_store<2>(place, stride), tile_store<3>(place + 16, stride);
      }
    });
  }

 private:
  // Calls step(row, whether two tiles of rows begin there).
  template <class Step>
  static void in_pairs(int rows, const Step& step) {
    for (int row = 0; row < rows;) {
      const bool two = rows - row >= 2 * TILE;
      tile_shapes().for_attention(std::min(TILE, rows - row));
      step(row, two);
      row += two ? 2 * TILE : TILE;
    }
  }
};
