// Activations quantized to int8 per token and group of 32, times quantized panels (VNNI).
//
// A row's sum runs over its groups in order, whatever the number of rows: the same instructions on the same values
// give the same bits for one row and for sixteen.
#pragma once
#include "weights.h"

// Quantized rows. Pointers to row 0; a row has cols bytes, and cols / 32 of everything else (halves: twice that).
struct Rows {
  int8_t* q;
  float* scale;
  float* weighted;  // scale * sum of q: what a minimum is multiplied with
  int32_t* halves;  // sums of q over 16 columns
  int cols;
  int groups() const { return cols / GROUP; }
  Rows at(int row) const {
    return {q + size_t(row) * cols, scale + size_t(row) * groups(), weighted + size_t(row) * groups(),
            halves + size_t(row) * 2 * groups(), cols};
  }
  static size_t bytes(size_t rows, int cols) { return rows * (cols + size_t(cols / GROUP) * 16) + 64; }
  static Rows in(uint8_t* memory, size_t rows, int cols) {
    const size_t g = rows * (cols / GROUP);
    float* floats = (float*)(memory + rows * cols);
    return {(int8_t*)memory, floats, floats + g, (int32_t*)(floats + 2 * g), cols};
  }
};

inline void quantize_row(const float* x, Rows row) {
  for (int g = 0; g < row.groups(); g++, x += GROUP) {
    const __m512 a = _mm512_loadu_ps(x), b = _mm512_loadu_ps(x + 16);
    const float top = max16(_mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b)));
    const __m512 inverse = _mm512_set1_ps(top > 0 ? 127.0f / top : 0.0f);
    const __m512i qa = _mm512_cvtps_epi32(_mm512_mul_ps(a, inverse)), qb = _mm512_cvtps_epi32(_mm512_mul_ps(b, inverse));
    _mm_storeu_si128((__m128i*)(row.q + g * GROUP), _mm512_cvtepi32_epi8(qa));
    _mm_storeu_si128((__m128i*)(row.q + g * GROUP + 16), _mm512_cvtepi32_epi8(qb));
    row.halves[2 * g] = _mm512_reduce_add_epi32(qa), row.halves[2 * g + 1] = _mm512_reduce_add_epi32(qb);
    row.scale[g] = top / 127.0f;
    row.weighted[g] = row.scale[g] * float(row.halves[2 * g] + row.halves[2 * g + 1]);
  }
}

constexpr int AHEAD = 4096;  // bytes of weights asked for before they are needed

inline __m512i dot4(__m512i acc, __m512i weights, const int8_t* q) {
  int32_t four;
  std::memcpy(&four, q, 4);
  return _mm512_dpbusd_epi32(acc, weights, _mm512_set1_epi32(four));
}

// out[m] = panel . row m, for M rows.
template <Format F, int M>
void panel_rows(const Matrix& matrix, const uint8_t* p, Rows rows, __m512* out) {
  constexpr Layout L = LAYOUTS[F];
  __m512 acc[M];
  for (int m = 0; m < M; m++) acc[m] = _mm512_setzero_ps();
  const int groups = rows.groups();
  for (int first = 0; first < groups; first += L.block / GROUP, p += block_bytes(L)) {
    const uint8_t* quants = p + L.scale_bytes;
    for (int i = 0; i < L.block / GROUP; i++, quants += group_bytes(L.bits)) {
      const int g = first + i;
      __m512i w[8];
      load_group<L.bits>(quants, w);
      // The stream runs on into the next panel, so looking ahead is right at a panel's end as well.
      for (int line = 0; line < group_bytes(L.bits) + L.scale_bytes * GROUP / L.block; line += 64)
        _mm_prefetch((const char*)quants + AHEAD + line, _MM_HINT_T0);
      __m512 scale, second;
      load_scales<F>(p, i, scale, second);
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) {
        const int8_t* q = rows.q + size_t(m) * rows.cols + g * GROUP;
        const int32_t* halves = rows.halves + (size_t(m) * groups + g) * 2;
        const __m512 a = _mm512_set1_ps(rows.scale[size_t(m) * groups + g]);
        __m512i lo = _mm512_set1_epi32(-L.zero * halves[0]), hi = _mm512_set1_epi32(-L.zero * halves[1]);
        for (int j = 0; j < 4; j++) lo = dot4(lo, w[j], q + 4 * j), hi = dot4(hi, w[j + 4], q + 4 * (j + 4));
        if constexpr (F == Q6_K) {
          acc[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(lo), _mm512_mul_ps(scale, a), acc[m]);
          acc[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(hi), _mm512_mul_ps(second, a), acc[m]);
        } else {
          acc[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(_mm512_add_epi32(lo, hi)), _mm512_mul_ps(scale, a), acc[m]);
          if constexpr (L.zero == 0)
            acc[m] = _mm512_fmadd_ps(second, _mm512_set1_ps(rows.weighted[size_t(m) * groups + g]), acc[m]);
        }
      }
    }
  }
  for (int m = 0; m < M; m++) out[m] = acc[m];
}

