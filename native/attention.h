// Attention over pages, in splits of SPLIT pages of a sequence's table (FlashDecoding): each split has a softmax of its
// own, and splits are merged in order.
//
// What a row computes depends on its own entries alone: splits begin at fixed places of the table, a key that a row may
// not see has weight 0, and every sum has a fixed order. So decode rows and rows of any chunk get the same bits,
// whether a member computes all splits of a row or several share them.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

constexpr int PAGE_SIZE = 16, SPLIT = 8, KEYS = PAGE_SIZE * SPLIT;

struct Span {
  int32_t page, start, stop, position;
};

// K and V of one layer in float16: a page of a head holds keys transposed, [dim, PAGE_SIZE], or values, [PAGE_SIZE, dim].
struct Layer {
  uint16_t* data;
  int64_t side_stride, page_stride;
  int kv_heads, dim;
  uint16_t* page(int side, int64_t page, int head) const {
    return data + side * side_stride + page * page_stride + size_t(head) * PAGE_SIZE * dim;
  }
};

struct Query {
  const float* q;  // [dim], scaled
  int order;       // entries before its own
  int position;
};

// A softmax-weighted sum of values, as yet without the division: [dim] at out.
struct Partial {
  float *out, *top, *total;
};

struct Scratch {
  std::vector<float> keys, values, weights, outs, state;
};

// Scores of R rows against two pages of keys. What comes from memory asks for what comes four pages later as it goes.
template <int R, class T>
void score_pages(const Query* rows, const T* first, const T* second, int dim, float* out, const T* const* ahead) {
  F acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero();
  for (int d = 0; d < dim; d++) {
    const F a = load(first + PAGE_SIZE * d), b = load(second + PAGE_SIZE * d);
    if constexpr (sizeof(T) == 2) fetch(ahead[d % 2] + PAGE_SIZE * (d - d % 2));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const F q = set1(rows[r].q[d]);
      acc[r][0] = fma(q, a, acc[r][0]), acc[r][1] = fma(q, b, acc[r][1]);
    }
  }
  for (int r = 0; r < R; r++) store(out + r * KEYS, acc[r][0]), store(out + r * KEYS + PAGE_SIZE, acc[r][1]);
}

// Adds a page's values, weighted, to the sums of R rows.
template <int R, class T>
void add_page(const Partial* rows, const float* weights, const T* values, int dim, const T* ahead) {
  constexpr int C = 2 * TILE_ROWS / R >= 4 ? 4 : 2;
  for (int d = 0; d < dim; d += 16 * C) {
    F acc[R][C];
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) acc[r][c] = load(rows[r].out + d + 16 * c);
    for (int k = 0; k < PAGE_SIZE; k++) {
      F v[C];
      for (int c = 0; c < C; c++) v[c] = load(values + k * dim + d + 16 * c);
      if constexpr (sizeof(T) == 2)
        for (int c = 0; c < C; c += 2) fetch(ahead + k * dim + d + 16 * c);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const F w = set1(weights[r * KEYS + k]);
        for (int c = 0; c < C; c++) acc[r][c] = fma(w, v[c], acc[r][c]);
      }
    }
    for (int r = 0; r < R; r++)
      for (int c = 0; c < C; c++) store(rows[r].out + d + 16 * c, acc[r][c]);
  }
}

// Calls step<R>(row) for rows in tiles of TILE_ROWS, and once for what is left.
template <int R = TILE_ROWS, class Step>
inline void in_row_tiles(int count, int row, const Step& step) {
  for (; count - row >= R; row += R) step.template operator()<R>(row);
  if constexpr (R > 1)
    if (row < count) in_row_tiles<R - 1>(count, row, step);
}

// Which slots of a page a row may see, as bits; `base` is the order of slot 0.
inline uint32_t visible(const Span& span, int base, const Query& row, int window) {
  const int high = std::min(span.stop, row.order - base + 1);
  const int low = window > 0 ? std::max(span.start, row.position - window - span.position + span.start + 1) : span.start;
  return high > low ? (uint32_t(1) << high) - (uint32_t(1) << low) : 0;
}

