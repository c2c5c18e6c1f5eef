// Products of pairs of bfloat16, with the bfloat16 instruction if the build has it, else in float32. Intel's
// instruction takes as long as four float32 FMAs; AMD's is faster than float32.
#pragma once

#ifdef __AVX512BF16__
// Each lane: two bfloat16 weights times the same two bfloat16 activations, added to acc.
inline F dot2(F acc, I weights, const uint16_t* x) {
  return _mm512_dpbf16_ps(acc, (__m512bh)weights, (__m512bh)int_set1(word_at(x)));
}

using Half = uint16_t;  // operands of attention
using Pairs = I;        // 16 pairs
inline void store_narrow(Half* p, F v) { store_bf16(p, v); }
inline F load_narrow(const Half* p) { return load_bf16(p); }
inline Pairs load_pairs(const uint16_t* bf16) { return load_bytes((const uint8_t*)bf16); }
// Each lane: its pair times the same pair.
inline F dot_pairs(F acc, Pairs pairs, const Half* two) { return dot2(acc, pairs, two); }
#else
inline F dot2(F acc, I weights, const uint16_t* x) {
  const I two = int_set1(word_at(x));
  return fma(firsts(weights), firsts(two), fma(seconds(weights), seconds(two), acc));
}

using Half = float;
struct Pairs {
  F first, second;
};
inline void store_narrow(Half* p, F v) { store(p, v); }
inline F load_narrow(const Half* p) { return load(p); }
inline Pairs load_pairs(const uint16_t* bf16) {
  const I pairs = load_bytes((const uint8_t*)bf16);
  return {firsts(pairs), seconds(pairs)};
}
inline F dot_pairs(F acc, Pairs pairs, const Half* two) {
  return fma(set1(two[0]), pairs.first, fma(set1(two[1]), pairs.second, acc));
}
#endif
