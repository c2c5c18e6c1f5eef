// Pages of keys and values, in pairs: products are of pairs, bfloat16 if the build multiplies them, else float32.
#pragma once
#include "memory.h"
#include "simd.h"

constexpr int PAGE_SIZE = 16, SPLIT = 8, KEYS = PAGE_SIZE * SPLIT;
constexpr int AHEAD_PAGES = INTEL ? 2 : 6;  // pages to prefetch

struct Span {
  int32_t start, stop, position, page;
};

enum KvFormat : int32_t { KV_BF16, KV_INT8 };  // in the order of KV_DTYPES in backends/native/model.py

// K and V of one layer. A page of a head holds pairs in the order of multiplication: two columns of a key,
// [dim / 2, PAGE_SIZE, 2], and the values of two slots, [PAGE_SIZE / 2, dim, 2]; as bfloat16, or as codes of 8 bits that
// are followed by a scale of each slot, [PAGE_SIZE] float32 (models/kv_formats.py).
struct Layer {
  uint8_t* data;
  int64_t side_stride, page_stride;  // in bytes
  int kv_heads, dim;
  KvFormat format;

  size_t codes_bytes() const { return size_t(format == KV_INT8 ? 1 : 2) * PAGE_SIZE * dim; }
  size_t piece_bytes() const { return codes_bytes() + (format == KV_INT8 ? PAGE_SIZE * sizeof(float) : 0); }
  uint8_t* page(int side, int64_t page, int head) const {  // for a head
    return data + side * side_stride + page * page_stride + head * piece_bytes();
  }
  const float* scales(const uint8_t* piece) const { return (const float*)(piece + codes_bytes()); }

  // Keys and values of one entry, [dim] bfloat16 each.
  void store(int64_t page, int head, int slot, const uint16_t* k, const uint16_t* v) const {
    uint8_t *keys = this->page(0, page, head), *values = this->page(1, page, head);
    if (format == KV_INT8) {
      quantize(k, keys, slot, [&](int d, const int8_t* codes) {
        for (int i = 0; i < 16; i += 2) std::memcpy(keys + (d + i) * PAGE_SIZE + 2 * slot, codes + i, 2);
      });
      return quantize(v, values, slot, [&](int d, const int8_t* codes) {
        uint8_t* to = values + slot / 2 * 2 * dim + 2 * d + slot % 2;
        for (int i = 0; i < 16; i++) to[2 * i] = uint8_t(codes[i]);
      });
    }
    uint16_t *pairs = (uint16_t*)keys + 2 * slot, *rows = (uint16_t*)values + slot / 2 * 2 * dim;
    for (int d = 0; d < dim; d += 2) std::memcpy(pairs + d * PAGE_SIZE, k + d, 4);
    for (int d = 0; d < dim; d += 16) store_in_pairs(rows + 2 * d, slot % 2, v + d);
  }

 private:
  // Stores the scale of a slot, and calls put(d, its codes from column d on) for every 16 columns.
  template <class Put>
  void quantize(const uint16_t* x, uint8_t* piece, int slot, const Put& put) const {
    constexpr float MAX_CODE = 127;
    F most = zero();
    for (int d = 0; d < dim; d += 16) most = larger(most, abs(load_bf16(x + d)));
    const float highest = top_size(most);
    ((float*)scales(piece))[slot] = highest / MAX_CODE;
    const F gain = set1(highest == 0 ? 0 : MAX_CODE / highest);
    for (int d = 0; d < dim; d += 16) {
      alignas(16) int8_t codes[16];
      store_int8(codes, to_int(mul(load_bf16(x + d), gain)));
      put(d, codes);
    }
  }
};

// Pages to prefetch during products with others: bytes [from, to) of pages[i] with the i-th; null for none.
struct Ahead {
  const uint8_t* const* pages;
  size_t from, to;

  bool whole() const { return pages && from == 0; }
  void ask(int i) const {
    if (pages) fetch_bytes(pages[i] + from, to - from);
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
  Buffer pages;                  // keys and values of a split as bfloat16, where they are stored in fewer bits
};
