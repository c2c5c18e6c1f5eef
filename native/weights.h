// Matrices in panels of 16 output rows, streamed from front to back. GGUF's bits are only reordered.
//
// A panel is the scales of all its blocks (32 columns each, 256 for the K formats), for all 16 rows, followed by the
// quants of one group of 32 columns after another (`groups.h`).
#pragma once
#include <algorithm>
#include <memory>
#include <optional>

#include "groups.h"
#include "memory.h"

enum Format { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, BF16, MXFP4 };

constexpr int E8M0_HALF = 128;  // an exponent of E8M0, less this, is that of half the scale: E2M1's numbers are doubled
constexpr int AHEAD = 8192;  // bytes of weights to prefetch

struct Layout {
  int block;      // columns
  int raw_bytes;  // of one row's block in a file
  int bits;
  int zero;         // the quant of weight 0, in formats without minimum
  int scale_bytes;  // per block of a panel
  bool floats = false;  // whether quants are codes of E2M1, and scales exponents

  int number(int quant) const { return (floats ? E2M1[quant] : quant) - zero; }
};

constexpr Layout LAYOUTS[] = {
    {32, 18, 4, 8, 32},      // Q4_0: scale
    {32, 20, 4, 0, 64},      // Q4_1: scale, minimum
    {32, 22, 5, 16, 32},     // Q5_0
    {32, 24, 5, 0, 64},      // Q5_1
    {32, 34, 8, 128, 32},    // Q8_0
    {256, 144, 4, 0, 320},   // Q4_K: scale and minimum of the block, and of each of its groups
    {256, 176, 5, 0, 320},   // Q5_K
    {256, 210, 6, 32, 288},  // Q6_K: scale of the block, and two of each group, for 16 columns each
    {32, 64, 16, 0, 0},      // BF16
    {32, 17, 4, 16, 16, true},  // MXFP4: exponent
};

constexpr bool has_minima(Format format) { return format != BF16 && LAYOUTS[format].zero == 0; }

struct Matrix {
  Format format;
  int rows, cols;
  std::shared_ptr<uint8_t> memory;  // shared with neighbouring matrices
  uint8_t* data;
  float highest = 0;  // bound of the weights' magnitude; not computed for bfloat16
  int first = 0, all = rows;  // of a part of a matrix: its first row, and the rows of the whole

  const Layout& layout() const { return LAYOUTS[format]; }
  int groups() const { return cols / GROUP; }
  size_t scale_bytes() const { return round_up(size_t(cols) / layout().block * layout().scale_bytes, LINE); }
  size_t panel_bytes() const { return scale_bytes() + size_t(groups()) * group_bytes(layout().bits); }
  size_t bytes() const { return panel_bytes() * (rows / PANEL); }
  const uint8_t* panel(int p) const { return data + panel_bytes() * p; }
};

// A panel of a matrix, the column of its sums, and the two panels that are used after it.
struct Job {
  const Matrix* matrix;
  int panel, column;
  const uint8_t *next = nullptr, *after_next = nullptr;

  const uint8_t* begin() const { return matrix->panel(panel); }
  const uint8_t* end() const { return matrix->panel(panel + 1); }
  // The scales of a group's block, and the group's quants.
  const uint8_t* scales(int group) const {
    return begin() + size_t(group) * GROUP / matrix->layout().block * matrix->layout().scale_bytes;
  }
  const uint8_t* quants(int group) const {
    return begin() + matrix->scale_bytes() + size_t(group) * group_bytes(matrix->layout().bits);
  }
};

// Prefetches weights, one step for each group of a job: first the following bytes of the panel, then the panel `next`.
// A panel's scales precede its quants, so the effective distance is longer by their size. Long panels are prefetched
// from two pages in turn if that is faster.
template <Format T>
class Lookahead {
 public:
  // Not inlined, the object, and with AVX2 its neighbours, would be in memory: one row took 1.0 to 1.5 times as long.
  [[gnu::always_inline]] Lookahead(const Job& job, const uint8_t* next, ptrdiff_t bytes = AHEAD)
      : in_turn_(PAGES_IN_TURN && job.end() - job.begin() >= 2 * PAGE),
        at_(job.quants(0) + std::min(in_turn_ ? 3 * PAGE : bytes, job.end() - job.quants(0))), end_(job.end()), next_(next) {}
  void step() {
    if (at_ >= end_) at_ = next_ + (at_ - end_), end_ = (const uint8_t*)UINTPTR_MAX;  // no further end
    if (PAGES_IN_TURN && in_turn_)  // compiled away if PAGES_IN_TURN is false
      for (int at = 0; at < STEP; at += 2 * LINE) fetch_in_turn(at_ + at);
    else
      for (int line = 0; line < STEP; line += LINE) fetch(at_ + line);
    at_ += STEP;
  }

