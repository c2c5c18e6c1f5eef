// Weights as tiles of bfloat16 for AMX.
//
// A weight is scale * (q - zero), or scale * q + minimum, in float16. Its bits are then shifted to the sign and
// exponent positions of bfloat16. The result is too small by a factor of 2^-112, which is corrected at the end of a
// sum. Meanwhile activations are scaled by 2^64, so that no intermediate value is small enough for AMX to flush it to
// 0.
#pragma once
#include <array>
#include <bit>

#include "tiles.h"
#include "weights.h"

constexpr int LIFT = 64, FLOAT16_TOP = 15, BIAS_DIFFERENCE = 127 - 15;

using Halves = __m512h;  // 32 float16

// 16 of 32 float16, each for both columns of its row.
template <bool UPPER>
inline Halves twice(Halves both) {
  alignas(LINE) static constexpr auto ORDER = [] {
    std::array<int8_t, LINE> order{};
    for (int i = 0; i < LINE; i++) order[i] = int8_t(32 * UPPER + i / 4 * 2 + i % 2);
    return order;
  }();
  return (Halves)_mm512_permutexvar_epi8(_mm512_load_si512(ORDER.data()), (I)both);
}
// 32 bytes, signed or unsigned.
template <bool SIGNED>
inline Halves from_bytes(const uint8_t* p) {
  const __m256i bytes = _mm256_loadu_si256((const __m256i*)p);
  return SIGNED ? _mm512_cvtepi16_ph(_mm512_cvtepi8_epi16(bytes)) : _mm512_cvtepu16_ph(_mm512_cvtepu8_epi16(bytes));
}

// A constant kept in a register: the compiler would create it again for every group, on a busy port.
inline I kept(int16_t words) {
  I x = _mm512_set1_epi16(words);
  asm("" : "+v"(x));
  return x;
}
inline Halves kept_number(int number) { return (Halves)kept(std::bit_cast<int16_t>(_Float16(number))); }

// The factors of a whole block in float16, times 2^lift: scales of 16 rows, and their minima or the scales again.
template <Format T>
inline Halves load_block(const uint8_t* block, Halves lift) {
  if constexpr (LAYOUTS[T].floats)
    return _mm512_scalef_ph(kept_number(1),
                            _mm512_add_ph(from_bytes<false>(block), _mm512_sub_ph(lift, kept_number(E8M0_HALF))));
  constexpr bool HAS_MINIMUM = LAYOUTS[T].zero == 0;
  constexpr __mmask32 MINIMA = T == Q4_K || T == Q5_K ? 0xffff0000 : 0;  // these are subtracted
  const Halves stored =
      HAS_MINIMUM ? (Halves)load_bytes(block) : (Halves)_mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i*)block));
  const Halves lifted = _mm512_scalef_ph(stored, lift);
  return MINIMA ? _mm512_mask_sub_ph(lifted, MINIMA, _mm512_setzero_ph(), lifted) : lifted;
}
// The results of load_scales for one of its groups, in float16 and times 2^lift.
template <Format T>
inline void load_halves(const uint8_t* block, int g, Halves both, Halves& scale, Halves& second) {
  if constexpr (T == Q4_K || T == Q5_K) both = _mm512_mul_ph(both, from_bytes<false>(block + 64 + PANEL * 2 * g));
  if constexpr (T == Q6_K) both = _mm512_mul_ph(both, from_bytes<true>(block + 32 + PANEL * 2 * g));
  scale = twice<false>(both);
  second = LAYOUTS[T].zero == 0 || T == Q6_K ? twice<true>(both) : _mm512_setzero_ph();
}

// float16 to bfloat16 (rounded, half away from zero), without the correction for the difference of their biases.
inline I narrow(Halves w) { return _mm512_and_si512(_mm512_mulhrs_epi16((I)w, kept(1 << 12)), kept(int16_t(0x8fff))); }

// 2^(10 - ONE) plus the value of the BITS bits of a word from bit AT on, where bit ONE counts as 1: a float16's
// fraction.
template <int BITS, int AT, int ONE = AT>
inline Halves field(I word) {
  constexpr int MASK = ((1 << BITS) - 1) << AT, EXPONENT = (15 + 10 - ONE) << 10;
  return (Halves)_mm512_ternarylogic_epi32(word, kept(MASK), kept(EXPONENT), 0xea);
}

