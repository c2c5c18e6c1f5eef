// Attention over pages, in splits of SPLIT pages of a sequence's table (FlashDecoding): each split has a separate
// softmax, and splits are merged in order. Products are of pairs: bfloat16 if the build multiplies them (queries,
// keys, softmax weights and values rounded, sums in float32), else float32.
//
// The result of a row depends only on its own entries: splits begin at fixed positions of the table, a masked key has
// weight 0, and every sum has a fixed order. So decode rows and rows of any chunk get the same bits, whether one member
// computes all splits of a row or several members share them.
#pragma once
#include <algorithm>
#include <vector>

#ifdef __AMX_BF16__
#include "attention_amx.h"
#else
#include "attention_vectors.h"
#endif

constexpr int ROWS_AT_ONCE = 32;  // rows whose scores fit in the L1 cache

// The mask of the slots of a page that a row attends to, as bits; `base` is the order of slot 0.
inline uint32_t visible(const Span& span, int base, const Query& row, int window) {
  const int high = std::min(span.stop, row.order - base + 1);
  const int low = window > 0 ? std::max(span.start, row.position - window - span.position + span.start + 1) : span.start;
  return high > low ? (uint32_t(1) << high) - (uint32_t(1) << low) : 0;
}

// The pages of a split.
struct SplitPages {
  const uint8_t *keys[SPLIT + AHEAD_PAGES], *values[SPLIT + AHEAD_PAGES];

  SplitPages(const Layer& layer, const Reads& pages) {
    for (int i = 0; i < pages.count; i++) {
      const int page = pages.spans[i].page;
      keys[i] = layer.page(0, page, pages.head), values[i] = layer.page(layer.once ? 0 : 1, page, pages.head);
    }
  }
};

// The same, and those that follow. Pages are scattered in memory, so the hardware cannot predict the next: values follow
// keys, then the next keys.
struct PagesAhead : SplitPages {
  size_t bytes;

  // The pages `next` are likely to be read after these.
  PagesAhead(const Layer& layer, const Reads& pages, const Reads& next)
      : SplitPages(layer, pages), bytes(layer.piece_bytes()) {
    for (int i = 0; i < AHEAD_PAGES; i++) {
      keys[pages.count + i] = values[std::min(i, pages.count - 1)];
      values[pages.count + i] = layer.page(0, next.spans[std::min(i, next.count - 1)].page, next.head);
      fetch_bytes(keys[i], bytes);
    }
  }
  // Makes values of keys that are values.
  void make_values(const Layer& layer, int count, Buffer& memory) {
    uint8_t* made = memory.get<uint8_t>(count * bytes);
    for (int i = 0; i < count; i++, made += bytes) keys_as_values(keys[i], layer.dim, made), values[i] = made;
  }
  // What is fetched with keys (side 0) or values, when they are read for the first time.
  Ahead ahead(int side, bool first) const { return {first ? (side ? values : keys) + AHEAD_PAGES : nullptr, bytes}; }
};

// What rows see of a split.
class SplitMask {
 public:
  SplitMask(const Reads& pages, int window)
      : pages_(pages), before_(pages.before), window_(window), end_(pages.before), whole_(window == 0) {
    if (pages.bias.values) set_bias();
  }

  // The number of pages that rows up to `last` attend to. A row's pages include those of the rows before it: weights of
  // 0 add nothing.
  int reach(const Query& last) {
    for (; reach_ < pages_.count && end_ <= last.order; reach_++) {
      const Span& span = pages_.spans[reach_];
      end_ += span.stop - span.start, whole_ &= span.start == 0 && span.stop == PAGE_SIZE;
    }
    return reach_;
  }

  // Whether a row attends to all slots of the pages that it reaches.
  bool sees_all(const Query& query) const { return full(query) == reach_ && !pages_.bias.values; }

  // The largest of some numbers of the slots that a row attends to; 0 or more.
  float largest_seen(const Query& query, const float* numbers) const {
    F most = zero();
    for_pages(query, [&](int i, uint32_t seen) {
      if (pages_.bias.values) seen &= shown_[i];
      most = larger(most, select(seen, load(numbers + PAGE_SIZE * i), zero()));
    });
    return top_size(most);
  }

