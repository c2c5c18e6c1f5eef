// Attention over codes, of 8 bits or unpacked to 8: queries and softmax weights become integers of 16 bits, and
// products are sums of integers, which are exact. So all builds have the same sums. Queries are rotated as keys were
// before they were encoded, and results are rotated back (models/kv_formats.py).
#pragma once
#include "attention.h"
#ifdef __AMX_BF16__
#include "attention_codes_amx.h"
#else
#include "attention_codes_vectors.h"
#endif

constexpr float MAX_WORD = 127 * 256 + 127;  // both of its digits are at most 127

// Queries as integers of 16 bits, [rows, dim], and the step of each row.
struct CodedQueries {
  Words words;
  float* steps;

  static CodedQueries in(Buffer& memory, const Half* queries, int rows, int dim) {
    const size_t steps = round_up(sizeof(float) * rows, LINE);
    float* at = (float*)memory.get<uint8_t>(steps + Words::bytes(rows, dim));
    const CodedQueries made{Words::at((uint8_t*)at + steps, dim), at};
    alignas(64) float turned[MAX_HEAD_DIM];
    for (int row = 0; row < rows; row++) {
      for (int d = 0; d < dim; d += 16) store(turned + d, load_narrow(queries + size_t(row) * dim + d));
      rotate(turned, dim);
      const float highest = largest(turned, dim);
      made.steps[row] = highest / MAX_WORD / rotated_together(dim);
      const F gain = set1(highest == 0 ? 0 : MAX_WORD / highest);
      for (int d = 0; d < dim; d += 16) made.words.put(row, d, to_int(mul(load(turned + d), gain)));
    }
    return made;
  }
};

// One split of rows that share a sequence and a KV head, in order. The pages `next` are likely to be read after these.
inline void attend_codes(const Layer& layer, const Reads& pages, const Reads& next, int window, float cap, const Query* rows,
                         const CodedQueries& queries, int count, const Partial* out, Scratch& scratch) {
  const int dim = layer.dim;
  const SplitPages at(layer, pages);
  SplitMask mask(pages, window);
  alignas(64) float k_scales[KEYS], v_scales[KEYS], steps[ROWS_AT_ONCE];
  float* weights = scratch.weights.get<float>(ROWS_AT_ONCE * KEYS);
  const Words shares = Words::at(scratch.shares.get<uint8_t>(Words::bytes(ROWS_AT_ONCE, KEYS)), KEYS);
  const WordSums scores = WordSums::in(scratch.scores, ROWS_AT_ONCE, KEYS),
                 sums = WordSums::in(scratch.sums, ROWS_AT_ONCE, dim);
  const CodeProducts products(dim, count, layer.halves());
  uint8_t* columns = products.gathers ? scratch.columns.get<uint8_t>(size_t(SPLIT) * PAGE_SIZE * dim) : nullptr;
  const F step_of_values = set1(layer.halves() ? 1.0f / 16 : 1);  // halves of bytes are 16 times their codes
  Fetching fetching(layer, next, pages.count * (1 + dim / 32) + std::min(count, ROWS_AT_ONCE));
  int known = 0;      // pages whose scales are copied
  float largest = 0;  // of these pages' scales of values
  for (int first = 0; first < count; first += ROWS_AT_ONCE) {
    const int some = std::min(ROWS_AT_ONCE, count - first), reach = mask.reach(rows[first + some - 1]);
    products.score(queries.words.from(first), some, at.keys, reach, scores, fetching);
    for (int i = known; i < reach; i++) {
      std::copy_n(layer.scales(0, at.keys[i]), PAGE_SIZE, k_scales + PAGE_SIZE * i);
      store(v_scales + PAGE_SIZE * i, mul(load(layer.scales(1, at.values[i])), step_of_values));
    }
    if (columns) products.gather(at.values, known, reach, columns);
    if (reach > known) largest = ::largest(v_scales, PAGE_SIZE * reach);
    known = std::max(known, reach);
    for (int r = 0; r < some; r++) {
      fetching.ask(1);
      const F step = set1(queries.steps[first + r]);
      mask.find_top(rows[first + r], cap, [&](size_t i) {
        return mul(mul(scores.at(r, PAGE_SIZE * i), step), load(k_scales + PAGE_SIZE * i));
      }, weights + r * KEYS, out[first + r]);
    }
    for (int r = 0; r < some; r++) {
      const float highest = mask.sees_all(rows[first + r]) ? largest : mask.largest_seen(rows[first + r], v_scales);
      const F gain = set1(highest == 0 ? 0 : MAX_WORD / highest);
      mask.make_weights(weights + r * KEYS, out[first + r], [&](size_t i, F weight) {
        shares.put(r, PAGE_SIZE * i, to_int(mul(weight, mul(load(v_scales + PAGE_SIZE * i), gain))));
      });
      for (int i = reach; i < SPLIT && products.pads; i++) shares.put(r, PAGE_SIZE * i, int_zero());
      steps[r] = highest / MAX_WORD;
    }
    products.sum(shares, some, at.values, columns, reach, sums, fetching);
    for (int r = 0; r < some; r++)
      for (int d = 0; d < dim; d += 16) store(out[first + r].out + d, mul(sums.at(r, d), set1(steps[r])));
  }
}
