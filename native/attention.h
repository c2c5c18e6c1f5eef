// Attention over pages, in splits of SPLIT pages of a sequence's table (FlashDecoding): each split has a separate
// softmax, and splits are merged in order. Products are of pairs: bfloat16 if the build multiplies them (queries,
// keys, softmax weights and values rounded, sums in float32), else float32.
//
// The result of a row depends only on its own entries: splits begin at fixed positions of the table, a masked key has
// weight 0, and every sum has a fixed order. So decode rows and rows of any chunk get the same bits, whether one member
// computes all splits of a row or several members share them.
#pragma once
#include <algorithm>
#include <optional>
#include <vector>

#ifdef __AMX_BF16__
#include "attention_amx.h"
#else
#include "attention_vectors.h"
#endif

constexpr int ROWS_AT_ONCE = 32;  // rows whose scores fit in the L1 cache
constexpr float UNSEEN = -1e30f;  // the score of a masked key: finite, and its power of 2 is 0

// The mask of the slots of a page that a row attends to, as bits; `base` is the order of slot 0.
inline uint32_t visible(const Span& span, int base, const Query& row, int window) {
  const int high = std::min(span.stop, row.order - base + 1);
  const int low = window > 0 ? std::max(span.start, row.position - window - span.position + span.start + 1) : span.start;
  return high > low ? (uint32_t(1) << high) - (uint32_t(1) << low) : 0;
}

// The scales of the keys and values of a split, where they are stored in fewer bits.
struct Scales {
  float keys[KEYS], values[KEYS];
};

// Caps the scores of a row's keys, masks them, and replaces them by their powers of 2; their maximum and sum go to `out`.
template <bool SCALED>
inline void make_shares(const Span* spans, int num_spans, int before, int window, float cap, bool whole, const Query& query,
                        const Scales* scales, float* row, Half* shares, const Partial& out) {
  for (int i = 0; SCALED && i < num_spans; i++) {
    float* scores = row + PAGE_SIZE * i;
    store(scores, mul(load(scores), load(scales->keys + PAGE_SIZE * i)));
  }
  for (int i = 0; cap > 0 && i < num_spans; i++) store(row + PAGE_SIZE * i, cap16(load(row + PAGE_SIZE * i), cap));
  F highest = set1(UNSEEN), total = zero();
  const int full = whole ? std::clamp((query.order + 1 - before) / PAGE_SIZE, 0, num_spans) : 0;
  for (int i = 0; i < full; i++) highest = max(highest, load(row + PAGE_SIZE * i));
  uint32_t any = full;
  int base = before + PAGE_SIZE * full;
  for (int i = full; i < num_spans; i++) {
    const uint32_t seen = visible(spans[i], base - spans[i].start, query, window);
    base += spans[i].stop - spans[i].start;
    const F s = select(seen, load(row + PAGE_SIZE * i), set1(UNSEEN));
    store(row + PAGE_SIZE * i, s);
    highest = max(highest, s);
    any |= seen;
  }
  *out.top = any ? top(highest) : 0;
  const F top = set1(*out.top);
  for (int i = 0; i < num_spans; i++) {
    const F w = power16(sub(load(row + PAGE_SIZE * i), top));
    store_narrow(shares + PAGE_SIZE * i, SCALED ? mul(w, load(scales->values + PAGE_SIZE * i)) : w);
    total = add(total, w);
  }
  *out.total = sum(total);  // 0 if all keys are masked
}

// Pages of a sequence that a head reads.
struct Reads {
  const Span* spans;
  int count, head;
};

// Keys and values of a split as bfloat16, widened page by page where they are stored in fewer bits.
class WidenedPages {
 public:
  WidenedPages(const Layer& layer, Scratch& scratch)
      : layer_(layer), pages_(scratch.pages.get<uint16_t>(2 * SPLIT * PAGE_SIZE * layer.dim)) {}

  // Page `i` of one side, from `piece`. Bytes [0, asked) of `ahead` are prefetched.
  const uint16_t* widen(int side, int i, const uint8_t* piece, const uint8_t* ahead, size_t asked) {
    const size_t codes = layer_.codes_bytes();
    uint16_t* to = pages_ + size_t(side * SPLIT + i) * codes;
    for (size_t at = 0; at < codes; at += LINE) {
      if (at < asked) fetch(ahead + at);
      widen_codes(piece + at, to + at), widen_codes(piece + at + 32, to + at + 32);
    }
    std::copy_n(layer_.scales(piece), PAGE_SIZE, (side ? scales.values : scales.keys) + PAGE_SIZE * i);
    return to;
  }

  alignas(64) Scales scales;

 private:
  const Layer& layer_;
  uint16_t* pages_;
};

