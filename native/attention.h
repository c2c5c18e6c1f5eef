// Attention over pages, in splits of SPLIT pages of a sequence's table (FlashDecoding): each split has a softmax of its
// own, and splits are merged in order. Products are of pairs: bfloat16 where the processor multiplies them (queries,
// keys, softmax weights and values rounded, sums in float32), else float32.
//
// What a row computes depends on its own entries alone: splits begin at fixed places of the table, a key that a row may
// not see has weight 0, and every sum has a fixed order. So decode rows and rows of any chunk get the same bits,
// whether a member computes all splits of a row or several share them.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

constexpr int PAGE_SIZE = 16, SPLIT = 8, KEYS = PAGE_SIZE * SPLIT;
constexpr int AHEAD_PAGES = 2;  // asked for before they are needed
constexpr float UNSEEN = -1e30f;   // the score of what a row may not see: finite, and its power of 2 is 0

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
  int order;  // entries before its own
  int position;
};

// A softmax-weighted sum of values, as yet without the division: [dim] at out.
struct Partial {
  float *out, *top, *total;
};

struct Scratch {
  std::vector<Half> queries, pairs, shares;  // shares: weights, narrow
  std::vector<float> weights, outs, state;
};

// Scaled queries of one head as rows to be multiplied. Softmax is in powers of 2: one multiplication less per weight.
inline void narrow_query(const float* q, int dim, Half* out) {
  for (int d = 0; d < dim; d += 16) store_narrow(out + d, mul(load(q + d), set1(1.44269504f)));
}

// Pairs of 16 columns of two rows of a page, as they lie in memory, asking for the same of a later page. `at` is where
// the two rows begin, `width` how long they are.
struct FromPage {
  const uint16_t* const* pages;  // page by page, and AHEAD_PAGES more
  Pairs operator()(int page, int at, int column, int width) const {
    const uint16_t *from = pages[page] + at + column, *ahead = pages[page + AHEAD_PAGES] + at + column;
    if (column % 32 == 0) {
      fetch(ahead);
      if (width > 16) fetch(ahead + width);
    }
    return pair_up(load(from), load(from + width));
  }
};

// The same out of pairs made before, which pays if many rows want them.
struct FromPairs {
  const Half* pairs;
  int page_size;
  Pairs operator()(int page, int at, int column, int) const {
    return load_pairs(pairs + page * page_size + at + 2 * column);
  }
};

// Scores of R rows against two pages of keys.
template <int R, class Source>
void score_pages(const Half* queries, const Source& keys, int first, int second, int dim, float* out) {
  F acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = zero();
  for (int d = 0; d < dim; d += 2) {
    const Pairs a = keys(first, PAGE_SIZE * d, 0, PAGE_SIZE), b = keys(second, PAGE_SIZE * d, 0, PAGE_SIZE);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      acc[r][0] = dot_pairs(acc[r][0], a, queries + r * dim + d);
      acc[r][1] = dot_pairs(acc[r][1], b, queries + r * dim + d);
    }
  }
  for (int r = 0; r < R; r++) store(out + r * KEYS, acc[r][0]), store(out + r * KEYS + PAGE_SIZE, acc[r][1]);
}

// Sums of 16 C columns of these pages' values for R rows, weighted.
template <int R, int C, class Source>
void sum_columns(const Half* shares, const Source& values, int pages, int dim, int d, const Partial* out) {
  F acc[R][C];
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = zero();
  for (int page = 0; page < pages; page++)
    for (int k = 0; k < PAGE_SIZE; k += 2) {
      Pairs v[C];
      for (int c = 0; c < C; c++) v[c] = values(page, k * dim, d + 16 * c, dim);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = dot_pairs(acc[r][c], v[c], shares + r * KEYS + page * PAGE_SIZE + k);
    }
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) store(out[r].out + d + 16 * c, acc[r][c]);
}

