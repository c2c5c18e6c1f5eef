// A sketch of a head: 4 bits of each weight, which bound the tokens' logits, with noise if there is any. A step that
// needs only the largest logit multiplies only the panels that may have it, so a head of 8 or 16 bits reads little more
// than the sketch.
//
// Row r of the head is mean + sketch_r + rest_r. The mean of all rows, often most of a row, adds the same to every
// product. WIDE columns, those with the largest weights or activations, have 8 bits. By the Cauchy-Schwarz inequality
// a row's product differs by at most |rest_r| |x| from that of mean + sketch_r. Here x is the activations as the head's
// kernel rounds them, and rest_r is the error of the sketch for weights as the kernel rounds them.
//
// Two groups share a scale, of weights and of activations, so that their products are scaled once. A panel is the
// SketchPanel of its 16 rows, followed by stretches of four groups. Each stretch has a line of scales, in pairs of
// bfloat16 for its first two groups and its last two, and the quants as in groups.h.
#pragma once
#include "decoder.h"
#include "int8_dots.h"
#include "noise.h"
#include "threads.h"

constexpr int WIDE = GROUP, SKETCH_BITS = 4, SKETCH_ROWS = 8;  // columns; bits; most rows at a time
// The most rows for which a search by sketch is faster. With more, its products take as long as reading the whole head.
constexpr int SKETCH_PAYS = AMD ? 4 : SKETCH_ROWS;
constexpr int STRETCH = 4;               // groups
constexpr float WIDE_PART = 1.0f / 512;  // share of `size` that bounds the rest of the wide columns

struct alignas(LINE) SketchPanel {
  float rest[PANEL], size[PANEL];  // norms of the rest without the wide columns, and of the sketch
  float wide_scale[PANEL];
  uint8_t wide[WIDE / 4][LINE];    // quants + 128
};

// Rows packed for products with a sketch, by group and side by side, and the error bounds of the products.
struct SketchRows {
  int count;
  int8_t *q, *wide;     // [groups, count, GROUP], [count, WIDE]
  float* scale;         // [pairs of groups, count]
  int32_t* zero;        // [pairs of groups, count]: corrections for the zero point
  const Noise* noises;  // [count]
  struct Row {
    float mean, slack;  // the product with the head's mean; the bound of rounding errors of sums
    float rest, size;   // factors of the panel's norms
    float wide_scale;
    int32_t wide_zero;
  } row[SKETCH_ROWS];
};

class Sketch {
 public:
  // `norm` [cols] is the weights of the norm of activations. Null if a weight is not finite. Throws std::bad_alloc if
  // there is no memory.
  static std::unique_ptr<Sketch> of(const Matrix& head, const float* norm, Team& team);

  size_t panel_bytes() const {
    return sizeof(SketchPanel) + size_t(ceil_div(groups(), STRETCH)) * LINE + size_t(groups()) * group_bytes(SKETCH_BITS);
  }
  size_t bytes() const { return panel_bytes() * panels(); }
  int panels() const { return head_.rows / PANEL; }

  // Packs `rows`, the packed inputs of the head, for the sketch, in `memory`.
  SketchRows prepare(Kinds kinds, Rows rows, const Noise* noises, Buffer& memory) const;
  // For a panel and each row: an estimate and an upper bound of its largest product with noise. `number`: that of the
  // panel in the whole head, of which this may be a rank's part.
  void bounds(int panel, int number, const SketchRows& rows, float* likely, float* highest) const {
    with_count(rows.count, [&]<int M>() { multiply<M>(panel, number, rows, likely, highest); });
  }

 private:
  explicit Sketch(const Matrix& head) : head_(head), mean_(head.cols) {}
  int groups() const { return head_.cols / GROUP; }
  int twos() const { return ceil_div(groups(), 2); }
  SketchPanel& panel(int p) const { return *(SketchPanel*)(data_ + panel_bytes() * p); }
  void look(const float* norm, Team& team);
  bool draw(int panel, F* weights) const;
  template <int M>
  void multiply(int panel, int number, const SketchRows& rows, float* likely, float* highest) const;
  template <int M = SKETCH_ROWS, class Action>
  static void with_count(int count, const Action& action) {
    if (count == M) return action.template operator()<M>();
    if constexpr (M > 1) with_count<M - 1>(count, action);
  }

  const Matrix& head_;
  std::vector<float> mean_;  // [cols]
  float mean_size_ = 0;
  int wide_[WIDE];
  std::shared_ptr<uint8_t> memory_;
  uint8_t* data_ = nullptr;
};

