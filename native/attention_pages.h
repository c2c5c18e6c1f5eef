// Pages of keys and values, in pairs: products are of pairs, bfloat16 if the build multiplies them, else float32.
#pragma once
#include "memory.h"
#include "simd.h"

constexpr int PAGE_SIZE = 16, SPLIT = 8, KEYS = PAGE_SIZE * SPLIT;
constexpr int AHEAD_PAGES = INTEL ? 2 : 6;  // pages to prefetch

struct Span {
  int32_t start, stop, position, page;
};

// K and V of one layer in bfloat16. A page of a head holds pairs in the order of multiplication: two columns of a key,
// [dim / 2, PAGE_SIZE, 2], and the values of two slots, [PAGE_SIZE / 2, dim, 2].
struct Layer {
  uint16_t* data;
  int64_t side_stride, page_stride;
  int kv_heads, dim;
  size_t piece_bytes() const { return sizeof(uint16_t) * PAGE_SIZE * dim; }  // of a page, for a head
  uint16_t* page(int side, int64_t page, int head) const {
    return data + side * side_stride + page * page_stride + size_t(head) * PAGE_SIZE * dim;
  }
  // Keys and values of one entry, [dim] each.
  void store(int64_t page, int head, int slot, const uint16_t* k, const uint16_t* v) const {
    uint16_t *keys = this->page(0, page, head) + 2 * slot, *values = this->page(1, page, head) + slot / 2 * 2 * dim;
    for (int d = 0; d < dim; d += 2) std::memcpy(keys + d * PAGE_SIZE, k + d, 4);
    for (int d = 0; d < dim; d += 16) store_in_pairs(values + 2 * d, slot % 2, v + d);
  }
};

struct Query {
  int order;  // number of entries before the row's own
  int position;
};

// A softmax-weighted sum of values before the division: [dim] at out.
struct Partial {
  float *out, *top, *total;
};

struct Scratch {
  Buffer weights, shares, outs;  // shares: weights as Half
};