// A group's quants to weights: scale * (q - ZERO), or scale * q + second if ZERO is 0.
//
// While tiles are multiplied, other multiplications have one port and look-ups the other. So 4-bit numbers are looked
// up, by bytes, since word look-ups use both ports. The higher byte of a float16 is enough for -8 to 7. It is looked up
// by the lowest bits of that byte; for even columns these are in place if the load begins one byte earlier.
template <int ZERO, bool FLOATS>
inline void unpack_4(const uint8_t* quants, Halves scale, Halves second, I* out) {
  constexpr __mmask64 HIGHER = 0xaaaaaaaaaaaaaaaa;
  alignas(16) static constexpr uint8_t INTEGERS[] = {0xc8, 0xc7, 0xc6, 0xc5, 0xc4, 0xc2, 0xc0, 0xbc,
                                                     0x00, 0x3c, 0x40, 0x42, 0x44, 0x45, 0x46, 0x47};
  alignas(16) static constexpr uint8_t TWICE_E2M1[] = {0x00, 0x3c, 0x40, 0x42, 0x44, 0x46, 0x48, 0x4a,
                                                       0x00, 0xbc, 0xc0, 0xc2, 0xc4, 0xc6, 0xc8, 0xca};
  const I table = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)(FLOATS ? TWICE_E2M1 : INTEGERS)));
  const Halves least = ZERO == 8 || FLOATS ? second : _mm512_fmadd_ph(kept_number(8 - ZERO), scale, second);
  auto weights = [&](I bits) {
    return narrow(_mm512_fmadd_ph((Halves)_mm512_maskz_permutexvar_epi8(HIGHER, bits, table), scale, least));
  };
#pragma GCC unroll 2
  for (int odd = 0; odd < 2; odd++)
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      const I x = load_bytes(quants - 1 + odd + j * LINE);
      out[2 * j + odd] = weights(x), out[2 * (j + 4) + odd] = weights(_mm512_srli_epi16(x, 4));
    }
}
// Fields of words (`quant_words.h`) have a power of two added. If they are a fraction's highest bits, the power is not much
// larger than they are, and it is subtracted with the minimum. If they are its lowest bits, it is subtracted first,
// since the rounding of the minimum would be too coarse for them.
template <int ZERO>
inline void unpack_5(const uint8_t* quants, Halves scale, Halves second, I* out) {
  const Halves least = _mm512_fnmadd_ph(kept_number(32 + ZERO), scale, second), low = kept_number(1024 + ZERO);
  auto lowest = [&](I word) { return narrow(_mm512_fmadd_ph(_mm512_sub_ph(field<5, 0>(word), low), scale, second)); };
  I highest = int_zero();
#pragma GCC unroll 5
  for (int j = 0; j < 5; j++) {
    const I x = load_bytes(quants + j * LINE);
    out[3 * j] = lowest(x);
    out[3 * j + 1] = narrow(_mm512_fmadd_ph(field<5, 5>(x), scale, least));
    out[3 * j + 2] = narrow(_mm512_fmadd_ph(field<5, 5>(_mm512_srli_epi16(x, 5)), scale, least));
    highest = _mm512_shldi_epi16(highest, x, 1);
  }
  out[15] = lowest(highest);
}
// The first and the last 16 columns have separate scales.
template <int ZERO>
inline void unpack_6(const uint8_t* quants, Halves first, Halves last, I* out) {
  const Halves scales[] = {first, last}, offset = kept_number(-64 - ZERO), low = kept_number(1024 + ZERO);
  const Halves least[] = {_mm512_mul_ph(offset, first), _mm512_mul_ph(offset, last)};
#pragma GCC unroll 6
  for (int j = 0; j < 6; j++) {
    const I x = load_bytes(quants + j * LINE);
    const Halves scale = scales[j / 4], minimum = least[j / 4];
    out[2 * j] = narrow(_mm512_fmadd_ph(field<6, 4>(x), scale, minimum));
    out[2 * j + 1] = narrow(_mm512_fmadd_ph(field<6, 4>(_mm512_srli_epi16(x, 6)), scale, minimum));
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const I four = load_bytes(quants + j * LINE), two = load_bytes(quants + (4 + j / 2) * LINE);
    const I high = (I)field<2, 4, 0>(_mm512_slli_epi16(two, j % 2 ? 2 : 4));
    const Halves number = (Halves)_mm512_ternarylogic_epi32(four, kept(15), high, 0xea);
    out[12 + j] = narrow(_mm512_mul_ph(_mm512_sub_ph(number, low), last));
  }
}
template <int ZERO>
inline void unpack_8(const uint8_t* quants, Halves scale, I* out) {
  const Halves low = kept_number(1024 + ZERO);
#pragma GCC unroll 8
  for (int chunk = 0; chunk < 8; chunk++)
    for (int odd = 0; odd < 2; odd++) {
      const I x = load_bytes(quants + chunk * LINE + odd);
      out[2 * chunk + odd] = narrow(_mm512_mul_ph(_mm512_sub_ph(field<8, 0>(x), low), scale));
    }
}
inline void unpack_16(const uint8_t* quants, I* out) {
  const I low = int_set1(0xffff);
  for (int j = 0; j < 8; j++) {
    const I x = load_bytes(quants + 2 * j * LINE), y = load_bytes(quants + (2 * j + 1) * LINE);
    out[2 * j] = _mm512_or_si512(_mm512_and_si512(x, low), _mm512_slli_epi32(y, 16));
    out[2 * j + 1] = _mm512_or_si512(_mm512_srli_epi32(x, 16), _mm512_andnot_si512(low, y));
  }
}

