// Making a sketch of a head: the choice of wide columns, each panel's scales and quants, and their errors.
#pragma once
#include "sketch.h"

inline std::unique_ptr<Sketch> Sketch::of(const Matrix& head, const float* norm, Team& team) {
  std::unique_ptr<Sketch> sketch(new Sketch(head));
  sketch->memory_ = take_memory(sketch->bytes());
  if (!(sketch->data_ = sketch->memory_.get())) throw std::bad_alloc();
  sketch->look(norm, team);
  std::atomic<bool> finite{true};
  std::vector<Buffer> buffers(team.all());
  team.run(1, [&](int member) {
    F* weights = buffers[member].get<F>(head.cols);
    team.share_once(sketch->panels(), member, [&](int p) {
      read_panel(head, p, weights);
      if (!sketch->draw(p, weights)) finite = false;
    });
  });
  return finite ? std::move(sketch) : nullptr;
}

// Computes the means of columns and chooses the wide ones, from a sample of panels; any sample gives valid bounds. The
// error of a product grows with the norms of weights and activations in the other columns, so the wide columns are
// those with the largest norms. Activations are about as large as the weights of their norm.
inline void Sketch::look(const float* norm, Team& team) {
  constexpr int SOME = 256;
  const int count = std::min(panels(), SOME), cols = head_.cols;
  std::vector<float> sums(size_t(count) * cols), squares(sums.size());
  std::vector<Buffer> buffers(team.all());
  team.run(1, [&](int member) {
    F* weights = buffers[member].get<F>(cols);
    team.share_once(count, member, [&](int i) {
      read_panel(head_, begin_of(panels(), i, count), weights);
      for (int c = 0; c < cols; c++) {
        sums[size_t(i) * cols + c] = sum(weights[c]);
        squares[size_t(i) * cols + c] = sum(mul(weights[c], weights[c]));
      }
    });
  });
  std::vector<double> size(cols);
  double all = 0;
  for (int c = 0; c < cols; c++) {
    double total = 0;
    for (int i = 0; i < count; i++) total += sums[size_t(i) * cols + c], size[c] += squares[size_t(i) * cols + c];
    mean_[c] = float(total / (std::max(count, 1) * PANEL));
    all += double(mean_[c]) * mean_[c];
  }
  mean_size_ = float(std::sqrt(all));
  const double weights = std::accumulate(size.begin(), size.end(), 1e-30);
  const double activations = std::inner_product(norm, norm + cols, norm, 1e-30);
  for (int c = 0; c < cols; c++) size[c] = size[c] / weights + double(norm[c]) * norm[c] / activations;
  std::vector<int> order(cols);
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + WIDE, order.end(), [&](int a, int b) { return size[a] > size[b]; });
  std::copy_n(order.begin(), WIDE, wide_);
}

// Interleaves 16 bytes of each of four columns as a chunk: see groups.h.
inline void interleave(const uint8_t* columns, uint8_t* chunk) {
#ifdef __ARM_NEON
  auto column = [&](int i) { return vld1q_u8(columns + PANEL * i); };
  const uint8x16x4_t all{{column(0), column(1), column(2), column(3)}};
  vst4q_u8(chunk, all);
#else
  auto column = [&](int i) { return _mm_loadu_si128((const __m128i*)(columns + PANEL * i)); };
  const __m128i low[] = {_mm_unpacklo_epi8(column(0), column(1)), _mm_unpackhi_epi8(column(0), column(1))};
  const __m128i high[] = {_mm_unpacklo_epi8(column(2), column(3)), _mm_unpackhi_epi8(column(2), column(3))};
  for (int i = 0; i < 2; i++) {
    _mm_storeu_si128((__m128i*)chunk + 2 * i, _mm_unpacklo_epi16(low[i], high[i]));
    _mm_storeu_si128((__m128i*)chunk + 2 * i + 1, _mm_unpackhi_epi16(low[i], high[i]));
  }
#endif
}

