// RMS norms. Between the layers of a block a norm has two halves. The member that computes a part of a row multiplies
// it with the norm's weights, packs it for the next product, and stores the sum of its squares. The member that
// multiplies the row divides each product by the root of the mean square, which is the same for the whole row. So no
// member has to read a whole row.
#pragma once
#include "decoder.h"

inline void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  F squares = zero();
  for (int i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F scale = set1(1.0f / std::sqrt(sum(squares) / n + eps));
  for (int i = 0; i < n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// Rows in this form.
struct Normed {
  Rows rows;
  Kinds kinds;
  const float *weights, *factors;  // [cols], or null for no norm; [rows, cols], or null for none
  float* squares;                  // [cols / GROUP, padded(rows)]

  static size_t padded(size_t rows) { return round_up(rows, 16); }
  static size_t squares_of(size_t rows, int cols) { return cols / GROUP * padded(rows); }

  // Stores 32 columns of a row.
  void put(int row, int column, F a, F b) const { put(row, 1, column, &a, &b); }
  // The same for up to 16 consecutive rows: a[i] and b[i], which are changed.
  void put(int first, int count, int column, F* a, F* b) const {
    float* out = squares + column / GROUP * padded(rows.count) + first;
    F powers[PANEL];
    for (int i = 0; i < count; i++) powers[i] = fma(b[i], b[i], mul(a[i], a[i]));
    if (count == PANEL) store(out, sums(powers));
    for (int i = 0; i < count && count < PANEL; i++) out[i] = sum(powers[i]);
    const F norm_a = weight(column), norm_b = weight(column + 16);
    for (int i = 0; i < count; i++) {
      a[i] = mul(a[i], norm_a), b[i] = mul(b[i], norm_b);
      if (!factors) continue;
      const float* factor = factors + size_t(first + i) * rows.cols + column;
      a[i] = mul(a[i], load(factor)), b[i] = mul(b[i], load(factor + 16));
    }
    put_columns(kinds, a, b, rows, first, count, column);
  }
  F weight(int column) const { return weights ? load(weights + column) : set1(1.0f); }
  // Stores 1 / sqrt(mean square) of each row in out [padded(rows)]; 1 without a norm.
  void scales(float eps, float* out) const {
    const size_t stride = padded(rows.count);
    if (!weights) return (void)std::fill_n(out, stride, 1.0f);
    for (size_t row = 0; row < stride; row += 16) {
      F sum = zero();
      for (int g = 0; g < rows.groups(); g++) sum = add(sum, load(squares + g * stride + row));
      store(out + row, inverse_root(fma(sum, set1(1.0f / rows.cols), set1(eps))));
    }
  }
};
