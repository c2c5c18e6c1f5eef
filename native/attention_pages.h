// Pages of keys and values, and their numbers in pairs: products are of pairs, bfloat16 where the processor multiplies
// them, else float32.
#pragma once
#include "memory.h"
#include "simd.h"

constexpr int PAGE_SIZE = 16, SPLIT = 8, KEYS = PAGE_SIZE * SPLIT;
constexpr int AHEAD_PAGES = 2;  // asked for before they are needed

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
  Buffer queries, pairs, weights, shares, outs;  // shares: weights, narrow
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

// All pairs of `count` pages of one side, `width` columns each, page after page.
inline void make_pairs(const uint16_t* const* pages, int count, int width, int page_size, Half* to) {
  const FromPage from{pages};
  for (int i = 0; i < count; i++)
    for (int at = 0; at < page_size; at += 2 * width)
      for (int column = 0; column < width; column += 16, to += 32) store_pairs(to, from(i, at, column, width));
}

struct SidePairs {
  Half *keys, *values;
};

// The same of a split's keys, which come first in `pages`, and of its values.
inline SidePairs make_pairs(const uint16_t* const* pages, int count, int dim, Scratch& scratch) {
  const int page_size = PAGE_SIZE * dim;
  Half *keys = scratch.pairs.get<Half>(2 * SPLIT * page_size), *values = keys + SPLIT * page_size;
  make_pairs(pages, count, PAGE_SIZE, page_size, keys);
  make_pairs(pages + count, count, dim, page_size, values);
  return {keys, values};
}
