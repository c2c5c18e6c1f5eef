// The lanes of simd.h as pairs of AVX2 registers.
#pragma once

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};

constexpr int TILE_ROWS = 4, TILE_SUMS = 4, PASS_ROWS = 128, BF16_ROWS = PASS_ROWS;  // see simd_avx512.h
constexpr int MAX_IDLE_ROWS = 2;

#define PAIR(type, name, op) \
  inline type name(type x, type y) { return {op(x.a, y.a), op(x.b, y.b)}; }
PAIR(F, add, _mm256_add_ps)
PAIR(F, sub, _mm256_sub_ps)
PAIR(F, mul, _mm256_mul_ps)
PAIR(F, div, _mm256_div_ps)
PAIR(F, max, _mm256_max_ps)
PAIR(F, min, _mm256_min_ps)
#undef PAIR

inline F both(__m256 x) { return {x, x}; }
inline I both(__m256i x) { return {x, x}; }
inline F zero() { return both(_mm256_setzero_ps()); }
inline F set1(float x) { return both(_mm256_set1_ps(x)); }
inline F inverse(F x) { return div(set1(1.0f), x); }  // of x >= 1
inline F root(F x) { return {_mm256_sqrt_ps(x.a), _mm256_sqrt_ps(x.b)}; }
inline F inverse_root(F x) { return div(set1(1.0f), root(x)); }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F load(const uint16_t* half) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)half)),
          _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(half + 8)))};
}
inline void store(float* p, F v) { _mm256_storeu_ps(p, v.a), _mm256_storeu_ps(p + 8, v.b); }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
inline F abs(F v) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, v.a), _mm256_andnot_ps(sign, v.b)};
}
inline F round(F v) { return {_mm256_round_ps(v.a, 8), _mm256_round_ps(v.b, 8)}; }
inline __m256 times_power(__m256 a, __m256 n) {  // a is normal; 0 if the result would be subnormal, NaN if n is
  const __m256 low = _mm256_set1_ps(-126.0f);
  const __m256i by = _mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_max_ps(n, low)), 23);
  const __m256 power = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(a), by));
  return _mm256_or_ps(_mm256_and_ps(_mm256_cmp_ps(n, low, _CMP_GT_OQ), power), _mm256_cmp_ps(n, n, _CMP_UNORD_Q));
}
inline F times_power(F v, F n) { return {times_power(v.a, n.a), times_power(v.b, n.b)}; }
inline __m256 select(uint32_t lanes, __m256 a, __m256 otherwise) {
  const __m256i bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i chosen = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(lanes), bits), bits);
  return _mm256_blendv_ps(otherwise, a, _mm256_castsi256_ps(chosen));
}
inline F select(uint32_t lanes, F x, F otherwise) {
  return {select(lanes & 255, x.a, otherwise.a), select(lanes >> 8 & 255, x.b, otherwise.b)};
}
inline uint32_t equal_lanes(F x, F y) {
  auto equal = [](__m256 a, __m256 b) { return uint32_t(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ))); };
  return equal(x.a, y.a) | equal(x.b, y.b) << 8;
}