 private:
  // Bytes of quants and scales together.
  static constexpr int STEP = group_bytes(LAYOUTS[T].bits) + LAYOUTS[T].scale_bytes * GROUP / LAYOUTS[T].block;
  const bool in_turn_;
  const uint8_t *at_, *end_, *next_;
};

// Prefetches again half way, if that is faster and M is small: with more rows, products take longer than loading
// weights.
template <Format T, int M>
class Again {
 public:
  [[gnu::always_inline]] explicit Again(const Job& job) {
    if constexpr (ASKS) ahead_.emplace(job, job.next, AHEAD / 2);
  }
  void step() {
    if constexpr (ASKS) ahead_->step();
  }

 private:
  static constexpr bool ASKS = ASKS_TWICE && M <= 4;
  std::optional<Lookahead<T>> ahead_;
};

// Scales and minima of a block's group g for 16 rows. Q6_K has two scales per group, one for each half.
template <Format T>
inline void load_scales(const uint8_t* block, int g, F& scale, F& second) {
  if constexpr (LAYOUTS[T].floats) {
    scale = times_power(set1(1.0f), sub(load_u8(block), set1(E8M0_HALF))), second = zero();
    return;
  }
  const F d = load((const uint16_t*)block);
  if constexpr (T == Q4_K || T == Q5_K) {
    scale = mul(d, load_u8(block + 64 + PANEL * 2 * g));
    second = sub(zero(), mul(load((const uint16_t*)block + PANEL), load_u8(block + 64 + PANEL * (2 * g + 1))));
  } else if constexpr (T == Q6_K) {
    scale = mul(d, load_i8(block + 32 + PANEL * 2 * g));
    second = mul(d, load_i8(block + 32 + PANEL * (2 * g + 1)));
  } else {
    scale = d;
    second = LAYOUTS[T].zero ? zero() : load((const uint16_t*)block + PANEL);
  }
}

// Calls action<T>() for the format.
template <class Action>
inline void with_format(Format format, const Action& action) {
  switch (format) {
    case Q4_0: return action.template operator()<Q4_0>();
    case Q4_1: return action.template operator()<Q4_1>();
    case Q5_0: return action.template operator()<Q5_0>();
    case Q5_1: return action.template operator()<Q5_1>();
    case Q8_0: return action.template operator()<Q8_0>();
    case Q4_K: return action.template operator()<Q4_K>();
    case Q5_K: return action.template operator()<Q5_K>();
    case Q6_K: return action.template operator()<Q6_K>();
    case BF16: return action.template operator()<BF16>();
    case MXFP4: return action.template operator()<MXFP4>();
  }
}

// One row of the matrix in float32, for embeddings.
inline void unpack_row(const Matrix& matrix, int row, float* out) {
  const uint8_t* p = matrix.panel(row / PANEL);
  const int r = row % PANEL;
  with_format(matrix.format, [&]<Format T>() {
    constexpr Layout L = LAYOUTS[T];
    const uint8_t* quants = p + matrix.scale_bytes();
    for (int g = 0; g < matrix.groups(); g++, out += GROUP, quants += group_bytes(L.bits)) {
      if constexpr (T == BF16) {
        for (int c = 0; c < GROUP; c++) {
          uint16_t b;
          std::memcpy(&b, quants + c / 2 * LINE + 4 * r + c % 2 * 2, 2);
          out[c] = from_bf16(b);
        }
      } else {
        alignas(LINE) float scale[PANEL], second[PANEL];
        F s, t;
        load_scales<T>(p + g * GROUP / L.block * L.scale_bytes, g % (L.block / GROUP), s, t);
        store(scale, s), store(second, t);
        for (int c = 0; c < GROUP; c++) {
          const float q = float(L.number(quant_at(quants, L.bits, r, c)));
          out[c] = T == Q6_K ? (c < 16 ? scale[r] : second[r]) * q : scale[r] * q + second[r];
        }
      }
    }
  });
}
