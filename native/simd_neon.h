// The lanes of simd.h as four NEON registers, with the dot products of Armv8.2. Sums have the order of simd_avx2.h, and
// nothing is approximate, so all bits are those of AVX2.
#pragma once

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};

constexpr int TILE_ROWS = 4, TILE_SUMS = 4, PASS_ROWS = 128, BF16_ROWS = PASS_ROWS;  // see simd_avx512.h
constexpr int MAX_IDLE_ROWS = 2;

template <class Of>
[[gnu::always_inline]] inline F floats(const Of& of) {
  return {of(0), of(1), of(2), of(3)};
}
template <class Of>
inline I ints(const Of& of) {
  return {of(0), of(1), of(2), of(3)};
}
inline uint32x4_t unsigned_of(int32x4_t v) { return vreinterpretq_u32_s32(v); }
inline int32x4_t signed_of(uint32x4_t v) { return vreinterpretq_s32_u32(v); }
inline uint8x16_t bytes_of(int32x4_t v) { return vreinterpretq_u8_s32(v); }
inline int32x4_t of_bytes(uint8x16_t v) { return vreinterpretq_s32_u8(v); }
inline int32x4_t bits_of(float32x4_t v) { return vreinterpretq_s32_f32(v); }
inline float32x4_t float_of(int32x4_t v) { return vreinterpretq_f32_s32(v); }

