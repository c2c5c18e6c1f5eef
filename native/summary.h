// What sampling asks of a row of logits, found in chunks of fixed size, so that the bits do not depend on threads.
#pragma once
#include <algorithm>

#include "rounding.h"
#include "simd.h"

constexpr int CHUNK = 1024;  // columns
constexpr int chunks_of(int columns) { return ceil_div(columns, CHUNK); }

struct Summary {
  int32_t best;              // the first column of the largest value
  float top, sum, weighted;  // that value, and the sums of exp(x - top) and of exp(x - top) (x - top)
};

// Of a row's chunk.
inline Summary summarize_chunk(const float* row, int columns, int chunk) {
  const int first = chunk * CHUNK, count = std::min(CHUNK, columns - first);
  const float* x = row + first;
  Summary out{first, -INFINITY, 0, 0};
  const int whole = count / 16 * 16;
  alignas(64) float rest[16];
  std::fill_n(rest, 16, -INFINITY);
  std::copy_n(x + whole, count - whole, rest);
  F highest = load(rest), odd = zero();  // odd: nan, if any lane is infinite or nan
  for (int i = 0; i < whole; i += 16) highest = max(highest, load(x + i)), odd = fma(load(x + i), zero(), odd);
  for (int i = whole; i < count; i++) odd = fma(set1(x[i]), zero(), odd);
  out.top = top(highest) + sum(odd);
  int best = 0;
  while (best < count - 1 && x[best] != out.top) best++;
  out.best = first + best;
  F total = zero(), weighted = zero();
  auto add_lanes = [&](F v) {
    const F below = max(sub(v, set1(out.top)), set1(-87.0f)), e = power16(mul(below, set1(LOG2_E)));
    total = add(total, e), weighted = fma(e, below, weighted);
  };
  for (int i = 0; i < whole; i += 16) add_lanes(load(x + i));
  add_lanes(load(rest));
  out.sum = sum(total), out.weighted = sum(weighted);
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