// One split of rows that share a sequence and a KV head, in order. `before` entries come before these spans.
inline void attend_split(const Layer& layer, int head, const Span* spans, int num_spans, int before, int window,
                         const Query* rows, int count, const Partial* out, Scratch& scratch) {
  const int dim = layer.dim, page_size = PAGE_SIZE * dim;
  int end = before, reach = 0;  // the pages that the last row may see are enough: weights of 0 add nothing
  bool whole = window == 0;     // all pages are full, and rows see what is before them
  for (; reach < num_spans && end <= rows[count - 1].order; end += spans[reach].stop - spans[reach].start, reach++)
    whole &= spans[reach].start == 0 && spans[reach].stop == PAGE_SIZE;
  num_spans = reach;
  const bool many = count > TILE_ROWS;  // then pages are converted to float32 once
  if (many) scratch.keys.resize(2 * page_size), scratch.values.resize(page_size);
  scratch.weights.resize(size_t(count) * KEYS);
  float* weights = scratch.weights.data();
  auto convert = [&](const uint16_t* from, float* to) {
    for (int i = 0; i < page_size; i += 16) store(to + i, load(from + i));
    return (const float*)to;
  };
  constexpr int AHEAD_PAGES = 2;
  // Pages lie anywhere, so only we know which comes next: after the keys come the values.
  auto page = [&](int i) {
    i = std::min(i, 2 * num_spans - 1);
    return (const uint16_t*)layer.page(i >= num_spans, spans[i % num_spans].page, head);
  };
  for (int i = 0; i < AHEAD_PAGES; i++) fetch_bytes(page(i), 2 * page_size);
  for (int i = 0; i < num_spans; i += 2) {
    const uint16_t *first = page(i), *second = i + 1 < num_spans ? page(i + 1) : first;  // never looked at
    float* to = weights + PAGE_SIZE * i;
    if (many) {
      const float *a = convert(first, scratch.keys.data()), *b = convert(second, scratch.keys.data() + page_size);
      in_row_tiles(count, 0, [&]<int R>(int r) { score_pages<R, float>(rows + r, a, b, dim, to + size_t(r) * KEYS, {}); });
    } else {
      const uint16_t* ahead[] = {page(i + AHEAD_PAGES), page(i + AHEAD_PAGES + 1)};
      in_row_tiles(count, 0, [&]<int R>(int r) { score_pages<R>(rows, first, second, dim, to, ahead); });
    }
  }
  for (int r = 0; r < count; r++) {
    float* row = weights + size_t(r) * KEYS;
    F highest = set1(-INFINITY), total = zero();
    const int full = whole ? std::clamp((rows[r].order + 1 - before) / PAGE_SIZE, 0, num_spans) : 0;
    for (int i = 0; i < full; i++) highest = max(highest, load(row + PAGE_SIZE * i));
    uint32_t any = full;
    int base = before + PAGE_SIZE * full;
    for (int i = full; i < num_spans; i++) {
      const uint32_t seen = visible(spans[i], base - spans[i].start, rows[r], window);
      base += spans[i].stop - spans[i].start;
      const F s = select(seen, load(row + PAGE_SIZE * i), set1(-INFINITY));
      store(row + PAGE_SIZE * i, s);
      highest = max(highest, s);
      any |= seen;
    }
    *out[r].top = any ? top(highest) : 0;
    for (int i = 0; i < num_spans; i++) {
      const F w = exp16(sub(load(row + PAGE_SIZE * i), set1(*out[r].top)));
      store(row + PAGE_SIZE * i, w);
      total = add(total, w);
    }
    *out[r].total = sum(total);  // 0 if nothing was seen
    std::fill_n(out[r].out, dim, 0.0f);
  }
  for (int i = 0; i < num_spans; i++) {
    const float* w = weights + PAGE_SIZE * i;
    if (many) {
      const float* values = convert(page(num_spans + i), scratch.values.data());
      in_row_tiles(count, 0, [&]<int R>(int r) { add_page<R, float>(out + r, w + size_t(r) * KEYS, values, dim, {}); });
    } else {
      const uint16_t *values = page(num_spans + i), *ahead = page(num_spans + i + AHEAD_PAGES);
      in_row_tiles(count, 0, [&]<int R>(int) { add_page<R>(out, w, values, dim, ahead); });
    }
  }
}

// `to` and `part` as if their keys had been one split.
inline void merge(Partial to, Partial part, int dim) {
  if (*part.total == 0) return;
  const float highest = *to.total == 0 ? *part.top : std::max(*to.top, *part.top);
  alignas(64) float decay[16], gain[16];
  store(decay, *to.total == 0 ? zero() : exp16(set1(*to.top - highest)));
  store(gain, exp16(set1(*part.top - highest)));
  for (int d = 0; d < dim; d += 16)
    store(to.out + d, fma(load(part.out + d), set1(gain[0]), mul(load(to.out + d), set1(decay[0]))));
  *to.top = highest;
  *to.total = *to.total * decay[0] + *part.total * gain[0];
}

inline void divide(Partial row, int dim) {
  const F share = set1(1.0f / *row.total);
  for (int d = 0; d < dim; d += 16) store(row.out + d, mul(load(row.out + d), share));
}

// Where the splits of a table begin, in spans and in entries.
struct Split {
  int first, count, before;
};

// Splits that the rows from `first_row` on to `last_row` may see.
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