inline SketchRows Sketch::prepare(Kinds kinds, Rows rows, const Noise* noises, Buffer& memory) const {
  const int count = rows.count, cols = head_.cols, n = groups();
  SketchRows out{count, nullptr, nullptr, nullptr, nullptr, noises, {}};
  float* x = memory.get<float>(size_t(cols) + size_t(count) * (2 * twos() + (cols + WIDE) / 4));
  out.scale = x + cols, out.zero = (int32_t*)(out.scale + count * twos());
  out.q = (int8_t*)(out.zero + count * twos()), out.wide = out.q + size_t(count) * cols;
  for (int r = 0; r < count; r++) {
    const Place place = rows.place(r);
    double mean = 0, squares = 0, wide = 0, lost = 0;
    for (int g = 0; g < n; g++) read_group(kinds, rows, place, g, x + g * GROUP);
    for (int c = 0; c < cols; c++) mean += double(x[c]) * mean_[c];
    // Quantizes columns to int8, with groups at a stride of `count`. Returns the sum of the quants.
    auto quantize = [&](const float* from, int columns, int8_t* q, float& scale) {
      F highest = zero();
      for (int c = 0; c < columns; c += 16) highest = larger(highest, abs(load(from + c)));
      const F step = step_of(set1(top_size(highest))), inverse = inverse_of(step);
      I total = int_zero();
      for (int c = 0; c < columns; c += 16) {
        const F v = load(from + c);
        const I quants = to_int(mul(v, inverse));
        store_int8(q + c / GROUP * count * GROUP + c % GROUP, quants);
        const F left = fnma(to_float(quants), step, v);
        lost += sum(mul(left, left)), total = add(total, quants);
      }
      scale = first_lane(step);
      return sum(total);
    };
    SketchRows::Row& row = out.row[r];
    alignas(LINE) float few[WIDE];
    for (int i = 0; i < WIDE; i++) few[i] = std::exchange(x[wide_[i]], 0.0f), wide += double(few[i]) * few[i];
    row.wide_zero = (SIGNED_WEIGHTS ? 0 : -128) * quantize(few, WIDE, out.wide + r * WIDE, row.wide_scale);
    for (int c = 0; c < cols; c += 16) squares += sum(mul(load(x + c), load(x + c)));
    for (int two = 0; two < twos(); two++) {
      const int first = 2 * two, columns = std::min(2, n - first) * GROUP, i = two * count + r;
      int8_t* q = out.q + (size_t(first) * count + r) * GROUP;
      out.zero[i] = -8 * quantize(x + first * GROUP, columns, q, out.scale[i]);
    }
    constexpr double ROUNDED_UP = 1.001;
    // Bound for sums in float32, from the number of terms, whose magnitudes may be several times that of their sum.
    const double rounding = (2 * n + GROUP) * 0x1p-19, norm = std::sqrt(squares + wide);
    row.mean = float(mean), row.slack = float(rounding * norm * mean_size_ * ROUNDED_UP);
    row.rest = float((std::sqrt(squares) + rounding * norm) * ROUNDED_UP);
    row.size = float((std::sqrt(lost) + std::sqrt(wide) * WIDE_PART + rounding * norm) * ROUNDED_UP);
  }
  return out;
}

template <int M>
[[gnu::noinline]] void Sketch::multiply(int p, int number, const SketchRows& rows, float* likely, float* highest) const {
  const SketchPanel& from = panel(p);
  const uint8_t* quants = (const uint8_t*)(&from + 1);
  F acc[M];  // in registers only if all loops over it are unrolled
  I sums[M], scales = int_zero();
  auto ask = [](const uint8_t* at, size_t bytes) {
    fetch_bytes(at + AHEAD, bytes);
    if (ASKS_TWICE) fetch_bytes(at + AHEAD / 2, bytes);
  };
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) acc[m] = zero();
  for (int two = 0; two < twos(); two++) {
    if (two % 2 == 0) {
      scales = load_bytes(quants);
      ask(quants, LINE);
      quants += LINE;
    }
    const F scale = two % 2 == 0 ? firsts(scales) : seconds(scales);
    const int at = two * M;
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) sums[m] = int_set1(rows.zero[at + m]);
    for (int g = 2 * two; g < std::min(2 * two + 2, groups()); g++, quants += group_bytes(SKETCH_BITS)) {
      const Quants<SKETCH_BITS> w(quants);
      ask(quants, group_bytes(SKETCH_BITS));
      w.template dot<0, 8, M>(rows.q + size_t(g) * M * GROUP, sums);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) acc[m] = fma(to_float(sums[m]), mul(scale, set1(rows.scale[at + m])), acc[m]);
  }
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) sums[m] = int_set1(rows.row[m].wide_zero);
  Quants<8>(from.wide[0]).template dot<0, 8, M>(rows.wide, sums);
  F found[2 * SKETCH_ROWS];
#pragma GCC unroll 8
  for (int m = 0; m < M; m++) {
    const SketchRows::Row& row = rows.row[m];
    const F wide_product = mul(to_float(sums[m]), set1(row.wide_scale));
    const F product = add(fma(wide_product, load(from.wide_scale), acc[m]), set1(row.mean + row.slack));
    const F off = fma(load(from.rest), set1(row.rest), mul(load(from.size), set1(row.size)));
    const Noise& noise = rows.noises[m];
    const F added = gumbel(noise, number * PANEL);
    found[m] = with_noise(product, noise, added), found[SKETCH_ROWS + m] = with_noise(add(product, off), noise, added);
  }
  if constexpr (M == SKETCH_ROWS) {
    alignas(LINE) float highs[2 * SKETCH_ROWS];
    store(highs, tops(found));
    std::copy_n(highs, M, likely), std::copy_n(highs + M, M, highest);
  } else {
    for (int m = 0; m < M; m++) likely[m] = top(found[m]), highest[m] = top(found[SKETCH_ROWS + m]);
  }
}