// Stores the least-squares scales of one or two groups, and their quants in `lines`. Adds the squares of the quantized
// weights to `made`, and those of the errors to `left`.
inline void draw_groups(const F* w, int count, uint16_t* scales, uint8_t* lines, F& made, F& left) {
  constexpr float STEP = 0.37f;  // share of the root mean square: the best for most rows
  const int columns = count * GROUP;
  F squares = zero(), product = zero(), power = zero();
  for (int c = 0; c < columns; c++) squares = fma(w[c], w[c], squares);
  const F step = max(mul(root(mul(squares, set1(1.0f / columns))), set1(STEP)), set1(1e-30f));
  const F inverse = div(set1(1.0f), step);
  auto quant = [&](F v) { return max(min(round(mul(v, inverse)), set1(7)), set1(-8)); };
  uint8_t quants[2 * GROUP * PANEL];
  for (int c = 0; c < columns; c++) {
    const F q = quant(w[c]);
    product = fma(q, w[c], product), power = fma(q, q, power);
    store_int8((int8_t*)quants + PANEL * c, to_int(add(q, set1(8))));
  }
  store_bf16(scales, div(product, max(power, set1(1))));
  alignas(LINE) float as_stored[PANEL];
  for (int r = 0; r < PANEL; r++) as_stored[r] = from_bf16(scales[r]);
  const F scale = load(as_stored);
  for (int c = 0; c < columns; c++) {
    const F rest = fnma(quant(w[c]), scale, w[c]);
    left = fma(rest, rest, left);
  }
  made = fma(mul(scale, scale), power, made);
  for (int g = 0; g < count; g++, lines += group_bytes(SKETCH_BITS))
    for (int j = 0; j < 4; j++) {
      uint8_t low[LINE], high[LINE];
      const uint8_t* columns = quants + PANEL * (g * GROUP + 4 * j);
      interleave(columns, low), interleave(columns + PANEL * GROUP / 2, high);
      for (int i = 0; i < LINE; i++) lines[LINE * j + i] = uint8_t(low[i] | high[i] << 4);
    }
}

// Makes one panel from its weights, which are changed. False if a weight is not finite.
inline bool Sketch::draw(int p, F* w) const {
  constexpr float ROUNDED_UP = 1.001f;
  SketchPanel& out = panel(p);
  for (int c = 0; c < head_.cols; c++) w[c] = sub(w[c], set1(mean_[c]));

  F highest = zero(), wide_size = zero(), wide_rest = zero();
  for (int c : wide_) highest = max(highest, abs(w[c]));
  const F wide_scale = max(mul(highest, set1(1.0f / 127)), set1(1e-30f));
  uint8_t quants[WIDE * PANEL];
  for (int i = 0; i < WIDE; i++) {
    F& v = w[wide_[i]];
    const F q = round(div(v, wide_scale)), made = mul(q, wide_scale), rest = sub(v, made);
    wide_size = fma(made, made, wide_size), wide_rest = fma(rest, rest, wide_rest);
    store_int8((int8_t*)quants + PANEL * i, to_int(q));
    v = zero();
  }
  store(out.wide_scale, wide_scale);
  for (int i = 0; i < WIDE * PANEL; i++) quants[i] ^= 128;
  for (int j = 0; j < WIDE / 4; j++) interleave(quants + 4 * PANEL * j, out.wide[j]);

  F sketched = wide_size, rest = zero();
  uint8_t* at = (uint8_t*)(&out + 1);
  for (int g = 0; g < groups(); g += STRETCH) {
    uint16_t *pairs = (uint16_t*)at, scales[PANEL];
    at += LINE;
    for (int half = 0; half < 2 && g + 2 * half < groups(); half++) {
      const int first = g + 2 * half, count = std::min(2, groups() - first);
      draw_groups(w + first * GROUP, count, scales, at, sketched, rest);
      store_in_pairs(pairs, half, scales);
      at += count * group_bytes(SKETCH_BITS);
    }
  }
  const F size = max(root(sketched), mul(root(wide_rest), set1(1 / WIDE_PART)));
  store(out.rest, mul(root(rest), set1(ROUNDED_UP))), store(out.size, mul(size, set1(ROUNDED_UP)));
  return std::isfinite(sum(mul(add(load(out.rest), load(out.size)), zero())));
}
