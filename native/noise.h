// Gumbel noise, with which sampling a token is an argmax over a row. See sampling/draw.py for the same in numpy.
#pragma once
#include <limits>

#include "simd.h"

struct Noise {     // of a row
  float gain;      // 1 / temperature, or 1 without noise
  uint32_t drawn;  // 0: no noise
  uint32_t key[2];
};

// The largest value of some columns, and its column.
struct Best {
  float value = -std::numeric_limits<float>::infinity();
  int32_t column = 0;
  bool operator<(Best other) const { return value < other.value; }  // equal values: the first column wins
};

// A permutation of 32 bits in which each output bit depends on all input bits.
inline I mixed(I x) {
  x = mul(x ^ right<16>(x), int_set1(0x21f0aaad));
  x = mul(x ^ right<15>(x), int_set1(0x735a2d97));
  return x ^ right<15>(x);
}

// The natural logarithm of positive normal numbers; relative error below 3e-7, near 1 too.
inline F log16(F x) {
  // x = m 2^n, with m between sqrt(1/2) and sqrt(2).
  constexpr int32_t ONE = 127 << 23, ROOT_OF_HALF = 0x3f3504f3;
  const I n = right<23>(add(bits_of(x), int_set1(ONE - ROOT_OF_HALF)));  // + 127
  const F f = sub(float_of(add(bits_of(x), sub(int_set1(ONE), left<23>(n)))), set1(1.0f)), square = mul(f, f);
  F p = set1(8.7003596127e-2f);
  p = fma(p, f, set1(-1.4267475903e-1f));
  p = fma(p, f, set1(1.4914786816e-1f));
  p = fma(p, f, set1(-1.6577586532e-1f));
  p = fma(p, f, set1(1.9963061810e-1f));
  p = fma(p, f, set1(-2.5001338124e-1f));
  p = fma(p, f, set1(3.3333909512e-1f));
  p = fma(p, mul(square, f), fnma(square, set1(0.5f), f));
  return fma(sub(to_float(n), set1(127.0f)), set1(6.9314718e-1f), p);
}

// Gumbel noise of 16 columns: -log(-log(1 - u)), u uniform. The least u, which win, have full precision in this form.
inline F gumbel(const Noise& noise, int column) {
  if (!noise.drawn) return zero();
  alignas(64) static constexpr int32_t LANES[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const I columns = add(int_set1(column), load_bytes((const uint8_t*)LANES));
  const I bits = mixed(mixed(columns ^ int_set1(noise.key[0])) ^ int_set1(noise.key[1]));
  const F low = add(to_float(bits & int_set1(0xffff)), set1(0.5f));
  const F u = min(mul(fma(to_float(right<16>(bits)), set1(0x1p16f), low), set1(0x1p-32f)), set1(1 - 0x1p-24f));
  const F rest = sub(set1(1.0f), u), lost = sub(sub(set1(1.0f), rest), u);
  return sub(zero(), log16(sub(zero(), add(log16(rest), lost))));
}

// The values of the argmax: 16 columns divided by the temperature, plus their noise.
inline F with_noise(F values, const Noise& noise, F its) { return fma(values, set1(noise.gain), its); }
