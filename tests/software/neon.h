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