// As on x86: the second operand if one is NaN.
inline float32x4_t max(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
inline float32x4_t min(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }

#define PAIR(type, all, name, op) \
  inline type name(type x, type y) { \
    return all([&](int i) { return op(x.v[i], y.v[i]); }); \
  }
PAIR(F, floats, add, vaddq_f32)
PAIR(F, floats, sub, vsubq_f32)
PAIR(F, floats, mul, vmulq_f32)
PAIR(F, floats, div, vdivq_f32)
PAIR(F, floats, max, max)
PAIR(F, floats, min, min)
PAIR(I, ints, add, vaddq_s32)
PAIR(I, ints, sub, vsubq_s32)
PAIR(I, ints, mul, vmulq_s32)
PAIR(I, ints, operator^, veorq_s32)
PAIR(I, ints, operator&, vandq_s32)
#undef PAIR

inline F set1(float x) {
  return floats([&](int) { return vdupq_n_f32(x); });
}
inline F zero() { return set1(0); }
inline F inverse(F x) { return div(set1(1.0f), x); }  // of x >= 1
inline F root(F x) {
  return floats([&](int i) { return vsqrtq_f32(x.v[i]); });
}
inline F inverse_root(F x) { return div(set1(1.0f), root(x)); }
inline F load(const float* p) {
  return floats([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline F load(const uint16_t* half) {
  return floats([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half + 4 * i))); });
}
inline void store(float* p, F x) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
}
inline F fma(F x, F y, F z) {
  return floats([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
inline F fnma(F x, F y, F z) {
  return floats([&](int i) { return vfmsq_f32(z.v[i], x.v[i], y.v[i]); });
}
inline F abs(F x) {
  return floats([&](int i) { return vabsq_f32(x.v[i]); });
}
inline F round(F x) {
  return floats([&](int i) { return vrndnq_f32(x.v[i]); });
}
inline F times_power(F x, F n) {  // x is normal; 0 if the result would be subnormal, NaN if n is
  const float32x4_t low = vdupq_n_f32(-126.0f);
  return floats([&](int i) {
    const int32x4_t by = vshlq_n_s32(vcvtnq_s32_f32(max(n.v[i], low)), 23), power = vaddq_s32(bits_of(x.v[i]), by);
    const uint32x4_t normal = vcgtq_f32(n.v[i], low), number = vceqq_f32(n.v[i], n.v[i]);
    return float_of(signed_of(vornq_u32(vandq_u32(normal, unsigned_of(power)), number)));
  });
}
inline uint32x4_t lane_bits(int i) {
  static constexpr uint32_t FIRST[] = {1, 2, 4, 8};
  return vshlq_u32(vld1q_u32(FIRST), vdupq_n_s32(4 * i));
}
inline F select(uint32_t lanes, F x, F otherwise) {
  return floats([&](int i) { return vbslq_f32(vtstq_u32(vdupq_n_u32(lanes), lane_bits(i)), x.v[i], otherwise.v[i]); });
}
inline uint32_t equal_lanes(F x, F y) {
  uint32_t lanes = 0;
  for (int i = 0; i < 4; i++) lanes |= vaddvq_u32(vandq_u32(vceqq_f32(x.v[i], y.v[i]), lane_bits(i)));
  return lanes;
}

// All lanes as one: the halves of each half.
template <class Lanes, class Both>
inline auto folded(Lanes x, const Both& both) {
  return both(both(x.v[0], x.v[2]), both(x.v[1], x.v[3]));
}
inline float sum(F x) {
  const float32x4_t a = folded(x, [](float32x4_t a, float32x4_t b) { return vaddq_f32(a, b); });
  const float32x2_t b = vadd_f32(vget_low_f32(a), vget_high_f32(a));
  return vget_lane_f32(b, 0) + vget_lane_f32(b, 1);
}
inline float first_lane(F x) { return vgetq_lane_f32(x.v[0], 0); }
inline float top(F x) {
  const float32x4_t a = folded(x, [](float32x4_t a, float32x4_t b) { return max(a, b); });
  const float32x4_t b = max(a, vextq_f32(a, a, 2));
  return vgetq_lane_f32(max(b, vextq_f32(b, b, 1)), 0);
}
template <int BITS>
inline F cut_up(F x) {
  const int32x4_t below = vdupq_n_s32((1 << BITS) - 1);
  return floats([&](int i) { return float_of(vbicq_s32(vaddq_s32(bits_of(x.v[i]), below), below)); });
}
// The larger of two numbers that are not negative, by their bits: a NaN counts as larger than any number.
inline F larger(F x, F y) {
  return floats([&](int i) { return float_of(vmaxq_s32(bits_of(x.v[i]), bits_of(y.v[i]))); });
}
inline float top_size(F x) {
  const auto both = [](float32x4_t a, float32x4_t b) { return float_of(vmaxq_s32(bits_of(a), bits_of(b))); };
  return std::bit_cast<float>(vmaxvq_s32(bits_of(folded(x, both))));
}

inline I load_bytes(const uint8_t* p) {
  return ints([&](int i) { return of_bytes(vld1q_u8(p + 16 * i)); });
}
inline void store_bytes(uint8_t* p, I x) {
  for (int i = 0; i < 4; i++) vst1q_u8(p + 16 * i, bytes_of(x.v[i]));
}
inline I int_set1(int32_t x) {
  return ints([&](int) { return vdupq_n_s32(x); });
}
inline I int_zero() { return int_set1(0); }
inline F to_float(I x) {
  return floats([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline I to_int(F x) {
  return ints([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline int32_t sum(I x) {
  return vaddvq_s32(folded(x, [](int32x4_t a, int32x4_t b) { return vaddq_s32(a, b); }));
}
template <class Of>
inline F of_each(F* x, const Of& of) {
  alignas(64) float each[16];
  for (int i = 0; i < 16; i++) each[i] = of(x[i]);
  return load(each);
}
inline F sums(F* x) {
  return of_each(x, [](F one) { return sum(one); });
}
inline F tops(F* x) {
  return of_each(x, [](F one) { return top(one); });
}
inline F top_sizes(F* x) {
  return of_each(x, [](F one) { return top_size(one); });
}
inline I sums(I* x) {
  alignas(64) int32_t each[16];
  for (int i = 0; i < 16; i++) each[i] = sum(x[i]);
  return load_bytes((const uint8_t*)each);
}
inline I bits_of(F x) {
  return ints([&](int i) { return bits_of(x.v[i]); });
}
inline F float_of(I x) {
  return floats([&](int i) { return float_of(x.v[i]); });
}
template <int N>
inline I left(I x) {
  return ints([&](int i) { return vshlq_n_s32(x.v[i], N); });
}
template <int N>
inline I right(I x) {
  return ints([&](int i) { return signed_of(vshlq_u32(unsigned_of(x.v[i]), vdupq_n_s32(-N))); });
}
inline void store(int32_t* p, I x) { store_bytes((uint8_t*)p, x); }
inline int16x8_t narrow(int32x4_t a, int32x4_t b) { return vcombine_s16(vmovn_s32(a), vmovn_s32(b)); }
inline void store_words(int16_t* p, I x) {  // values fit; in the order of simd_avx512.h
  for (int i = 0; i < 4; i++) {
    const int16x4_t four = vmovn_s32(x.v[i]), halves = vreinterpret_s16_s32(vrev64_s32(vreinterpret_s32_s16(four)));
    vst1_s16(p + 4 * i, vzip1_s16(four, halves));
  }
}
inline void store_int8(int8_t* p, I x) {  // values fit
  vst1q_s8(p, vcombine_s8(vmovn_s16(narrow(x.v[0], x.v[1])), vmovn_s16(narrow(x.v[2], x.v[3]))));
}
inline F of_words(int16x8_t a, int16x8_t b) {
  const auto low = [](int16x8_t v) { return vmovl_s16(vget_low_s16(v)); };
  const auto high = [](int16x8_t v) { return vmovl_s16(vget_high_s16(v)); };
  return to_float(I{low(a), high(a), low(b), high(b)});
}
inline F load_u8(const uint8_t* p) {
  const auto wide = [](const uint8_t* p) { return vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p))); };
  return of_words(wide(p), wide(p + 8));
}
inline F load_i8(const uint8_t* p) {
  return of_words(vmovl_s8(vld1_s8((const int8_t*)p)), vmovl_s8(vld1_s8((const int8_t*)p + 8)));
}

template <int B>
inline F byte_of(I x) {
  return to_float(right<8 * B>(x) & int_set1(255));
}
inline I low_nibbles(I x) { return x & int_set1(0x0f0f0f0f); }
inline I high_nibbles(I x) {
  return ints([&](int i) { return of_bytes(vshrq_n_u8(bytes_of(x.v[i]), 4)); });
}
// Bytes of a table of 16, by nibbles in bytes.
inline I look_up(const uint8_t* table, I nibbles) {
  return ints([&](int i) { return of_bytes(vqtbl1q_u8(vld1q_u8(table), bytes_of(nibbles.v[i]))); });
}
// w with the bits PLANES of x set, after x is shifted to the left (to the right if negative).
template <int PLANES, int SHIFT>
inline I add_planes(I w, I x) {
  return ints([&](int i) {
    const uint8x16_t shifted = vshlq_u8(bytes_of(x.v[i]), vdupq_n_s8(SHIFT));
    return of_bytes(vorrq_u8(bytes_of(w.v[i]), vandq_u8(shifted, vdupq_n_u8(uint8_t(PLANES)))));
  });
}

// Each lane: four weights times four of 16 int8 activations, added to acc.
template <int FOUR>
inline I dot4(I acc, I weights, int8x16_t q) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  return ints([&](int i) { return vusdotq_laneq_s32(acc.v[i], bytes_of(weights.v[i]), q, FOUR); });
#else
  return ints([&](int i) { return vdotq_laneq_s32(acc.v[i], vreinterpretq_s8_s32(weights.v[i]), q, FOUR); });
#endif
}
// The products of four chunks with 16 activations, added to acc.
inline I dot16(I acc, const I* chunks, const int8_t* q) {
  const int8x16_t all = vld1q_s8(q);
  const I half = dot4<1>(dot4<0>(acc, chunks[0], all), chunks[1], all);
  return dot4<3>(dot4<2>(half, chunks[2], all), chunks[3], all);
}

#ifdef __ARM_FEATURE_MATMUL_INT8
// Lanes of both in turn: those of each first half of a register in x, of each second half in y. And back.
inline void zip(I& x, I& y) {
  const I a = x, b = y;
  x = ints([&](int i) { return vzip1q_s32(a.v[i], b.v[i]); });
  y = ints([&](int i) { return vzip2q_s32(a.v[i], b.v[i]); });
}
inline void unzip(I& x, I& y) {
  const I a = x, b = y;
  x = ints([&](int i) { return vuzp1q_s32(a.v[i], b.v[i]); });
  y = ints([&](int i) { return vuzp2q_s32(a.v[i], b.v[i]); });
}
// Adds the products of four chunks, which are zipped by two, with two rows of activations to their zipped sums.
inline void dot_pair(I* sums, const I* chunks, const int8_t* q, const int8_t* next_q) {
  const int64x2_t a = vreinterpretq_s64_s8(vld1q_s8(q)), b = vreinterpretq_s64_s8(vld1q_s8(next_q));
  const int8x16_t eights[] = {vreinterpretq_s8_s64(vzip1q_s64(a, b)), vreinterpretq_s8_s64(vzip2q_s64(a, b))};
  for (int j = 0; j < 4; j++) {
    I& sum = sums[j % 2];
    sum = ints([&](int i) { return vusmmlaq_s32(sum.v[i], bytes_of(chunks[j].v[i]), eights[j / 2]); });
  }
}
#endif

// The first and the second bfloat16 of each pair.
inline F firsts(I x) { return float_of(left<16>(x)); }
inline F seconds(I x) { return float_of(x & int_set1(int(0xffff0000))); }
inline void store_bf16(uint16_t* p, F x) {
  const I bits = bits_of(x), odd = right<16>(bits) & int_set1(1);
  const I rounded = right<16>(add(bits, add(odd, int_set1(0x7fff))));
  for (int i = 0; i < 4; i++) vst1_u16(p + 4 * i, vmovn_u32(unsigned_of(rounded.v[i])));
}
inline F load_bf16(const uint16_t* p) {
  return floats([&](int i) { return float_of(signed_of(vshll_n_u16(vld1_u16(p + 4 * i), 16))); });
}
// Lane i gets lane i ^ H.
template <int H>
inline F swap_lanes(F x) {
  if constexpr (H == 1) return floats([&](int i) { return vrev64q_f32(x.v[i]); });
  if constexpr (H == 2) return floats([&](int i) { return vextq_f32(x.v[i], x.v[i], 2); });
  if constexpr (H >= 4) return floats([&](int i) { return x.v[i ^ H / 4]; });
}
// Integers of 16 bits: see simd_avx512.h.
inline I even_codes(I codes) {
  return ints(
      [&](int i) { return vreinterpretq_s32_s16(vshrq_n_s16(vshlq_n_s16(vreinterpretq_s16_s32(codes.v[i]), 8), 8)); });
}
inline I odd_codes(I codes) {
  return ints([&](int i) { return vreinterpretq_s32_s16(vshrq_n_s16(vreinterpretq_s16_s32(codes.v[i]), 8)); });
}
inline I dot_words(I acc, I words, const int16_t* two) {
  const int16x8_t same = vreinterpretq_s16_s32(vdupq_n_s32(word_at(two)));
  return ints([&](int i) {
    const int16x8_t one = vreinterpretq_s16_s32(words.v[i]);
    const int32x4_t low = vmull_s16(vget_low_s16(one), vget_low_s16(same)), high = vmull_high_s16(one, same);
    return vaddq_s32(acc.v[i], vpaddq_s32(low, high));
  });
}

// The first or the second of each of 16 pairs.
inline void store_in_pairs(uint16_t* pairs, int which, const uint16_t* halves) {
  for (int i = 0; i < 16; i++) pairs[2 * i + which] = halves[i];
}
