// The lanes of simd.h as AVX-512 registers, with VNNI.
#pragma once

using F = __m512;   // 16 floats
using I = __m512i;  // 16 int32, or 64 bytes

constexpr int TILE_ROWS = 8;    // rows that share one pass over keys or values
constexpr int TILE_SUMS = 16;   // vectors of 16 sums in such a pass: as many as registers hold
constexpr int PASS_ROWS = 128;  // rows that share a pass over weights
constexpr int BF16_ROWS = 8;    // the same for bfloat16 weights
constexpr int MAX_IDLE_ROWS = 3;  // rows.h: to compute so many in vain is quicker than further passes

inline F zero() { return _mm512_setzero_ps(); }
inline F set1(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline F load(const uint16_t* half) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)half)); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F root(F a) { return _mm512_sqrt_ps(a); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
// 1 / x for x >= 1, exact except for the last bit or two, in a third of a division's time.
inline F inverse(F x) {
  const F r = _mm512_rcp14_ps(x);
  return mul(r, fnma(x, r, set1(2.0f)));
}
inline F inverse_root(F x) { return div(set1(1.0f), root(x)); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F round(F a) { return _mm512_roundscale_ps(a, 0); }
inline F times_power(F a, F n) { return _mm512_scalef_ps(a, n); }  // a * 2^n
inline F select(uint32_t lanes, F a, F otherwise) { return _mm512_mask_mov_ps(otherwise, (__mmask16)lanes, a); }
inline uint32_t equal_lanes(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }

inline float sum(F v) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
// Rounded up so that the last BITS bits are 0.
template <int BITS>
inline F cut_up(F v) {
  const I below = _mm512_set1_epi32((1 << BITS) - 1);
  return (F)_mm512_andnot_si512(below, _mm512_add_epi32((I)v, below));
}
inline float first_lane(F v) { return _mm512_cvtss_f32(v); }
inline float top(F v) { return _mm512_reduce_max_ps(v); }  // exact in any order
// The larger of two numbers that are not negative, by their bits: a NaN counts as larger than any number.
inline F larger(F a, F b) { return (F)_mm512_max_epi32((I)a, (I)b); }
inline float top_size(F v) { return std::bit_cast<float>(_mm512_reduce_max_epi32((I)v)); }

// The same for each of 16 vectors, with the same bits.
template <class Both>
inline F across(F* v, const Both& both) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    v[i] = both(_mm512_shuffle_f32x4(v[i], v[i + 8], 0x44), _mm512_shuffle_f32x4(v[i], v[i + 8], 0xee));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    v[i] = both(_mm512_shuffle_f32x4(v[i], v[i + 4], 0x88), _mm512_shuffle_f32x4(v[i], v[i + 4], 0xdd));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) v[i] = both(_mm512_shuffle_ps(v[i], v[i + 2], 0x44), _mm512_shuffle_ps(v[i], v[i + 2], 0xee));
  v[0] = both(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
  // The lanes belong to vectors 0, 2, 1, 3, then the same + 8, + 4, + 12.
  return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15), v[0]);
}
inline F sums(F* v) {
  return across(v, [](F a, F b) { return add(a, b); });
}
inline F top_sizes(F* v) {
  return across(v, [](F a, F b) { return larger(a, b); });
}
inline F tops(F* v) {
  return across(v, [](F a, F b) { return max(a, b); });
}

