// Sixteen lanes, with the instructions that this file is compiled for. Every reduction has a fixed order, so results do
// not depend on the distribution of work. Bits differ between builds that multiply bfloat16 and those that do not.
#pragma once
#ifdef __x86_64__
#include <immintrin.h>
#else
#include <arm_neon.h>
#endif

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

inline int32_t word_at(const void* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  return word;
}

inline float from_bf16(uint16_t half) {
  const uint32_t bits = uint32_t(half) << 16;
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline float from_half(uint16_t half) {
#ifdef __x86_64__
  return _cvtsh_ss(half);
#else
  return std::bit_cast<__fp16>(half);
#endif
}

// Whether some instruction sequences are hand-written, for Zen 4. The bits are the same as with a compiler's order.
#if defined(__AVX512BF16__) && !defined(IN_SOFTWARE)
#define BY_HAND
#endif

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__ARM_NEON)
#include "simd_neon.h"
#else
#include "simd_avx2.h"
#endif

#include "bf16_pairs.h"

constexpr float LOG2_E = 1.44269504f;

// 2^x, relative error below 3e-6; exactly 1 at 0 and exactly 0 far below.
inline F power16(F x) {
  const F n = round(x), r = sub(x, n);
  F p = set1(9.5828528205e-3f);
  p = fma(p, r, set1(5.5906427848e-2f));
  p = fma(p, r, set1(2.4024098637e-1f));
  p = fma(p, r, set1(6.9312419299e-1f));
  p = fma(p, r, set1(1.0f));
  return times_power(p, n);
}

// Relative error below 4e-6. Far below zero it stays at 2^-100: an infinite divisor would make it NaN.
inline F sigmoid16(F x) { return inverse(add(set1(1.0f), power16(min(mul(x, set1(-LOG2_E)), set1(100.0f))))); }

// cap * tanh(x / cap), with an absolute error below cap / 100,000; NaN if x is not finite.
inline F cap16(F x, float cap) {
  const F share = sigmoid16(mul(x, set1(2.0f / cap)));
  return fma(x, zero(), fma(share, set1(2.0f * cap), set1(-cap)));
}

inline F silu16(F x) { return mul(x, sigmoid16(x)); }

// The tanh form of GELU: x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
inline F gelu16(F x) {
  const F u = fma(mul(mul(x, x), x), set1(0.044715f), x);
  return mul(x, sigmoid16(mul(u, set1(1.5957691216f))));
}

// gpt-oss's gated activation. What is NaN stays so: of min and max it is the second operand.
inline F swiglu_oai16(F gate, F up) {
  const F g = min(set1(7.0f), gate), u = max(set1(-7.0f), min(set1(7.0f), up));
  return mul(mul(g, sigmoid16(mul(g, set1(1.702f)))), add(u, set1(1.0f)));
}

// The vendor whose cores the build is for, if it has AVX-512. Of builds without AMX, the one with BF16 is for AMD.
#if defined(__AMX_BF16__) || (defined(__AVX512F__) && !defined(__AVX512BF16__))
constexpr bool INTEL = true, AMD = false;
#elif defined(__AVX512F__)
constexpr bool INTEL = false, AMD = true;
#else
constexpr bool INTEL = false, AMD = false;
#endif

// Whether products of int8 take signed weights: as sdot does, and usdot, usmmla (i8mm) and vpdpbusd do not.
#if defined(__ARM_NEON) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr bool SIGNED_WEIGHTS = true;
#else
constexpr bool SIGNED_WEIGHTS = false;
#endif

// The scale of int8 quants for numbers of at most this magnitude. Its mantissa has STEP_BITS bits: few enough for the
// look-up in scales.h, or all of a float.
#ifdef __AVX512BF16__
constexpr int STEP_BITS = 4;
#else
constexpr int STEP_BITS = 23;
#endif
// A NaN among the numbers makes it NaN, so that their products are: quants alone would hide it.
inline F step_of(F highest) {
  const F least = set1(0x1p-100f);
  const uint32_t none = equal_lanes(max(highest, least), least);
  const F step = select(none, zero(), cut_up<23 - STEP_BITS>(div(highest, set1(127.0f))));
  return fma(highest, zero(), step);
}
// The factor that turns numbers into quants: 0 if the step is 0.
inline F inverse_of(F step) { return select(equal_lanes(step, zero()), zero(), div(set1(1.0f), step)); }

// 32 numbers as int8. Returns their scale.
inline float to_int8(F a, F b, I& qa, I& qb) {
  const F step = step_of(set1(top_size(larger(abs(a), abs(b))))), inverse = inverse_of(step);
  qa = to_int(mul(a, inverse)), qb = to_int(mul(b, inverse));
  return first_lane(step);
}

// Prefetches into the L2 cache: L1 supports few outstanding lines, 24 on Zen 4.
inline void fetch(const void* line) { __builtin_prefetch(line, 0, 2); }
// Intel's cores support few outstanding software prefetches. Most lines come from a hardware prefetcher, which follows
// requests to the end of a page. Alternating between two pages keeps it busier than one.
constexpr bool PAGES_IN_TURN = INTEL;
constexpr ptrdiff_t PAGE = 4096;
// AMD's cores with AVX-512 drop some prefetches, more of them if a host's small pages make address translation slow.
// A second prefetch half way fixes this: one row's weights from memory take 0.7 to 0.8 of the time on Zen 4.
constexpr bool ASKS_TWICE = AMD;
// Prefetches one line of each of two pages, for the next two lines of a stream at `at`.
inline void fetch_in_turn(const void* at) {
  const uintptr_t a = uintptr_t(at), line = (a & -2 * PAGE) | (a >> 1 & (PAGE - 64));
  fetch((const void*)line), fetch((const void*)(line + PAGE));
}
// Prefetches into L1, for writing.
inline void fetch_to_change(const void* line) { __builtin_prefetch(line, 1, 3); }
inline void fetch_bytes(const void* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) fetch((const char*)from + at);
}
// Prefetches into L1 data that is read soon.
inline void fetch_near(const void* from, size_t bytes) {
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch((const char*)from + at, 0, 3);
}
