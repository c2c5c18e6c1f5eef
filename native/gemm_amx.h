// Activations times panels on AMX: both in bfloat16, sums in float32. Takes the place of gemm.h.
//
// Weights become bfloat16 on the way into a tile: scale * (q - zero), or scale * q + minimum, in float16, whose sign and
// exponent are then moved to where bfloat16 has them. That leaves a weight 2^-112 times too small, which a sum is told
// at its end; activations are 2^64 times too large meanwhile, so that nothing in between is below what AMX takes for 0.
//
// A row's sum runs over its groups in order, a group an instruction, for one row and for 32. So the bits do not depend
// on the number of rows.
#pragma once
#include <memory>

#include "tiles.h"
#include "weights.h"

constexpr int LIFT = 64, FLOAT16_TOP = 15, BIAS_DIFFERENCE = 127 - 15;

// Rows ready to be multiplied. A tile of rows holds group after group, and of each group its rows side by side.
struct Rows {
  uint16_t* b;
  int count, cols;
  int groups() const { return cols / GROUP; }
  int tile_rows(int start) const { return std::clamp(count - start, 0, TILE); }
  // Where a row's first group lies, in groups, and how far the next one is.
  void place(int row, size_t& first, int& stride) const {
    const int start = row / TILE * TILE;
    first = size_t(start) * groups() + (row - start), stride = tile_rows(start);
  }
  static size_t bytes(size_t rows, int cols) { return 2 * rows * cols; }
  static Rows in(uint8_t* memory, int count, int cols) { return {(uint16_t*)memory, count, cols}; }
};

// What the matrices of a layer multiply: here all the same.
struct Kinds {
  void add(Format) {}
};

// 32 columns at a place. Of four columns the middle two change places: bytes of weights become pairs by a mask.
inline void put_group(Kinds, F a, F b, Rows rows, size_t at) {
  const F lift = set1(0x1p64f);
  static_assert(LIFT == 64);
  const I pairs = (I)_mm512_cvtne2ps_pbh(mul(b, lift), mul(a, lift));
  constexpr int ORDER = 0b11'01'10'00;
  _mm512_storeu_si512(rows.b + at * GROUP, _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(pairs, ORDER), ORDER));
}

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

constexpr int ROW_BLOCK = 512;                  // rows that weights are unpacked for
constexpr int PANELS_TOGETHER = 8;              // that a member takes at a time, for many rows
constexpr int MANY_GROUPS = 14;            // unpacked at a time, for many rows

// Groups of two panels as tiles.
struct alignas(LINE) Unpacked {
  I groups[2][MANY_GROUPS][TILE];
};

// What a member of the team needs for its multiplications, from the beginning of a pass to its end.
struct Workspace {
  std::unique_ptr<Unpacked> weights = std::make_unique<Unpacked>();
  void begin() { tile_rows().forget(); }
  void end() { tile_rows().release(); }
};

// The same power of two for a whole matrix, as large as float16 lets it be.
inline int lift_of(const Matrix& matrix) {
  return matrix.format == BF16 || matrix.highest == 0 ? 0 : FLOAT16_TOP - std::ilogb(matrix.highest) - 1;
}