// One split of rows that share a sequence and a KV head, in order; `queries`: [count, dim]. `before` entries precede
// these pages. The pages `next` are likely to be read after them. FEWER: they are stored in fewer bits than bfloat16.
template <bool FEWER>
void attend_split(const Layer& layer, const Reads& pages, const Reads& next, int before, int window, float cap,
                  const Query* rows, const Half* queries, int count, const Partial* out, Scratch& scratch) {
  const auto [spans, num_spans, head] = pages;
  const int dim = layer.dim;
  bool whole = window == 0;  // all pages are full, and rows attend to all entries before them
  float* weights = scratch.weights.get<float>(ROWS_AT_ONCE * KEYS);
  Half* shares = scratch.shares.get<Half>(ROWS_AT_ONCE * KEYS);
  // Pages are scattered in memory, so the hardware cannot predict the next: values follow keys, then the next keys.
  const uint8_t *keys[SPLIT + AHEAD_PAGES], *values[SPLIT + AHEAD_PAGES];
  for (int i = 0; i < num_spans; i++)
    keys[i] = layer.page(0, spans[i].page, head), values[i] = layer.page(1, spans[i].page, head);
  for (int i = 0; i < AHEAD_PAGES; i++) {
    keys[num_spans + i] = values[std::min(i, num_spans - 1)];
    values[num_spans + i] = layer.page(0, next.spans[std::min(i, next.count - 1)].page, next.head);
    fetch_bytes(keys[i], layer.piece_bytes());
  }
  // Where pages are widened, those of a side are read in one go, and so half of the other side's, or of the next keys,
  // are prefetched while they are widened, and half while they are multiplied.
  const size_t bytes = layer.piece_bytes(), half = FEWER ? bytes / 2 / LINE * LINE : 0;
  const uint8_t* following[SPLIT];
  for (int i = 0; FEWER && i < num_spans; i++)
    following[i] = layer.page(0, next.spans[std::min(i, next.count - 1)].page, next.head);
  std::optional<WidenedPages> widened;
  if (FEWER) widened.emplace(layer, scratch);
  const uint16_t *wide_keys[SPLIT], *wide_values[SPLIT];
  const uint16_t* const* key_pages = FEWER ? wide_keys : (const uint16_t* const*)keys;
  const uint16_t* const* value_pages = FEWER ? wide_values : (const uint16_t* const*)values;
  const Scales* scales = FEWER ? &widened->scales : nullptr;
  int end = before, reach = 0;  // a row's pages include those of the rows before it: weights of 0 add nothing
  int wide = 0;                 // pages whose keys and values are wide already
  for (int first = 0; first < count; first += ROWS_AT_ONCE) {
    const int some = std::min(ROWS_AT_ONCE, count - first);
    for (; reach < num_spans && end <= rows[first + some - 1].order; end += spans[reach].stop - spans[reach].start, reach++)
      whole &= spans[reach].start == 0 && spans[reach].stop == PAGE_SIZE;
    const Products products{dim};
    const uint8_t* const* ahead[] = {FEWER ? values : keys + AHEAD_PAGES, FEWER ? following : values + AHEAD_PAGES};
    for (auto& pages : ahead)
      if (first) pages = nullptr;
    for (int i = wide; FEWER && i < reach; i++) wide_keys[i] = widened->widen(0, i, keys[i], values[i], half);
    products.score(queries + first * dim, some, key_pages, reach, weights, {ahead[0], half, bytes});
    for (int i = wide; FEWER && i < reach; i++) wide_values[i] = widened->widen(1, i, values[i], following[i], half);
    wide = reach;
    for (int r = 0; r < some; r++)
      make_shares<FEWER>(spans, reach, before, window, cap, whole, rows[first + r], scales, weights + r * KEYS,
                         shares + r * KEYS, out[first + r]);
    products.sum(shares, some, value_pages, reach, out + first, {ahead[1], half, bytes});
  }
}

// Merges `part` into `to`, as if their keys had been one split.
inline void merge(Partial to, Partial part, int dim) {
  if (*part.total == 0) return;
  const float highest = *to.total == 0 ? *part.top : std::max(*to.top, *part.top);
  const F decay = *to.total == 0 ? zero() : power16(set1(*to.top - highest)), gain = power16(set1(*part.top - highest));
  for (int d = 0; d < dim; d += 16) store(to.out + d, fma(load(part.out + d), gain, mul(load(to.out + d), decay)));
  *to.top = highest;
  *to.total = first_lane(fma(set1(*part.total), gain, mul(set1(*to.total), decay)));
}

// The factor by which a row's sum becomes its result, where a key without a value has this score.
inline float share_beside(const Partial& sum, float score) {
  const float highest = std::max(*sum.top, score);
  const F own = power16(set1(*sum.top - highest)), other = power16(set1(score - highest));
  return first_lane(div(own, fma(set1(*sum.total), own, other)));
}

// The beginnings of a table's splits, in spans and in entries.
struct Split {
  int first, count, before;
};

// The splits that the rows from `first_row` to `last_row` attend to.
inline void find_splits(const Span* spans, int num_spans, int window, const Query& first_row, const Query& last_row,
                        std::vector<Split>& out) {
  out.clear();
  for (int first = 0, before = 0; first < num_spans && before <= last_row.order; first += SPLIT) {
    const int count = std::min(SPLIT, num_spans - first), start = before;
    for (int i = first; i < first + count; i++) before += spans[i].stop - spans[i].start;
    const Span& end = spans[first + count - 1];
    if (window > 0 && end.position + end.stop - end.start - 1 <= first_row.position - window) continue;
    out.push_back({first, count, start});
  }
}
