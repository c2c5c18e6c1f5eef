// The statistics of a row of logits for sampling, computed in chunks of fixed size, so that bits do not depend on
// threads.
#pragma once
#include <algorithm>
#include <bit>

#include "noise.h"
#include "rounding.h"

constexpr int CHUNK = 1024;  // columns
constexpr int chunks_of(int columns) { return ceil_div(columns, CHUNK); }

struct Summary {
  int32_t best;              // the first column of the largest value
  float top, sum, weighted;  // the largest value, and the sums of exp(x - top) and of exp(x - top) (x - top)
};

// The first column with the value `wanted`, the last if there is none.
inline int find(const float* x, int count, float wanted) {
  int i = 0;
  for (; i + 16 <= count; i += 16)
    if (const uint32_t found = equal_lanes(load(x + i), set1(wanted))) return i + std::countr_zero(found);
  while (i < count && x[i] != wanted) i++;
  return std::min(i, count - 1);
}

// Four sums are accumulated in parallel, since a single one would wait for the latency of additions.
constexpr int ABREAST = 4;
inline float total(const F (&sums)[ABREAST]) { return sum(add(add(sums[0], sums[1]), add(sums[2], sums[3]))); }

// A row's chunk as whole vectors, and the rest, padded with -inf.
struct Chunk {
  const float* x;
  int first, count, whole;
  alignas(64) float rest[16];

  Chunk(const float* row, int columns, int chunk)
      : x(row + chunk * CHUNK), first(chunk * CHUNK), count(std::min(CHUNK, columns - first)), whole(count / 16 * 16) {
    std::fill_n(rest, 16, -INFINITY);
    std::copy_n(x + whole, count - whole, rest);
  }
  // Calls step(k, vector) for all whole vectors, with k in rotation.
  template <class Step>
  void each(const Step& step) const {
    int i = 0;
    for (; i + 16 * ABREAST <= whole; i += 16 * ABREAST)
#pragma GCC unroll 4
      for (int k = 0; k < ABREAST; k++) step(k, load(x + i + 16 * k));
    for (; i < whole; i += 16) step(0, load(x + i));
  }
};

inline Summary summarize_chunk(const float* row, int columns, int chunk) {
  const Chunk c(row, columns, chunk);
  Summary out{c.first, -INFINITY, 0, 0};
  F highest[ABREAST], odd[ABREAST];  // odd: nan, if any lane is infinite or nan
  for (int k = 0; k < ABREAST; k++) highest[k] = load(c.rest), odd[k] = zero();
  c.each([&](int k, F v) { highest[k] = max(highest[k], v), odd[k] = fma(v, zero(), odd[k]); });
  for (int i = c.whole; i < c.count; i++) odd[0] = fma(set1(c.x[i]), zero(), odd[0]);
  out.top = top(max(max(highest[0], highest[1]), max(highest[2], highest[3]))) + total(odd);
  out.best = c.first + find(c.x, c.count, out.top);
  F all[ABREAST], weighted[ABREAST];
  for (int k = 0; k < ABREAST; k++) all[k] = weighted[k] = zero();
  auto add_lanes = [&](int k, F v) {
    const F below = max(sub(v, set1(out.top)), set1(-87.0f)), e = power16(mul(below, set1(LOG2_E)));
    all[k] = add(all[k], e), weighted[k] = fma(e, below, weighted[k]);
  };
  c.each(add_lanes);
  add_lanes(0, load(c.rest));
  out.sum = total(all), out.weighted = total(weighted);
  return out;
}

// The sum of exp((x - top) * gain) over a row's chunk; terms below about 1e-38 are 0.
inline float weigh_chunk(const float* row, int columns, int chunk, float top, float gain) {
  const Chunk c(row, columns, chunk);
  F all[ABREAST];
  for (F& sum : all) sum = zero();
  auto weigh = [&](int k, F v) {
    all[k] = add(all[k], power16(max(mul(sub(v, set1(top)), set1(gain * LOG2_E)), set1(-1000.0f))));
  };
  c.each(weigh);
  weigh(0, load(c.rest));
  return total(all);
}

// The first of the largest values of a row with noise. It takes 16 columns at a time, in any order ascending per lane.
struct Highest {
  F value = set1(-INFINITY), where = zero();
  uint32_t numbers = 0xffff;  // lanes without NaN

  void look(F v, const Noise& noise, int column) {
    numbers &= equal_lanes(v, v);
    const F seen = max(with_noise(v, noise, gumbel(noise, column)), value);
    where = select(equal_lanes(seen, value), where, set1(float(column))), value = seen;
  }
  // The value is infinite if there was a NaN.
  Best best() const {
    if (numbers != 0xffff) return {INFINITY, 0};
    alignas(64) float values[16], places[16];
    store(values, value), store(places, where);
    Best best;
    for (int lane = 0; lane < 16; lane++) {
      const Best other{values[lane], int(places[lane]) + lane};
      if (best < other || (best.value == other.value && other.column < best.column)) best = other;
    }
    return best;
  }
};

// The largest value of a row's chunk with noise; NaN counts as the largest.
inline Best draw_chunk(const float* row, int columns, int chunk, const Noise& noise) {
  const Chunk c(row, columns, chunk);
  Highest highest;
  for (int i = 0; i < c.whole; i += 16) highest.look(load(c.x + i), noise, c.first + i);
  highest.look(load(c.rest), noise, c.first + c.whole);
  if (highest.numbers == 0xffff) return highest.best();
  return {INFINITY, c.first + int(std::find_if(c.x, c.x + c.count, [](float x) { return std::isnan(x); }) - c.x)};
}

// Merges chunks in order.
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