// What a sum is multiplied with at its end.
inline F factor_of(const Matrix& matrix) {
  return set1(std::ldexp(1.0f, matrix.format == BF16 ? -LIFT : BIAS_DIFFERENCE - LIFT - lift_of(matrix)));
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

// Adds groups of one or two tiles of rows times one or two panels.
template <bool TWO_TILES, bool TWO_PANELS>
inline void dot_groups(const uint16_t* a, int a_rows, const uint16_t* b, int b_rows, const Unpacked& w, int count) {
  for (int g = 0; g < count; g++, a += a_rows * GROUP, b += b_rows * GROUP) {
    tile_load<4>(a), tile_load<6>(w.groups[0][g]);
    tile_dot<0, 4, 6>();
    if constexpr (TWO_PANELS) tile_load<7>(w.groups[1][g]), tile_dot<1, 4, 7>();
    if constexpr (TWO_TILES) tile_load<5>(b), tile_dot<2, 5, 6>();
    if constexpr (TWO_TILES && TWO_PANELS) tile_dot<3, 5, 7>();
  }
}

// Groups from `g` on of one or two panels, for all rows, from a buffer of unpacked weights. Sums are in tiles, or in
// memory while other rows are multiplied.
template <bool TWO_PANELS>
void multiply_groups(const Job* jobs, Rows rows, int first, int count, int g, int n, F* sums, const Unpacked& w) {
  const int groups = rows.groups();
  const bool many = count > 2 * TILE;
  for (int row = first; row < first + count; row += 2 * TILE) {
    const int left = first + count - row;
    const bool two = left > TILE;
    tile_rows().set(std::min(2 * TILE, left));
    F *s = sums + (row - first), *t = s + ROW_BLOCK;
    if (g == 0) {
      tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
    } else if (many) {
      tile_load<0>(s);
      if (TWO_PANELS) tile_load<1>(t);
      if (two) tile_load<2>(s + TILE);
      if (TWO_PANELS && two) tile_load<3>(t + TILE);
    }
    const int a_rows = rows.tile_rows(row), b_rows = rows.tile_rows(row + TILE);
    const uint16_t* a = rows.b + (size_t(row) * groups + size_t(g) * a_rows) * GROUP;
    const uint16_t* b = rows.b + (size_t(row + TILE) * groups + size_t(g) * b_rows) * GROUP;
    if (two)
      dot_groups<true, TWO_PANELS>(a, a_rows, b, b_rows, w, n);
    else
      dot_groups<false, TWO_PANELS>(a, a_rows, b, b_rows, w, n);
    if (many || g + n == groups) {
      tile_store<0>(s);
      if (TWO_PANELS) tile_store<1>(t);
      if (two) tile_store<2>(s + TILE);
      if (TWO_PANELS && two) tile_store<3>(t + TILE);
    }
    if (g + n == groups)
      for (int i = 0; i < 1 + TWO_PANELS; i++) {
        F *sum = s + i * ROW_BLOCK, factor = factor_of(*jobs[i].matrix);
        for (int r = 0; r < std::min(2 * TILE, left); r++) sum[r] = mul(sum[r], factor);
      }
  }
}

// One panel and at most two tiles of rows, whose sums stay in tiles. A group is multiplied some time after it was
// unpacked: what has just been stored takes a while to get into a tile, and both go on side by side.
template <Format T, bool TWO_TILES>
[[gnu::noinline]] void multiply_few(const Job& job, Rows rows, int first, int count, F* sums, Workspace& work) {
  constexpr int DELAY = 2, ROOM = 4;
  const int groups = rows.groups(), a_rows = rows.tile_rows(first), b_rows = rows.tile_rows(first + TILE);
  const uint16_t* a = rows.b + size_t(first) * groups * GROUP;
  const uint16_t* b = a + size_t(TILE) * groups * GROUP;
  I(*weights)[TILE] = work.weights->groups[0];
  Unpacker<T> unpack(job, 0);
  tile_rows().set(count);
  tile_zero<0>();
  if (TWO_TILES) tile_zero<2>();
  for (int g = 0; g < groups + DELAY; g++) {
    if (g < groups) unpack(g, weights[g % ROOM]);
    if (g < DELAY) continue;
    tile_load<6>(weights[(g - DELAY) % ROOM]), tile_load<4>(a), tile_dot<0, 4, 6>();
    if (TWO_TILES) tile_load<5>(b), tile_dot<2, 5, 6>();
    a += a_rows * GROUP, b += b_rows * GROUP;
  }
  tile_store<0>(sums);
  if (TWO_TILES) tile_store<2>(sums + TILE);
  const F factor = factor_of(*job.matrix);
  for (int r = 0; r < count; r++) sums[r] = mul(sums[r], factor);
}

// All panels meet a part of the rows that is in cache.
inline void multiply_many(const Job* jobs, int n, Rows rows, int first, int count, F* sums, Workspace& work) {
  Unpacked& w = *work.weights;
  for (int g = 0; g < rows.groups(); g += MANY_GROUPS) {
    const int size = std::min(MANY_GROUPS, rows.groups() - g);
    for (int i = 0; i < n; i += 2) {
      const bool two = i + 1 < n;
      for (int k = 0; k < 1 + two; k++)
        with_format(jobs[i + k].matrix->format, [&]<Format T>() {
          Unpacker<T> unpack(jobs[i + k], g);
          for (int group = 0; group < size; group++) unpack(g + group, w.groups[k][group]);
        });
      auto* action = two ? multiply_groups<true> : multiply_groups<false>;
      action(jobs + i, rows, first, count, g, size, sums + i * ROW_BLOCK, w);
    }
  }
}

// 16 outputs of each of `count` rows from `first` on, for each of n panels: sums [n][ROW_BLOCK].
inline void multiply(const Job* jobs, int n, Rows rows, int first, int count, F* sums, Workspace& work) {
  if (count > 2 * TILE) return multiply_many(jobs, n, rows, first, count, sums, work);
  for (int i = 0; i < n; i++)
    with_format(jobs[i].matrix->format, [&]<Format T>() {
      auto* action = count > TILE ? multiply_few<T, true> : multiply_few<T, false>;
      action(jobs[i], rows, first, count, sums + i * ROW_BLOCK, work);
    });
}