inline float sum(F v) {
  const __m256 a = _mm256_add_ps(v.a, v.b);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
template <int BITS>
inline __m256 cut_up(__m256 v) {
  const __m256i below = _mm256_set1_epi32((1 << BITS) - 1);
  return (__m256)_mm256_andnot_si256(below, _mm256_add_epi32((__m256i)v, below));
}
template <int BITS>
inline F cut_up(F v) {
  return {cut_up<BITS>(v.a), cut_up<BITS>(v.b)};
}
inline float first_lane(F v) { return _mm256_cvtss_f32(v.a); }
inline float top(F v) {
  const __m256 a = _mm256_max_ps(v.a, v.b);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}

// The larger of two numbers that are not negative, by their bits: a NaN counts as larger than any number.
inline F larger(F x, F y) {
  auto of = [](__m256 a, __m256 b) { return (__m256)_mm256_max_epi32((__m256i)a, (__m256i)b); };
  return {of(x.a, y.a), of(x.b, y.b)};
}
inline float top_size(F v) {
  const __m256i a = _mm256_max_epi32((__m256i)v.a, (__m256i)v.b);
  __m128i b = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_max_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return std::bit_cast<float>(_mm_cvtsi128_si32(_mm_max_epi32(b, _mm_shuffle_epi32(b, 0xb1))));
}

inline I load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline void store_bytes(uint8_t* p, I v) {
  _mm256_storeu_si256((__m256i*)p, v.a), _mm256_storeu_si256((__m256i*)(p + 32), v.b);
}
inline I int_zero() { return both(_mm256_setzero_si256()); }
inline I int_set1(int32_t x) { return both(_mm256_set1_epi32(x)); }
inline F to_float(I v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
inline I to_int(F v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
inline int32_t sum(I v) {
  const __m256i a = _mm256_add_epi32(v.a, v.b);
  __m128i b = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
  b = _mm_add_epi32(b, _mm_shuffle_epi32(b, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(b, _mm_shuffle_epi32(b, 0xb1)));
}
inline F sums(F* v) {
  alignas(64) float each[16];
  for (int i = 0; i < 16; i++) each[i] = sum(v[i]);
  return load(each);
}
inline F tops(F* v) {
  alignas(64) float each[16];
  for (int i = 0; i < 16; i++) each[i] = top(v[i]);
  return load(each);
}
inline F top_sizes(F* v) {
  alignas(64) float each[16];
  for (int i = 0; i < 16; i++) each[i] = top_size(v[i]);
  return load(each);
}
inline I sums(I* v) {
  alignas(64) int32_t each[16];
  for (int i = 0; i < 16; i++) each[i] = sum(v[i]);
  return load_bytes((const uint8_t*)each);
}
inline I add(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I sub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
inline I mul(I x, I y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
inline I operator^(I x, I y) { return {x.a ^ y.a, x.b ^ y.b}; }
inline I operator&(I x, I y) { return {x.a & y.a, x.b & y.b}; }
inline I bits_of(F v) { return {(__m256i)v.a, (__m256i)v.b}; }
inline F float_of(I bits) { return {(__m256)bits.a, (__m256)bits.b}; }
template <int N>
inline I left(I v) {
  return {_mm256_slli_epi32(v.a, N), _mm256_slli_epi32(v.b, N)};
}
template <int N>
inline I right(I v) {
  return {_mm256_srli_epi32(v.a, N), _mm256_srli_epi32(v.b, N)};
}
inline void store(int32_t* p, I v) { store_bytes((uint8_t*)p, v); }
inline void store_int8(int8_t* p, I v) {  // values fit
  const __m256i shorts = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(shorts), _mm256_extracti128_si256(shorts, 1)));
}
inline F load_u8(const uint8_t* p) {
  return to_float(I{_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                    _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))});
}
inline F load_i8(const uint8_t* p) {
  return to_float(I{_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
                    _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))});
}

template <int B>
inline F byte_of(I v) {
  const __m256i low = _mm256_set1_epi32(255);
  return to_float(
      I{_mm256_and_si256(_mm256_srli_epi32(v.a, 8 * B), low), _mm256_and_si256(_mm256_srli_epi32(v.b, 8 * B), low)});
}
inline __m256i low_nibbles(__m256i v) { return _mm256_and_si256(v, _mm256_set1_epi8(15)); }
inline I low_nibbles(I v) { return {low_nibbles(v.a), low_nibbles(v.b)}; }
// Bytes of a table of 16, by nibbles in bytes.
inline I look_up(const uint8_t* table, I nibbles) {
  const __m256i both = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
  return {_mm256_shuffle_epi8(both, nibbles.a), _mm256_shuffle_epi8(both, nibbles.b)};
}
inline I high_nibbles(I v) { return {low_nibbles(_mm256_srli_epi16(v.a, 4)), low_nibbles(_mm256_srli_epi16(v.b, 4))}; }
template <int PLANES, int SHIFT>
inline __m256i add_planes(__m256i w, __m256i v) {
  if constexpr (SHIFT > 0) v = _mm256_slli_epi16(v, SHIFT);
  if constexpr (SHIFT < 0) v = _mm256_srli_epi16(v, -SHIFT);
  return _mm256_or_si256(w, _mm256_and_si256(v, _mm256_set1_epi8(PLANES)));
}
template <int PLANES, int SHIFT>
inline I add_planes(I w, I v) {
  return {add_planes<PLANES, SHIFT>(w.a, v.a), add_planes<PLANES, SHIFT>(w.b, v.b)};
}

