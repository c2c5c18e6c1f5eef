// A group's scales and minima for 16 rows of weights, times those of activations. Zen 4 multiplies 16 numbers per
// cycle, and products of quants use most of that, so this file has faster ways for it. Other cores multiply.
#pragma once
#include "memory.h"
#include "simd.h"

#ifdef __AVX512BF16__
// For many rows: a step is a power of two times one of STEPS numbers. The scale times these is looked up, and powers of
// two are applied on the ports that add. The bits are those of a multiplication.
constexpr bool LOOKS_UP = true;
struct ManyScales {
  static constexpr int STEPS = 1 << STEP_BITS;
  // The byte offset of a step's entry: its bits, shifted and masked.
  static constexpr int SHIFT = 23 - STEP_BITS - 6, MASK = (STEPS - 1) << 6;

  F times[STEPS];
  void make(F scale) {
#pragma GCC unroll 16
    for (int i = 0; i < STEPS; i++) times[i] = mul(scale, set1(1.0f + float(i) / STEPS));
  }
};

// Minima of two groups are added at a time, as pairs of bfloat16. They are relative to the middle quant, where they and
// their rounding errors are small.
constexpr int TOGETHER = 2;
constexpr bool FROM_MIDDLE = true;
using Minima = I;
using Sum = uint16_t;  // factor of a minimum, for a row's group
inline Minima minima_of(F first, F second) {
  alignas(LINE) static constexpr uint16_t IN_TURN[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                       8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(load_bytes((const uint8_t*)IN_TURN), (I)_mm512_cvtne2ps_pbh(second, first));
}
inline F add_minima(F acc, Minima minima, const Sum* sums) { return dot2(acc, minima, sums); }
inline void put_sum(Sum* out, float sum) { *out = uint16_t(_mm_cvtsi128_si32((__m128i)_mm_cvtneps_pbh(_mm_set_ss(sum)))); }
// 16 rows' sums.
inline void put_sums(Sum* out, F sums) {
  _mm512_mask_storeu_epi16(out, 0x55555555, _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(sums)));
}
#else
constexpr bool LOOKS_UP = false;

constexpr int TOGETHER = 1;
constexpr bool FROM_MIDDLE = false;
using Minima = F;
using Sum = float;
inline Minima minima_of(F, F second) { return second; }
inline F add_minima(F acc, Minima minima, const Sum* sum) { return fma(minima, set1(*sum), acc); }
inline void put_sum(Sum* out, float sum) { *out = sum; }
inline void put_sums(Sum* out, F sums) { store(out, sums); }
#endif
