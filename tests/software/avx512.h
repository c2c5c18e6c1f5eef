// The AVX-512 instructions that native/ uses without AMX, on a processor with AVX2. It must be included before anything
// else, in sources with `avx512::` instead of the prefix `_mm512_` of intrinsics.
#pragma once
#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __AVX512F__ 1
#define __AVX512VNNI__ 1
#ifdef SOFTWARE_BF16
#define __AVX512BF16__ 1
#endif

namespace avx512 {

// The lanes of a register, under all their names.
union Lanes {
  __m512 floats;
  __m512i ints;
  __m256 half[2];
  __m256i int_half[2];
  float f[16];
  int32_t i[16];
  uint32_t u[16];
  uint16_t words[32];
  uint8_t bytes[64];
  int8_t chars[64];

  Lanes() : ints{} {}
  Lanes(__m512 v) : floats(v) {}
  Lanes(__m512i v) : ints(v) {}
};

// Calls of(i) for each part: lanes, or halves.
template <auto PARTS, class Of>
inline Lanes filled(const Of& of) {
  Lanes made;
  int i = 0;
  for (auto& part : made.*PARTS) part = of(i++);
  return made;
}
template <class Of>
inline __m512 lanes(const Of& of) { return filled<&Lanes::f>(of).floats; }
template <class Of>
inline __m512i int_lanes(const Of& of) { return filled<&Lanes::i>(of).ints; }
template <class Of>
inline __m512i word_lanes(const Of& of) { return filled<&Lanes::words>(of).ints; }
template <class Of>
inline __m512 halves(const Of& of) { return filled<&Lanes::half>(of).floats; }
template <class Of>
inline __m512i int_halves(const Of& of) { return filled<&Lanes::int_half>(of).ints; }

// Operations on halves that AVX2 has.
#define FLOATS(name) \
  inline __m512 name(Lanes a, Lanes b) { \
    return halves([&](int i) { return _mm256_##name(a.half[i], b.half[i]); }); \
  }
#define SUMS(name) \
  inline __m512 name(Lanes a, Lanes b, Lanes c) { \
    return halves([&](int i) { return _mm256_##name(a.half[i], b.half[i], c.half[i]); }); \
  }
#define INTS(name) \
  inline __m512i name(Lanes a, Lanes b) { \
    return int_halves([&](int i) { return _mm256_##name(a.int_half[i], b.int_half[i]); }); \
  }
#define SHIFTS(name) \
  inline __m512i name(Lanes a, int by) { \
    return int_halves([&](int i) { return _mm256_##name(a.int_half[i], by); }); \
  }
FLOATS(add_ps) FLOATS(sub_ps) FLOATS(mul_ps) FLOATS(div_ps) FLOATS(max_ps) FLOATS(min_ps)
SUMS(fmadd_ps) SUMS(fnmadd_ps)
INTS(add_epi32) INTS(sub_epi32) INTS(mullo_epi32) INTS(max_epi32)
SHIFTS(slli_epi32) SHIFTS(srli_epi32) SHIFTS(slli_epi16) SHIFTS(srli_epi16) SHIFTS(srai_epi16)
#undef FLOATS
#undef SUMS
#undef INTS
#undef SHIFTS

inline __m512 setzero_ps() { return __m512{}; }
inline __m512i setzero_si512() { return __m512i{}; }
inline __m512 set1_ps(float x) { return halves([&](int) { return _mm256_set1_ps(x); }); }
inline __m512i set1_epi32(int x) { return int_halves([&](int) { return _mm256_set1_epi32(x); }); }
inline __m512i set1_epi8(char x) { return int_halves([&](int) { return _mm256_set1_epi8(x); }); }
template <class... Ints>
inline __m512i setr_epi32(Ints... x) {
  const int all[] = {x...};
  return int_lanes([&](int i) { return all[i]; });
}
inline __m512 loadu_ps(const void* p) {
  Lanes made;
  std::memcpy(&made, p, 64);
  return made.floats;
}
inline __m512i loadu_si512(const void* p) { return (__m512i)loadu_ps(p); }
inline void storeu_ps(void* p, __m512 v) { std::memcpy(p, &v, 64); }
inline void storeu_si512(void* p, __m512i v) { std::memcpy(p, &v, 64); }
inline void mask_storeu_epi16(void* p, uint32_t mask, __m512i v) {
  const Lanes from = v;
  for (int i = 0; i < 32; i++)
    if (mask >> i & 1) std::memcpy((uint16_t*)p + i, &from.words[i], 2);
}

inline __m512 sqrt_ps(Lanes a) { return halves([&](int i) { return _mm256_sqrt_ps(a.half[i]); }); }
inline __m512 abs_ps(__m512 a) { return (__m512)((__m512i)a & set1_epi32(0x7fffffff)); }
inline __m512 roundscale_ps(Lanes a, int) { return halves([&](int i) { return _mm256_round_ps(a.half[i], 8); }); }
inline __m512 scalef_ps(Lanes a, Lanes n) {  // of numbers
  return lanes([&](int i) { return std::ldexp(a.f[i], int(std::fmax(-400, std::fmin(400, std::floor(n.f[i]))))); });
}
inline __m512 rcp14_ps(Lanes a) {  // 14 bits, which may differ from a processor's
  return lanes([&](int i) {
    Lanes exact;
    exact.f[0] = 1 / a.f[i], exact.u[0] &= 0xfffffe00;
    return exact.f[0];
  });
}
inline float reduce_max_ps(Lanes a) {
  float top = a.f[0];
  for (float x : a.f) top = x > top ? x : top;
  return top;
}
inline float cvtss_f32(Lanes a) { return a.f[0]; }
inline __m512 mask_mov_ps(Lanes otherwise, uint32_t mask, Lanes a) {
  return lanes([&](int i) { return mask >> i & 1 ? a.f[i] : otherwise.f[i]; });
}
inline uint32_t cmp_ps_mask(Lanes a, Lanes b, int) {  // equality; not for NaN
  uint32_t mask = 0;
  for (int i = 0; i < 16; i++) mask |= uint32_t(a.f[i] == b.f[i]) << i;
  return mask;
}

inline __m512i and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i andnot_si512(__m512i a, __m512i b) { return ~a & b; }
inline __m512i ternarylogic_epi32(__m512i a, __m512i b, __m512i c, int table) {  // for each bit, the table's bit at index abc
  __m512i made{};
  for (int at = 0; at < 8; at++)
    if (table >> at & 1) made |= (at & 4 ? a : ~a) & (at & 2 ? b : ~b) & (at & 1 ? c : ~c);
  return made;
}
inline int reduce_max_epi32(Lanes a) {
  int top = int(a.u[0]);
  for (uint32_t x : a.u) top = int(x) > top ? int(x) : top;
  return top;
}
inline int reduce_add_epi32(Lanes a) {
  uint32_t sum = 0;
  for (uint32_t x : a.u) sum += x;
  return int(sum);
}
inline __m512i dpbusd_epi32(Lanes acc, Lanes a, Lanes b) {  // unsigned times signed bytes, in groups of four
  return int_halves([&](int i) {
    __m256i pairs[2];
    for (int j = 0; j < 2; j++) {
      const __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)&a.bytes[32 * i + 16 * j]));
      const __m256i y = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)&b.bytes[32 * i + 16 * j]));
      pairs[j] = _mm256_madd_epi16(x, y);
    }
    const __m256i fours = _mm256_permute4x64_epi64(_mm256_hadd_epi32(pairs[0], pairs[1]), 0xd8);
    return _mm256_add_epi32(acc.int_half[i], fours);
  });
}

inline __m512i dpwssd_epi32(Lanes acc, Lanes a, Lanes b) {  // words, in pairs
  return int_halves([&](int i) {
    return _mm256_add_epi32(acc.int_half[i], _mm256_madd_epi16(a.int_half[i], b.int_half[i]));
  });
}

inline __m512 shuffle_f32x4(Lanes a, Lanes b, int order) {
  return lanes([&](int i) { return (i < 8 ? a : b).f[4 * (order >> 2 * (i / 4) & 3) + i % 4]; });
}
inline __m512 shuffle_ps(Lanes a, Lanes b, int order) {
  return lanes([&](int i) { return (i % 4 < 2 ? a : b).f[i / 4 * 4 + (order >> 2 * (i % 4) & 3)]; });
}
inline __m512i broadcast_i32x4(__m128i a) { return int_halves([&](int) { return _mm256_broadcastsi128_si256(a); }); }
inline __m512i shuffle_epi8(Lanes a, Lanes places) {
  return int_halves([&](int i) { return _mm256_shuffle_epi8(a.int_half[i], places.int_half[i]); });
}
inline __m512 permute_ps(Lanes a, int order) { return shuffle_ps(a, a, order); }
inline __m512 permutexvar_ps(Lanes places, Lanes a) { return lanes([&](int i) { return a.f[places.u[i] & 15]; }); }
inline __m512i permutexvar_epi16(Lanes places, Lanes a) {
  return word_lanes([&](int i) { return a.words[places.words[i] & 31]; });
}
inline __m256 castps512_ps256(Lanes a) { return a.half[0]; }
inline __m256i castsi512_si256(Lanes a) { return a.int_half[0]; }
inline __m256 extractf32x8_ps(Lanes a, int which) { return a.half[which]; }

inline __m512 cvtepi32_ps(Lanes a) { return halves([&](int i) { return _mm256_cvtepi32_ps(a.int_half[i]); }); }
inline __m512i cvtps_epi32(Lanes a) { return int_halves([&](int i) { return _mm256_cvtps_epi32(a.half[i]); }); }
inline __m512 cvtph_ps(__m256i a) {
  return halves([&](int i) { return _mm256_cvtph_ps(i ? _mm256_extracti128_si256(a, 1) : _mm256_castsi256_si128(a)); });
}
template <class To, class From>
inline To narrowed(const Lanes& from) {
  From made[16];
  for (int i = 0; i < 16; i++) made[i] = From(from.u[i]);
  To all;
  std::memcpy(&all, made, sizeof all);
  return all;
}
template <class From, class Of>
inline __m512i widened(const Of& of) {
  From all[16];
  std::memcpy(all, &of, sizeof all);
  return int_lanes([&](int i) { return all[i]; });
}
inline __m256i cvtepi32_epi16(Lanes a) { return narrowed<__m256i, uint16_t>(a); }
inline __m128i cvtepi32_epi8(Lanes a) { return narrowed<__m128i, uint8_t>(a); }
inline __m512i cvtepu16_epi32(__m256i a) { return widened<uint16_t>(a); }
inline __m512i cvtepu8_epi32(__m128i a) { return widened<uint8_t>(a); }
inline __m512i cvtepi8_epi32(__m128i a) { return widened<int8_t>(a); }

// Rounds to the nearest bfloat16, ties to even. Subnormal inputs and results are 0.
inline uint16_t bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (!(bits & 0x7f800000)) bits &= 0x80000000;
  return std::isnan(x) ? bits >> 16 | 64 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline __m512i cvtne2ps_pbh(Lanes high, Lanes low) {
  return word_lanes([&](int i) { return bf16(i < 16 ? low.f[i] : high.f[i - 16]); });
}
inline __m256i cvtneps_pbh(Lanes a) { return Lanes(cvtne2ps_pbh(a, a)).int_half[0]; }
inline __m128i cvtneps_pbh(__m128 a) {
  Lanes wide;
  std::memcpy(&wide, &a, sizeof a);
  return _mm256_castsi256_si128(cvtneps_pbh(wide));
}
inline __m256 flushed(__m256 x) {
  const __m256 sign = _mm256_set1_ps(-0.0f), least = _mm256_set1_ps(1.17549435e-38f);
  const __m256 tiny = _mm256_cmp_ps(_mm256_andnot_ps(sign, x), least, _CMP_LT_OQ);
  return _mm256_blendv_ps(x, _mm256_and_ps(x, sign), tiny);
}
inline __m512 dpbf16_ps(Lanes acc, __m512bh a, __m512bh b) {
  const Lanes x = (__m512i)a, y = (__m512i)b;
  return halves([&](int i) {
    auto even = [&](const Lanes& v) { return flushed((__m256)_mm256_slli_epi32(v.int_half[i], 16)); };
    const __m256i high = _mm256_set1_epi32(0xffff0000);
    auto odd = [&](const Lanes& v) { return flushed((__m256)_mm256_and_si256(v.int_half[i], high)); };
    const __m256 first = flushed(_mm256_fmadd_ps(odd(x), odd(y), flushed(acc.half[i])));
    return flushed(_mm256_fmadd_ps(even(x), even(y), first));
  });
}

}  // namespace avx512

#define _mm512_cvtne2ps_pbh avx512::cvtne2ps_pbh
#define _mm_cvtneps_pbh avx512::cvtneps_pbh