// Unsigned bytes times signed ones, summed in pairs: 16-bit words, which must not overflow.
inline I times_bytes(I w, I four) { return {_mm256_maddubs_epi16(w.a, four.a), _mm256_maddubs_epi16(w.b, four.b)}; }
inline I add_words(I x, I y) { return {_mm256_add_epi16(x.a, y.a), _mm256_add_epi16(x.b, y.b)}; }
// Adds both words of each lane, times a number, to acc.
template <int TIMES>
inline I add_both(I acc, I words) {
  const __m256i times = _mm256_set1_epi16(TIMES);
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(words.a, times)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(words.b, times))};
}

// The first and the second bfloat16 of each pair.
inline F firsts(I v) { return {(__m256)_mm256_slli_epi32(v.a, 16), (__m256)_mm256_slli_epi32(v.b, 16)}; }
inline F seconds(I v) {
  const __m256i high = _mm256_set1_epi32(int(0xffff0000));
  return {(__m256)_mm256_and_si256(v.a, high), (__m256)_mm256_and_si256(v.b, high)};
}
inline __m256i bf16_bits(__m256 v) {  // in the lower half of each lane
  const __m256i bits = _mm256_castps_si256(v), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
}
inline void store_bf16(uint16_t* p, F v) {
  const __m256i halves = _mm256_packus_epi32(bf16_bits(v.a), bf16_bits(v.b));  // by 128 bits
  _mm256_storeu_si256((__m256i*)p, _mm256_permute4x64_epi64(halves, 0xd8));
}

inline F load_bf16(const uint16_t* p) {
  const auto wide = [](const uint16_t* half) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)half)), 16);
  };
  return {wide(p), wide(p + 8)};
}
template <int H>
inline F swap_lanes(F v) {
  if constexpr (H == 1) return {_mm256_permute_ps(v.a, 0xb1), _mm256_permute_ps(v.b, 0xb1)};
  if constexpr (H == 2) return {_mm256_permute_ps(v.a, 0x4e), _mm256_permute_ps(v.b, 0x4e)};
  if constexpr (H == 4) return {_mm256_permute2f128_ps(v.a, v.a, 1), _mm256_permute2f128_ps(v.b, v.b, 1)};
  if constexpr (H == 8) return {v.b, v.a};
}
// Integers of 16 bits: see simd_avx512.h.
inline I even_codes(I codes) {
  auto even = [](__m256i v) { return _mm256_srai_epi16(_mm256_slli_epi16(v, 8), 8); };
  return {even(codes.a), even(codes.b)};
}
inline I odd_codes(I codes) { return {_mm256_srai_epi16(codes.a, 8), _mm256_srai_epi16(codes.b, 8)}; }
inline void store_words(int16_t* p, I v) {  // values fit
  auto ordered = [](__m256i v) { return _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(v, 0xd8), 0xd8); };
  _mm256_storeu_si256((__m256i*)p, ordered(_mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8)));
}
inline I dot_words(I acc, I words, const int16_t* two) {
  const __m256i same = _mm256_set1_epi32(word_at(two));
  return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(words.a, same)),
          _mm256_add_epi32(acc.b, _mm256_madd_epi16(words.b, same))};
}

// The first or the second of each of 16 pairs.
inline void store_in_pairs(uint16_t* pairs, int which, const uint16_t* halves) {
  for (int i = 0; i < 16; i++) pairs[2 * i + which] = halves[i];
}
