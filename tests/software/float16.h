// The float16 arithmetic of AVX-512 that native/ uses, in software with the same bits. Must be included first.
#pragma once
#include <immintrin.h>

namespace float16 {

// 8 doubles to the nearest float16, by way of floats rounded to odd, with which the second rounding is correct.
inline __m128i narrow(__m512d x) {
  const __m256 cut = _mm512_cvt_roundpd_ps(x, _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __mmask8 inexact = _mm512_cmp_pd_mask(_mm512_cvtps_pd(cut), x, _CMP_NEQ_UQ);
  const __m256i odd = _mm256_mask_or_epi32((__m256i)cut, inexact, (__m256i)cut, _mm256_set1_epi32(1));
  return _mm256_cvtps_ph((__m256)odd, _MM_FROUND_TO_NEAREST_INT);
}

// Calls action(a, b, c) in double. A product of two halves plus a third fits in a double, except for irrelevant bits.
template <class Action>
inline __m512h each(__m512h a, __m512h b, __m512h c, const Action& action) {
  alignas(64) __m128i x[4], y[4], z[4], out[4];
  _mm512_store_si512(x, (__m512i)a), _mm512_store_si512(y, (__m512i)b), _mm512_store_si512(z, (__m512i)c);
  auto wide = [](__m128i half) { return _mm512_cvtps_pd(_mm256_cvtph_ps(half)); };
  for (int i = 0; i < 4; i++) out[i] = narrow(action(wide(x[i]), wide(y[i]), wide(z[i])));
  return (__m512h)_mm512_load_si512(out);
}

inline __m512h set1(_Float16 x) {
  short bits;
  __builtin_memcpy(&bits, &x, 2);
  return (__m512h)_mm512_set1_epi16(bits);
}
inline __m512h none() { return (__m512h)_mm512_setzero_si512(); }
inline __m512h mul(__m512h a, __m512h b) {
  return each(a, b, b, [](__m512d x, __m512d y, __m512d) { return _mm512_mul_pd(x, y); });
}
inline __m512h add(__m512h a, __m512h b) {
  return each(a, b, b, [](__m512d x, __m512d y, __m512d) { return _mm512_add_pd(x, y); });
}
inline __m512h sub(__m512h a, __m512h b) {
  return each(a, b, b, [](__m512d x, __m512d y, __m512d) { return _mm512_sub_pd(x, y); });
}
inline __m512h fmadd(__m512h a, __m512h b, __m512h c) {
  return each(a, b, c, [](__m512d x, __m512d y, __m512d z) { return _mm512_fmadd_pd(x, y, z); });
}
inline __m512h fnmadd(__m512h a, __m512h b, __m512h c) {
  return each(a, b, c, [](__m512d x, __m512d y, __m512d z) { return _mm512_fnmadd_pd(x, y, z); });
}
inline __m512h scalef(__m512h a, __m512h b) {
  return each(a, b, b, [](__m512d x, __m512d y, __m512d) { return _mm512_scalef_pd(x, y); });
}
inline __m512h mask_sub(__m512h otherwise, __mmask32 mask, __m512h a, __m512h b) {
  return (__m512h)_mm512_mask_blend_epi16(mask, (__m512i)otherwise, (__m512i)sub(a, b));
}
template <class Widen>
inline __m512h of_words(__m512i words, const Widen& widen) {
  auto half = [&](__m256i part) { return _mm512_cvtps_ph(_mm512_cvtepi32_ps(widen(part)), _MM_FROUND_TO_NEAREST_INT); };
  const __m512i low = _mm512_castsi256_si512(half(_mm512_castsi512_si256(words)));
  return (__m512h)_mm512_inserti64x4(low, half(_mm512_extracti64x4_epi64(words, 1)), 1);
}
inline __m512h of_signed(__m512i words) {
  return of_words(words, [](__m256i part) { return _mm512_cvtepi16_epi32(part); });
}
inline __m512h of_unsigned(__m512i words) {
  return of_words(words, [](__m256i part) { return _mm512_cvtepu16_epi32(part); });
}

}  // namespace float16

#define _mm512_set1_ph float16::set1
#define _mm512_setzero_ph float16::none
#define _mm512_mul_ph float16::mul
#define _mm512_add_ph float16::add
#define _mm512_sub_ph float16::sub
#define _mm512_fmadd_ph float16::fmadd
#define _mm512_fnmadd_ph float16::fnmadd
#define _mm512_scalef_ph float16::scalef
#define _mm512_mask_sub_ph float16::mask_sub
#define _mm512_cvtepi16_ph float16::of_signed
#define _mm512_cvtepu16_ph float16::of_unsigned
