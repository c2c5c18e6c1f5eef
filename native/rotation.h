// Rotation of a head by a Hadamard matrix, which spreads a few large columns over all: codes of few bits then lose less.
#pragma once
#include "simd.h"

constexpr int MAX_HEAD_DIM = 512;  // sums of so many products of codes and integers of 16 bits fit into 32 bits

// The columns that are rotated together: the largest power of 2 that divides the width.
inline int rotated_together(int dim) { return dim & -dim; }

// One step within 16 lanes: the sum of two lanes H apart in the first, their difference in the second.
template <int H>
inline F step_in_lanes(F v) {
  alignas(64) static constexpr auto SIGNS = [] {
    std::array<float, 16> signs{};
    for (int i = 0; i < 16; i++) signs[i] = i & H ? -1.0f : 1.0f;
    return signs;
  }();
  return fma(v, load(SIGNS.data()), swap_lanes<H>(v));
}

// x times the matrix, for each block of columns, not normalized: twice is x times the block's width. `dim` is a multiple
// of 16. Each number is the result of additions in one order, so its bits are those of models/kv_formats.py.
inline void rotate(float* x, int dim) {
  const int block = rotated_together(dim);
  for (int d = 0; d < dim; d += 16)
    store(x + d, step_in_lanes<8>(step_in_lanes<4>(step_in_lanes<2>(step_in_lanes<1>(load(x + d))))));
  for (int half = 16; half < block; half *= 2)
    for (int start = 0; start < dim; start += 2 * half)
      for (int d = start; d < start + half; d += 16) {
        const F a = load(x + d), b = load(x + d + half);
        store(x + d, add(a, b)), store(x + d + half, sub(a, b));
      }
}

// Back to what `rotate` was given.
inline void rotate_back(float* x, int dim) {
  rotate(x, dim);
  const F share = set1(1.0f / rotated_together(dim));  // a power of 2
  for (int d = 0; d < dim; d += 16) store(x + d, mul(load(x + d), share));
}

// The largest magnitude; NaN if there is one.
inline float largest(const float* x, int dim) {
  F most = zero();
  for (int d = 0; d < dim; d += 16) most = larger(most, abs(load(x + d)));
  return top_size(most);
}
