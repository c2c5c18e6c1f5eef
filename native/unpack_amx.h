// Weights as tiles of bfloat16 for AMX.
//
// A weight is scale * (q - zero), or scale * q + minimum, in float16, whose sign and exponent are then moved to where
// bfloat16 has them. That leaves it 2^-112 times too small, which a sum is told at its end; activations are 2^64 times
// too large meanwhile, so that nothing in between is below what AMX takes for 0.
#pragma once
#include <bit>

#include "tiles.h"
#include "weights.h"

constexpr int LIFT = 64, FLOAT16_TOP = 15, BIAS_DIFFERENCE = 127 - 15;

using Halves = __m512h;  // 32 float16

// 16 float16, each for both columns of its row.
inline Halves twice(const uint8_t* halves) {
  const I order = _mm512_set_epi16(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 3, 3,
                                   2, 2, 1, 1, 0, 0);
  return (Halves)_mm512_permutexvar_epi16(order, _mm512_castsi256_si512(_mm256_loadu_si256((const __m256i*)halves)));
}
// The same of 16 bytes, unsigned or signed.
inline Halves twice_bytes(const uint8_t* bytes, bool is_signed) {
  const __m256i wide = is_signed ? _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)bytes))
                                 : _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)bytes));
  const __m256h halves = _mm256_cvtepi16_ph(wide);
  return twice((const uint8_t*)&halves);
}

// What load_scales gives, in float16 and times 2^lift.
template <Format T>
inline void load_halves(const uint8_t* block, int g, Halves lift, Halves& scale, Halves& second) {
  const Halves d = _mm512_scalef_ph(twice(block), lift);
  if constexpr (T == Q4_K || T == Q5_K) {
    const Halves m = _mm512_scalef_ph(twice(block + 2 * PANEL), lift);
    scale = _mm512_mul_ph(d, twice_bytes(block + 64 + PANEL * g, false));
    second = _mm512_sub_ph(_mm512_setzero_ph(), _mm512_mul_ph(m, twice_bytes(block + 192 + PANEL * g, false)));
  } else if constexpr (T == Q6_K) {
    scale = _mm512_mul_ph(d, twice_bytes(block + 32 + PANEL * 2 * g, true));
    second = _mm512_mul_ph(d, twice_bytes(block + 32 + PANEL * (2 * g + 1), true));
  } else {
    scale = d;
    second = LAYOUTS[T].zero ? _mm512_setzero_ph() : _mm512_scalef_ph(twice(block + 2 * PANEL), lift);
  }
}

// float16 to bfloat16 (rounded, half away from zero) without the difference of their biases.
inline I narrow(Halves w) {
  return _mm512_and_si512(_mm512_mulhrs_epi16((I)w, _mm512_set1_epi16(1 << 12)), _mm512_set1_epi16(int16_t(0x8fff)));
}