  // Caps the scores of a row's keys, which `score(page)` gives, adds their bias, masks them, and stores them in `row`.
  // Their maximum goes to `out`.
  template <class Score>
  void find_top(const Query& query, float cap, const Score& score, float* row, const Partial& out) const {
    F highest = set1(UNSEEN);
    uint32_t any = 0;
    for_pages(query, [&](size_t i, uint32_t seen) {
      F s = score(i);
      if (cap > 0) s = cap16(s, cap);
      if (pages_.bias.values) s = add(s, load(bias_ + PAGE_SIZE * i));
      if (seen != ALL_SLOTS) s = select(seen, s, set1(UNSEEN));
      store(row + PAGE_SIZE * i, s);
      highest = max(highest, s);
      any |= seen;
    });
    *out.top = any ? top(highest) : 0;
  }
  // Calls put(page, powers of 2 of a row's scores), of which `find_top` has found the maximum. Their sum goes to `out`.
  template <class Put>
  void make_weights(const float* row, const Partial& out, const Put& put) const {
    F total = zero();
    const F top = set1(*out.top);
    const size_t reach = reach_;
    for (size_t i = 0; i < reach; i++) {
      const F weight = power16(sub(load(row + PAGE_SIZE * i), top));
      put(i, weight);
      total = add(total, weight);
    }
    *out.total = sum(total);  // 0 if all keys are masked
  }

 private:
  static constexpr uint32_t ALL_SLOTS = (1 << PAGE_SIZE) - 1;
  // The number of leading pages of which a row sees all slots, as far as that is known without a look at them.
  int full(const Query& query) const { return whole_ ? std::clamp((query.order + 1 - before_) / PAGE_SIZE, 0, reach_) : 0; }
  // Calls step(page, mask of the slots that a row attends to).
  template <class Step>
  void for_pages(const Query& query, const Step& step) const {
    const int whole = full(query);
    for (int i = 0; i < whole; i++) step(i, ALL_SLOTS);
    for (int i = whole, base = before_ + PAGE_SIZE * whole; i < reach_; i++) {
      const Span& span = pages_.spans[i];
      step(i, visible(span, base - span.start, query, window_));
      base += span.stop - span.start;
    }
  }

  // The bias of each slot, for scores of powers of 2. A hidden entry gets a finite score, as a masked one has.
  void set_bias() {
    const auto [values, count] = pages_.bias;
    for (int i = 0, order = before_; i < pages_.count; i++) {
      const Span& span = pages_.spans[i];
      shown_[i] = ALL_SLOTS;
      for (int slot = 0; slot < PAGE_SIZE; slot++) {
        const bool known = slot >= span.start && slot < span.stop && order < count;
        bias_[PAGE_SIZE * i + slot] = known ? std::max(values[order] * LOG2_E, UNSEEN) : 0;
        if (known && values[order] <= UNSEEN) shown_[i] -= uint32_t(1) << slot;
        order += slot >= span.start && slot < span.stop;
      }
    }
  }

  const Reads& pages_;
  alignas(64) float bias_[KEYS];  // set if there is any, as the next
  uint32_t shown_[SPLIT];         // the slots that it does not hide, as bits
  const int before_, window_;
  int end_, reach_ = 0;
  bool whole_;  // all pages are full, and rows attend to all entries before them
};

// One split of rows that share a sequence and a KV head, in order; `queries`: [count, dim].
inline void attend_split(const Layer& layer, const Reads& pages, const Reads& next, int window, float cap, const Query* rows,
                         const Half* queries, int count, const Partial* out, Scratch& scratch) {
  PagesAhead at(layer, pages, next);
  if (layer.once) at.make_values(layer, pages.count, scratch.values);
  SplitMask mask(pages, window);
  float* weights = scratch.weights.get<float>(ROWS_AT_ONCE * KEYS);
  Half* shares = scratch.shares.get<Half>(ROWS_AT_ONCE * KEYS);
  const Products products{layer.dim};
  for (int first = 0; first < count; first += ROWS_AT_ONCE) {
    const int some = std::min(ROWS_AT_ONCE, count - first), reach = mask.reach(rows[first + some - 1]);
    products.score(queries + first * layer.dim, some, at.keys, reach, weights, at.ahead(0, first == 0));
    for (int r = 0; r < some; r++) {  // all of one before the other: rows are independent, and a row's steps are not
      float* row = weights + r * KEYS;
      mask.find_top(rows[first + r], cap, [&](size_t i) { return load(row + PAGE_SIZE * i); }, row, out[first + r]);
    }
    for (int r = 0; r < some; r++) {
      Half* share = shares + r * KEYS;
      mask.make_weights(weights + r * KEYS, out[first + r],
                        [&](size_t i, F weight) { store_narrow(share + PAGE_SIZE * i, weight); });
    }
    products.sum(shares, some, at.values, reach, out + first, at.ahead(1, first == 0));
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
