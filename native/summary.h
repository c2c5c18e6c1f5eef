// What sampling asks of a row of logits, found in chunks of fixed size, so that the bits do not depend on threads.
#pragma once
#include <algorithm>
#include <bit>

#include "rounding.h"
#include "simd.h"

constexpr int CHUNK = 1024;  // columns
constexpr int chunks_of(int columns) { return ceil_div(columns, CHUNK); }

struct Summary {
  int32_t best;              // the first column of the largest value
  float top, sum, weighted;  // that value, and the sums of exp(x - top) and of exp(x - top) (x - top)
};

// The first column that holds `wanted`, the last if none does.
inline int find(const float* x, int count, float wanted) {
  int i = 0;
  for (; i + 16 <= count; i += 16)
    if (const uint32_t found = equal_lanes(load(x + i), set1(wanted))) return i + std::countr_zero(found);
  while (i < count && x[i] != wanted) i++;
  return std::min(i, count - 1);
}

// Of a row's chunk. Four sums go on side by side: one would wait for its last addition most of the time.
inline Summary summarize_chunk(const float* row, int columns, int chunk) {
  constexpr int SUMS = 4;
  const int first = chunk * CHUNK, count = std::min(CHUNK, columns - first);
  const float* x = row + first;
  Summary out{first, -INFINITY, 0, 0};
  const int whole = count / 16 * 16;
  alignas(64) float rest[16];
  std::fill_n(rest, 16, -INFINITY);
  std::copy_n(x + whole, count - whole, rest);
  // Calls step(k, vector) for all, k going round.
  auto each = [&](const auto& step) {
    int i = 0;
    for (; i + 16 * SUMS <= whole; i += 16 * SUMS)
#pragma GCC unroll 4
      for (int k = 0; k < SUMS; k++) step(k, load(x + i + 16 * k));
    for (; i < whole; i += 16) step(0, load(x + i));
  };
  F highest[SUMS], odd[SUMS];  // odd: nan, if any lane is infinite or nan
  for (int k = 0; k < SUMS; k++) highest[k] = load(rest), odd[k] = zero();
  each([&](int k, F v) { highest[k] = max(highest[k], v), odd[k] = fma(v, zero(), odd[k]); });
  for (int i = whole; i < count; i++) odd[0] = fma(set1(x[i]), zero(), odd[0]);
  out.top = top(max(max(highest[0], highest[1]), max(highest[2], highest[3])));
  out.top += sum(add(add(odd[0], odd[1]), add(odd[2], odd[3])));
  out.best = first + find(x, count, out.top);
  F total[SUMS], weighted[SUMS];
  for (int k = 0; k < SUMS; k++) total[k] = weighted[k] = zero();
  auto add_lanes = [&](int k, F v) {
    const F below = max(sub(v, set1(out.top)), set1(-87.0f)), e = power16(mul(below, set1(LOG2_E)));
    total[k] = add(total[k], e), weighted[k] = fma(e, below, weighted[k]);
  };
  each(add_lanes);
  add_lanes(0, load(rest));
  out.sum = sum(add(add(total[0], total[1]), add(total[2], total[3])));
  out.weighted = sum(add(add(weighted[0], weighted[1]), add(weighted[2], weighted[3])));
  return out;
}

// Chunks in order.
inline Summary merge_chunks(const Summary* chunks, int count) {
  for (const Summary* c = chunks; c < chunks + count; c++)
    if (std::isnan(c->top)) return {c->best, NAN, NAN, NAN};
  Summary out = *std::max_element(chunks, chunks + count, [](const Summary& a, const Summary& b) { return a.top < b.top; });
  out.sum = out.weighted = 0;
  for (const Summary* c = chunks; c < chunks + count; c++) {
    const float below = std::max(c->top - out.top, -87.0f);
    const float gain = first_lane(power16(set1(below * LOG2_E)));
    out.sum += c->sum * gain, out.weighted += (c->weighted + c->sum * below) * gain;
  }
  return out;
}