// A group as the 16 rows of a tile: two for each chunk, its even and its odd columns. 2^lift times any weight must be a
// finite float16.
template <Format T>
inline void unpack_group(const uint8_t* block, int in_block, Halves both, const uint8_t* quants, I* out) {
  constexpr Layout L = LAYOUTS[T];
  if constexpr (T == BF16) {
    unpack_16(quants, out);
  } else {
    Halves scale, second;
    load_halves<T>(block, in_block, both, scale, second);
    if constexpr (L.bits == 4) unpack_4<L.zero, L.floats>(quants, scale, second, out);
    if constexpr (L.bits == 5) unpack_5<L.zero>(quants, scale, second, out);
    if constexpr (L.bits == 6) unpack_6<L.zero>(quants, scale, second, out);
    if constexpr (L.bits == 8) unpack_8<L.zero>(quants, scale, out);
  }
}

// The exponent of a power of two for a whole matrix, as large as float16 allows.
inline int lift_of(const Matrix& matrix) {
  const int exponent = int(std::bit_cast<uint32_t>(matrix.highest) >> 23) - 127;  // `highest` is normal or zero
  return matrix.format == BF16 || matrix.highest == 0 ? 0 : FLOAT16_TOP - exponent - 1;
}

// Not the library's ldexp, nor its logarithm above: mixing their SSE instructions with ours makes both wait.
inline F power_of_two(int exponent) { return (F)_mm512_set1_epi32((127 + exponent) << 23); }

// The factor of a sum at its end. Integer arithmetic on scales hides that one is not finite, so the factor shows it.
inline F factor_of(const Matrix& matrix) {
  if (!std::isfinite(matrix.highest)) return set1(NAN);
  return power_of_two(matrix.format == BF16 ? -LIFT : BIAS_DIFFERENCE - LIFT - lift_of(matrix));
}

// Unpacks a panel's groups to tiles, in order from `first` on.
template <Format T>
class Unpacker {
 public:
  static constexpr int PER_BLOCK = LAYOUTS[T].block / GROUP;

  Unpacker(const Job& job, int first)
      : block_(job.scales(first)), quants_(job.quants(first)), lift_(_mm512_set1_ph(_Float16(lift_of(*job.matrix)))),
        both_(load_block<T>(block_, lift_)) {}
  void operator()(int g, I* out) {
    unpack_group<T>(block_, g % PER_BLOCK, both_, quants_, out);
    quants_ += group_bytes(LAYOUTS[T].bits);
    if ((g + 1) % PER_BLOCK == 0) block_ += LAYOUTS[T].scale_bytes, both_ = load_block<T>(block_, lift_);
  }

 private:
  const uint8_t *block_, *quants_;
  Halves lift_, both_;
};