template <Format F>
void panel_count(const Matrix& matrix, const uint8_t* p, Rows rows, int count, __m512* out) {
  while (count >= 8) panel_rows<F, 8>(matrix, p, rows, out), rows = rows.at(8), out += 8, count -= 8;
  if (count >= 4) panel_rows<F, 4>(matrix, p, rows, out), rows = rows.at(4), out += 4, count -= 4;
  if (count >= 2) panel_rows<F, 2>(matrix, p, rows, out), rows = rows.at(2), out += 2, count -= 2;
  if (count) panel_rows<F, 1>(matrix, p, rows, out);
}

// 16 outputs of each of `count` rows.
inline void multiply(const Matrix& matrix, int panel, Rows rows, int count, __m512* out) {
  const uint8_t* p = matrix.panel(panel);
  switch (matrix.format) {
    case Q4_0: return panel_count<Q4_0>(matrix, p, rows, count, out);
    case Q4_1: return panel_count<Q4_1>(matrix, p, rows, count, out);
    case Q5_0: return panel_count<Q5_0>(matrix, p, rows, count, out);
    case Q5_1: return panel_count<Q5_1>(matrix, p, rows, count, out);
    case Q8_0: return panel_count<Q8_0>(matrix, p, rows, count, out);
    case Q4_K: return panel_count<Q4_K>(matrix, p, rows, count, out);
    case Q5_K: return panel_count<Q5_K>(matrix, p, rows, count, out);
    case Q6_K: return panel_count<Q6_K>(matrix, p, rows, count, out);
  }
}

// One row of the matrix in float32, for embeddings.
template <Format F>
void unpack_row_as(const Matrix& matrix, int row, float* out) {
  constexpr Layout L = LAYOUTS[F];
  const uint8_t* p = matrix.panel(row / PANEL);
  const int r = row % PANEL;
  for (int block = 0; block < matrix.cols / L.block; block++, p += block_bytes(L))
    for (int i = 0; i < L.block / GROUP; i++, out += GROUP) {
      alignas(64) uint8_t bytes[8][64];
      alignas(64) float scale[16], second[16];
      __m512i w[8];
      __m512 s, t;
      load_group<L.bits>(p + L.scale_bytes + i * group_bytes(L.bits), w);
      load_scales<F>(p, i, s, t);
      for (int j = 0; j < 8; j++) _mm512_store_si512(bytes[j], w[j]);
      _mm512_store_ps(scale, s), _mm512_store_ps(second, t);
      for (int c = 0; c < GROUP; c++) {
        const float q = float(int(bytes[c / 4][4 * r + c % 4]) - L.zero);
        out[c] = F == Q6_K ? (c < 16 ? scale[r] : second[r]) * q : scale[r] * q + second[r];
      }
    }
}

inline void unpack_row(const Matrix& matrix, int row, float* out) {
  switch (matrix.format) {
    case Q4_0: return unpack_row_as<Q4_0>(matrix, row, out);
    case Q4_1: return unpack_row_as<Q4_1>(matrix, row, out);
    case Q5_0: return unpack_row_as<Q5_0>(matrix, row, out);
    case Q5_1: return unpack_row_as<Q5_1>(matrix, row, out);
    case Q8_0: return unpack_row_as<Q8_0>(matrix, row, out);
    case Q4_K: return unpack_row_as<Q4_K>(matrix, row, out);
    case Q5_K: return unpack_row_as<Q5_K>(matrix, row, out);
    case Q6_K: return unpack_row_as<Q6_K>(matrix, row, out);
  }
}
