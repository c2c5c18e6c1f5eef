// The NEON instructions that native/ uses, on a processor with AVX2: those of SIMDe (Debian's libsimde-dev), and those
// that its version 0.7 lacks.
#pragma once
#define SIMDE_ENABLE_NATIVE_ALIASES
#include <immintrin.h>
#include <simde/arm/neon.h>

#define __ARM_NEON 1

inline float32x4_t vdivq_f32(float32x4_t a, float32x4_t b) { return (float32x4_t)_mm_div_ps((__m128)a, (__m128)b); }
inline float32x4_t vsqrtq_f32(float32x4_t a) { return (float32x4_t)_mm_sqrt_ps((__m128)a); }
inline float32x4_t vfmsq_f32(float32x4_t sum, float32x4_t a, float32x4_t b) {
  return (float32x4_t)_mm_fnmadd_ps((__m128)a, (__m128)b, (__m128)sum);
}
inline int32x4_t vcvtnq_s32_f32(float32x4_t a) { return (int32x4_t)_mm_cvtps_epi32((__m128)a); }

#ifdef __ARM_FEATURE_MATMUL_INT8
inline __m256i wide_unsigned(uint8x16_t a) { return _mm256_cvtepu8_epi16((__m128i)a); }
inline __m256i wide_signed(int8x16_t a) { return _mm256_cvtepi8_epi16((__m128i)a); }
inline __m128i low(__m256i a) { return _mm256_castsi256_si128(a); }
inline __m128i high(__m256i a) { return _mm256_extracti128_si256(a, 1); }

inline int32x4_t vusdotq_s32(int32x4_t sum, uint8x16_t a, int8x16_t b) {
  const __m256i products = _mm256_madd_epi16(wide_unsigned(a), wide_signed(b));
  return (int32x4_t)_mm_add_epi32((__m128i)sum, _mm_hadd_epi32(low(products), high(products)));
}
inline int32x4_t vusdotq_laneq_s32(int32x4_t sum, uint8x16_t a, int8x16_t b, int lane) {
  return vusdotq_s32(sum, a, (int8x16_t)vdupq_n_s32(((int32x4_t)b)[lane]));
}
// Products of halves: a's first with b's first and second, a's second with b's first and second.
inline int32x4_t vusmmlaq_s32(int32x4_t sum, uint8x16_t a, int8x16_t b) {
  const __m256i rows = wide_unsigned(a), columns = wide_signed(b);
  const __m256i same = _mm256_madd_epi16(rows, columns);
  const __m256i crossed = _mm256_madd_epi16(rows, _mm256_permute2x128_si256(columns, columns, 1));
  const __m128i first = _mm_hadd_epi32(low(same), low(crossed)), second = _mm_hadd_epi32(high(crossed), high(same));
  return (int32x4_t)_mm_add_epi32((__m128i)sum, _mm_hadd_epi32(first, second));
}
#endif