inline I int_zero() { return _mm512_setzero_si512(); }
inline I int_set1(int32_t x) { return _mm512_set1_epi32(x); }
inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }
inline I to_int(F v) { return _mm512_cvtps_epi32(v); }  // to the nearest, ties to even
inline int32_t sum(I v) { return _mm512_reduce_add_epi32(v); }
inline I add(I a, I b) { return _mm512_add_epi32(a, b); }
inline I sub(I a, I b) { return _mm512_sub_epi32(a, b); }
inline I mul(I a, I b) { return _mm512_mullo_epi32(a, b); }
inline I bits_of(F v) { return (I)v; }
inline F float_of(I bits) { return (F)bits; }
template <int N>
inline I left(I v) {
  return _mm512_slli_epi32(v, N);
}
template <int N>
inline I right(I v) {
  return _mm512_srli_epi32(v, N);
}
inline I sums(I* v) {
  return (I)across((F*)v, [](F a, F b) { return (F)add((I)a, (I)b); });
}
inline void store(int32_t* p, I v) { _mm512_storeu_si512(p, v); }
inline void store_int8(int8_t* p, I v) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(v)); }
inline F load_u8(const uint8_t* p) { return to_float(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline F load_i8(const uint8_t* p) { return to_float(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }

// Byte B of each lane.
template <int B>
inline F byte_of(I v) {
  return to_float(_mm512_and_si512(_mm512_srli_epi32(v, 8 * B), int_set1(255)));
}
inline I load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, I v) { _mm512_storeu_si512(p, v); }
inline I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
// Bytes of a table of 16, by nibbles in bytes.
inline I look_up(const uint8_t* table, I nibbles) {
  return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table)), nibbles);
}
inline I high_nibbles(I v) { return low_nibbles(_mm512_srli_epi16(v, 4)); }
// w with the bits PLANES of v set, after v is shifted to the left (to the right if negative).
template <int PLANES, int SHIFT>
inline I add_planes(I w, I v) {
  if constexpr (SHIFT > 0) v = _mm512_slli_epi16(v, SHIFT);
  if constexpr (SHIFT < 0) v = _mm512_srli_epi16(v, -SHIFT);
  return _mm512_ternarylogic_epi32(w, v, _mm512_set1_epi8(PLANES), 0xf8);  // w | (v & planes)
}

// Each lane: four unsigned weights times the same four int8 activations, added to acc.
inline I dot4(I acc, I weights, I activations) { return _mm512_dpbusd_epi32(acc, weights, activations); }
inline I dot4(I acc, I weights, const int8_t* q) {
#ifdef BY_HAND  // a separate register for each activation would delay the next ones
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(weights), "m"(*(const int32_t*)q));
  return acc;
#else
  return dot4(acc, weights, int_set1(word_at(q)));
#endif
}

#ifdef __AVX512BF16__
inline void store_bf16(uint16_t* p, F v) { _mm256_storeu_si256((__m256i*)p, (__m256i)_mm512_cvtneps_pbh(v)); }
#else
inline void store_bf16(uint16_t* p, F v) {
  const I bits = (I)v, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), int_set1(1));
  const I rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, int_set1(0x7fff)));
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
}
#endif
inline F load_bf16(const uint16_t* p) {
  return (F)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
}
// Lane i gets lane i ^ H.
template <int H>
inline F swap_lanes(F v) {
  if constexpr (H == 1) return _mm512_permute_ps(v, 0xb1);
  if constexpr (H == 2) return _mm512_permute_ps(v, 0x4e);
  if constexpr (H == 4) return _mm512_shuffle_f32x4(v, v, 0xb1);
  if constexpr (H == 8) return _mm512_shuffle_f32x4(v, v, 0x4e);
}
// Of each four codes of 8 bits the first and the third as integers of 16 bits, or the second and the fourth. Integers of 16
// bits go to memory in this order of each four.
inline I even_codes(I codes) { return _mm512_srai_epi16(_mm512_slli_epi16(codes, 8), 8); }
inline I odd_codes(I codes) { return _mm512_srai_epi16(codes, 8); }
inline void store_words(int16_t* p, I v) {
  alignas(64) static constexpr auto PLACES = [] {
    std::array<uint16_t, 32> places{};
    for (int i = 0; i < 16; i++) places[i] = uint16_t(2 * (i / 4 * 4 + i % 2 * 2 + i / 2 % 2));
    return places;
  }();
  const I words = _mm512_permutexvar_epi16(load_bytes((const uint8_t*)PLACES.data()), v);
  _mm256_storeu_si256((__m256i*)p, _mm512_castsi512_si256(words));
}
// Each lane: its two words times the same two, added to acc.
inline I dot_words(I acc, I words, const int16_t* two) { return _mm512_dpwssd_epi32(acc, words, int_set1(word_at(two))); }
// The first and the second bfloat16 of each pair.
inline F firsts(I v) { return (F)_mm512_slli_epi32(v, 16); }
inline F seconds(I v) { return (F)_mm512_and_si512(v, int_set1(int(0xffff0000))); }
// The first or the second of each of 16 pairs.
inline void store_in_pairs(uint16_t* pairs, int which, const uint16_t* halves) {
  const I wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)halves));
  _mm512_mask_storeu_epi16(pairs, which ? 0xaaaaaaaa : 0x55555555, which ? _mm512_slli_epi32(wide, 16) : wide);
}