template <int R, class Source>
void sum_values(const Half* shares, const Source& values, int pages, int dim, const Partial* out) {
  constexpr int C = 2 * TILE_ROWS / R >= 4 ? 4 : 2;
  int d = 0;
  for (; d + 16 * C <= dim; d += 16 * C) sum_columns<R, C>(shares, values, pages, dim, d, out);
  for (; d < dim; d += 32) sum_columns<R, 2>(shares, values, pages, dim, d, out);
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

// One split of rows that share a sequence and a KV head, in order; `queries`: [count, dim]. `before` entries come before
// these spans.
inline void attend_split(const Layer& layer, int head, const Span* spans, int num_spans, int before, int window,
                         const Query* rows, const Half* queries, int count, const Partial* out, Scratch& scratch) {
  const int dim = layer.dim, page_size = PAGE_SIZE * dim;
  int end = before, reach = 0;  // the pages that the last row may see are enough: weights of 0 add nothing
  bool whole = window == 0;     // all pages are full, and rows see what is before them
  for (; reach < num_spans && end <= rows[count - 1].order; end += spans[reach].stop - spans[reach].start, reach++)
    whole &= spans[reach].start == 0 && spans[reach].stop == PAGE_SIZE;
  num_spans = reach;
  scratch.weights.resize(size_t(count) * KEYS), scratch.shares.resize(size_t(count) * KEYS);
  // Pages lie anywhere, so only we know which comes next: after the keys come the values.
  const uint16_t* pages[2 * SPLIT + AHEAD_PAGES];
  for (int i = 0; i < 2 * num_spans + AHEAD_PAGES; i++) {
    const int at = std::min(i, 2 * num_spans - 1);
    pages[i] = layer.page(at >= num_spans, spans[at % num_spans].page, head);
  }
  for (int i = 0; i < AHEAD_PAGES; i++) fetch_bytes(pages[i], 2 * page_size);
  const bool many = count > TILE_ROWS;
  if (many) scratch.pairs.resize(SPLIT * page_size);
  // Calls step(keys or values): pages as they lie, or their pairs, made once for many rows.
  auto with_pairs = [&](const uint16_t* const* side, int width, const auto& step) {
    const FromPage from{side};
    if (!many) return step(from);
    Half* to = scratch.pairs.data();
    for (int i = 0; i < num_spans; i++)
      for (int at = 0; at < page_size; at += 2 * width)
        for (int column = 0; column < width; column += 16, to += 32) store_pairs(to, from(i, at, column, width));
    step(FromPairs{scratch.pairs.data(), page_size});
  };
  with_pairs(pages, PAGE_SIZE, [&](const auto& keys) {
    for (int i = 0; i < num_spans; i += 2)
      in_row_tiles(count, 0, [&]<int R>(int r) {
        const int second = std::min(i + 1, num_spans - 1);  // an odd one out is scored twice and looked at once
        score_pages<R>(queries + r * dim, keys, i, second, dim, &scratch.weights[size_t(r) * KEYS + PAGE_SIZE * i]);
      });
  });
  for (int r = 0; r < count; r++) {
    float* row = scratch.weights.data() + size_t(r) * KEYS;
    F highest = set1(UNSEEN), total = zero();
    const int full = whole ? std::clamp((rows[r].order + 1 - before) / PAGE_SIZE, 0, num_spans) : 0;
    for (int i = 0; i < full; i++) highest = max(highest, load(row + PAGE_SIZE * i));
    uint32_t any = full;
    int base = before + PAGE_SIZE * full;
    for (int i = full; i < num_spans; i++) {
      const uint32_t seen = visible(spans[i], base - spans[i].start, rows[r], window);
      base += spans[i].stop - spans[i].start;
      const F s = select(seen, load(row + PAGE_SIZE * i), set1(UNSEEN));
      store(row + PAGE_SIZE * i, s);
      highest = max(highest, s);
      any |= seen;
    }
    *out[r].top = any ? top(highest) : 0;
    const F top = set1(*out[r].top);
    for (int i = 0; i < num_spans; i++) {
      const F w = power16(sub(load(row + PAGE_SIZE * i), top));
      store_narrow(scratch.shares.data() + size_t(r) * KEYS + PAGE_SIZE * i, w);
      total = add(total, w);
    }
    *out[r].total = sum(total);  // 0 if nothing was seen
  }
  with_pairs(pages + num_spans, dim, [&](const auto& values) {
    in_row_tiles(count, 0, [&]<int R>(int r) {
      sum_values<R>(&scratch.shares[size_t(r) * KEYS], values, num_spans, dim, out + r);
    });
  });
}

// `to` and `part` as if their keys had been one split.
inline void merge(Partial to, Partial part, int dim) {
  if (*part.total == 0) return;
  const float highest = *to.total == 0 ? *part.top : std::max(*to.top, *part.top);
  alignas(64) float decay[16], gain[16];
  store(decay, *to.total == 0 ? zero() : power16(set1(*to.top - highest)));
  store(gain, power16(set1(*part.top - highest)));
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