// A group as the 16 rows of a tile: two for each chunk, its even columns and its odd ones. 2^lift times any weight is a
// float16. Odd columns are read from one byte further on, which saves a shift.
template <Format T>
inline void unpack_group(const uint8_t* block, int in_block, const uint8_t* quants, Halves lift, I* out) {
  constexpr Layout L = LAYOUTS[T];
  if constexpr (T == BF16) {
    const I low = int_set1(0xffff);
    for (int j = 0; j < 8; j++) {
      const I x = load_bytes(quants + 2 * j * LINE), y = load_bytes(quants + (2 * j + 1) * LINE);
      out[2 * j] = _mm512_or_si512(_mm512_and_si512(x, low), _mm512_slli_epi32(y, 16));
      out[2 * j + 1] = _mm512_or_si512(_mm512_srli_epi32(x, 16), _mm512_andnot_si512(low, y));
    }
    return;
  }
  Halves scale, second;
  load_halves<T>(block, in_block, lift, scale, second);
  auto put = [&](int chunk, int odd, Halves q) {
    const Halves w = L.zero == 0 ? _mm512_fmadd_ph(q, scale, second)
                                 : _mm512_mul_ph(q, T == Q6_K && chunk >= 4 ? second : scale);
    out[2 * chunk + odd] = narrow(w);
  };
  if constexpr (L.bits <= 5) {
    // A look-up ignores what is above its five bits.
    const I low = _mm512_set1_epi16(15);
    const I count = _mm512_set_epi16(31, 30, 29, 28, 27, 26, 25, 24, 23, 22, 21, 20, 19, 18, 17, 16, 15, 14, 13, 12, 11, 10,
                                     9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const I values = _mm512_sub_epi16(L.bits == 4 ? _mm512_and_si512(count, low) : count, _mm512_set1_epi16(L.zero));
    const I table = (I)_mm512_cvtepi16_ph(values);
#pragma GCC unroll 2
    for (int odd = 0; odd < 2; odd++) {
      const I fifth = L.bits == 5 ? load_bytes(quants + 4 * LINE + odd) : int_zero();
      auto look_up = [&](int chunk, I bits) {
        if constexpr (L.bits == 5) {
          const I high = chunk > 4 ? _mm512_srli_epi16(fifth, chunk - 4) : _mm512_slli_epi16(fifth, 4 - chunk);
          bits = _mm512_ternarylogic_epi32(low, bits, high, 0xca);  // low ? bits : high
        }
        put(chunk, odd, (Halves)_mm512_permutexvar_epi16(bits, table));
      };
#pragma GCC unroll 4
      for (int j = 0; j < 4; j++) {
        const I x = load_bytes(quants + j * LINE + odd);
        look_up(j, x), look_up(j + 4, _mm512_srli_epi16(x, 4));
      }
    }
  } else {
    const Halves zero = (Halves)_mm512_cvtepi16_ph(_mm512_set1_epi16(1024 + L.zero));
    const I low = _mm512_set1_epi16(255), thousand = _mm512_set1_epi16(0x6400);  // 1024 and a byte: 1024 + the byte
    auto number = [&](int chunk, int odd, I word) {  // (word & low) | thousand
      put(chunk, odd, _mm512_sub_ph((Halves)_mm512_ternarylogic_epi32(word, low, thousand, 0xea), zero));
    };
    I w[8];
    if constexpr (L.bits != 8) load_group<L.bits>(quants, w);
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      number(j, 0, L.bits == 8 ? load_bytes(quants + j * LINE) : w[j]);
      number(j, 1, L.bits == 8 ? load_bytes(quants + j * LINE + 1) : _mm512_srli_epi16(w[j], 8));
    }
  }
}

// The same power of two for a whole matrix, as large as float16 lets it be.
inline int lift_of(const Matrix& matrix) {
  const int exponent = int(std::bit_cast<uint32_t>(matrix.highest) >> 23) - 127;  // what is stored is normal or zero
  return matrix.format == BF16 || matrix.highest == 0 ? 0 : FLOAT16_TOP - exponent - 1;
}

// Not the library's, nor its logarithm above: they are SSE instructions, which wait for ours, and the next for them.
inline F power_of_two(int exponent) { return (F)_mm512_set1_epi32((127 + exponent) << 23); }

// What a sum is multiplied with at its end.
inline F factor_of(const Matrix& matrix) {
  return power_of_two(matrix.format == BF16 ? -LIFT : BIAS_DIFFERENCE - LIFT - lift_of(matrix));
}

// Calls unpack(g, out) of what makes tiles of a panel's groups, in order from `first` on, and asks for what follows.
template <Format T>
class Unpacker {
 public:
  Unpacker(const Job& job, int first)
      : scales_(job.matrix->panel(job.panel)),
        quants_(scales_ + job.matrix->scale_bytes() + size_t(first) * group_bytes(LAYOUTS[T].bits)),
        ahead_(scales_ + size_t(first) * STEP + AHEAD),
        lift_(_mm512_set1_ph(_Float16(lift_of(*job.matrix)))) {}
  void operator()(int g, I* out) {
    for (int line = 0; line < STEP; line += LINE) fetch(ahead_ + line);
    unpack_group<T>(scales_ + g / PER_BLOCK * LAYOUTS[T].scale_bytes, g % PER_BLOCK, quants_, lift_, out);
    quants_ += group_bytes(LAYOUTS[T].bits), ahead_ += STEP;
  }

 private:
  static constexpr int PER_BLOCK = LAYOUTS[T].block / GROUP;
  static constexpr int STEP = group_bytes(LAYOUTS[T].bits) + LAYOUTS[T].scale_bytes / PER_BLOCK;
  const uint8_t *scales_, *quants_, *ahead_;
  Halves lift_;
};
