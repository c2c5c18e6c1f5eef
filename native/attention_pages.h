// Pages of keys and values.
#pragma once
#include "memory.h"
#include "rotation.h"

constexpr int PAGE_SIZE = 16, SPLIT = 8, KEYS = PAGE_SIZE * SPLIT;
constexpr int AHEAD_PAGES = INTEL ? 2 : 6;  // pages to prefetch

struct Span {
  int32_t start, stop, position, page;
};

enum KvFormat : int32_t { KV_BF16, KV_INT8 };  // in the order of KV_DTYPES in backends/native/model.py

// K and V of one layer. A page of a head holds them in the order of multiplication. bfloat16: pairs, two columns of a
// key, [dim / 2, PAGE_SIZE, 2], and the values of two slots, [PAGE_SIZE / 2, dim, 2]. Codes of 8 bits: fours, in the
// same way, followed by a scale of each slot, [PAGE_SIZE] float32 (models/kv_formats.py).
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
      encode(k, keys, slot, [&](int d, const int8_t* codes) {
        for (int i = 0; i < 16; i += 4) std::memcpy(keys + (d + i) * PAGE_SIZE + 4 * slot, codes + i, 4);
      });
      return encode(v, values, slot, [&](int d, const int8_t* codes) {
        uint8_t* to = values + slot / 4 * 4 * dim + 4 * d + slot % 4;
        for (int i = 0; i < 16; i++) to[4 * i] = uint8_t(codes[i]);
      });
    }
    uint16_t *pairs = (uint16_t*)keys + 2 * slot, *rows = (uint16_t*)values + slot / 2 * 2 * dim;
    for (int d = 0; d < dim; d += 2) std::memcpy(pairs + d * PAGE_SIZE, k + d, 4);
    for (int d = 0; d < dim; d += 16) store_in_pairs(rows + 2 * d, slot % 2, v + d);
  }

 private:
  // Stores the scale of a slot, and calls put(d, its codes from column d on) for every 16 columns.
  template <class Put>
  void encode(const uint16_t* x, uint8_t* piece, int slot, const Put& put) const {
    constexpr float MAX_CODE = 127;
    alignas(64) float turned[MAX_HEAD_DIM];
    for (int d = 0; d < dim; d += 16) ::store(turned + d, load_bf16(x + d));
    rotate(turned, dim);
    const float highest = largest(turned, dim);
    ((float*)scales(piece))[slot] = highest / MAX_CODE;
    const F gain = set1(highest == 0 ? 0 : MAX_CODE / highest);
    for (int d = 0; d < dim; d += 16) {
      alignas(16) int8_t codes[16];
      store_int8(codes, to_int(mul(load(turned + d), gain)));
      put(d, codes);
    }
  }
};

// Pages to prefetch during products with others: the i-th with the i-th; null for none.
struct Ahead {
  const uint8_t* const* pages;
  size_t bytes;

  void ask(int i) const {
    if (pages) fetch_bytes(pages[i], bytes);
  }
};

// Pages of a sequence that a head reads.
struct Reads {
  const Span* spans;
  int count, head;
};

// Asks for the pages of the next split in even steps: a burst would wait for the few buffers of outstanding lines.
class Fetching {
 public:
  // `steps`: the sum of those that are asked for, about.
  Fetching(const Layer& layer, const Reads& pages, int steps)
      : layer_(layer), pages_(pages), left_(2 * pages.count), bytes_(layer.piece_bytes()),
        quota_(std::max(1, int(left_ * bytes_ / LINE) / steps)) {}

  void ask(int steps) {
    for (int i = 0; i < steps * quota_; i++, at_ += LINE) {
      if (at_ >= bytes_) {
        if (left_ == 0) return;
        const int next = 2 * pages_.count - left_--, side = next >= pages_.count;
        piece_ = layer_.page(side, pages_.spans[next - side * pages_.count].page, pages_.head), at_ = 0;
      }
      fetch(piece_ + at_);
    }
  }

 private:
  const Layer& layer_;
  const Reads& pages_;
  int left_;
  const size_t bytes_;
  const int quota_;
  const uint8_t* piece_ = nullptr;
  size_t at_ = SIZE_MAX;
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
  Buffer weights, shares, outs;   // shares: weights as Half, or as integers
  Buffer queries, scores, sums, columns;  // where K and V are codes: see attention_codes.h
};
