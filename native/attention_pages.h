// Pages of keys and values.
#pragma once
#include "memory.h"
#include "rotation.h"

constexpr int PAGE_SIZE = 16, SPLIT = 8, KEYS = PAGE_SIZE * SPLIT;
constexpr int AHEAD_PAGES = INTEL ? 2 : 6;  // pages to prefetch

struct Span {
  int32_t start, stop, position, page;
};

enum KvFormat : int32_t { KV_BF16, KV_INT8, KV_K8V4 };  // in the order of KV_DTYPES in backends/native/model.py

// K and V of one layer. A page of a head holds them in the order of multiplication. bfloat16: pairs, two columns of a
// key, [dim / 2, PAGE_SIZE, 2], and the values of two slots, [PAGE_SIZE / 2, dim, 2]. Codes: fours, in the same way,
// followed by a scale of each slot, [PAGE_SIZE] float32 (models/kv_formats.py). Of 4 bits, a byte has codes of the first
// and of the second half of the columns.
class Layer {
 public:
  uint8_t* data;
  int kv_heads, dim;
  KvFormat format;
  bool once;  // whether keys are values too, and stored once: bfloat16

  // Strides in bytes. Of codes, the values of a head lie behind its keys.
  Layer(uint8_t* data, int64_t side_stride, int64_t page_stride, int kv_heads, int dim, KvFormat format, bool once)
      : data(data), kv_heads(kv_heads), dim(dim), format(format), once(once),
        side_stride_(coded() ? side_bytes(0) : side_stride), head_stride_(side_bytes(0) + (coded() ? side_bytes(1) : 0)),
        page_stride_(page_stride) {}

  bool coded() const { return format != KV_BF16; }
  bool halves() const { return format == KV_K8V4; }  // whether values have 4 bits
  // The pieces in which a head's part of a page lies in memory.
  int pieces() const { return coded() || once ? 1 : 2; }
  size_t piece_bytes() const { return size_t(head_stride_); }
  uint8_t* page(int side, int64_t page, int head) const {  // for a head
    return data + side * side_stride_ + page * page_stride_ + head * head_stride_;
  }
  const float* scales(int side, const uint8_t* piece) const { return (const float*)(piece + codes_bytes(side)); }

  // Keys and values of one entry, [dim] bfloat16 each.
  void store(int64_t page, int head, int slot, const uint16_t* k, const uint16_t* v) const {
    uint8_t *keys = this->page(0, page, head), *values = this->page(1, page, head);
    if (coded()) {
      encode(k, MAX_CODE, slot, scales(0, keys), [&](int d, const int8_t* codes) {
        for (int i = 0; i < 16; i += 4) std::memcpy(keys + (d + i) * PAGE_SIZE + 4 * slot, codes + i, 4);
      });
      const int half = dim / 2, columns = halves() ? half : dim;
      return encode(v, halves() ? MAX_HALF : MAX_CODE, slot, scales(1, values), [&](int d, const int8_t* codes) {
        const bool high = d >= columns;
        uint8_t* to = values + slot / 4 * 4 * columns + 4 * (high ? d - half : d) + slot % 4;
        for (int i = 0; i < 16; i++)
          to[4 * i] = uint8_t(!halves() ? codes[i] : high ? to[4 * i] | codes[i] << 4 : codes[i] & 15);
      });
    }
    uint16_t *pairs = (uint16_t*)keys + 2 * slot, *rows = (uint16_t*)values + slot / 2 * 2 * dim;
    for (int d = 0; d < dim; d += 2) std::memcpy(pairs + d * PAGE_SIZE, k + d, 4);
    for (int d = 0; d < dim && !once; d += 16) store_in_pairs(rows + 2 * d, slot % 2, v + d);
  }

 private:
  static constexpr float MAX_CODE = 127, MAX_HALF = 7;

  size_t codes_bytes(int side) const { return size_t(coded() ? (side && halves() ? 4 : 8) : 16) * PAGE_SIZE * dim / 8; }
  size_t side_bytes(int side) const { return codes_bytes(side) + (coded() ? PAGE_SIZE * sizeof(float) : 0); }
  // Stores the scale of a slot, and calls put(d, its codes from column d on) for every 16 columns.
  template <class Put>
  void encode(const uint16_t* x, float most, int slot, const float* scales, const Put& put) const {
    alignas(64) float turned[MAX_HEAD_DIM];
    for (int d = 0; d < dim; d += 16) ::store(turned + d, load_bf16(x + d));
    rotate(turned, dim);
    const float highest = largest(turned, dim);
    ((float*)scales)[slot] = highest / most;
    const F gain = set1(highest == 0 ? 0 : most / highest);
    for (int d = 0; d < dim; d += 16) {
      alignas(16) int8_t codes[16];
      store_int8(codes, to_int(mul(load(turned + d), gain)));
      put(d, codes);
    }
  }

  int64_t side_stride_, head_stride_, page_stride_;
};

// A page's keys as values: pairs of columns, [dim / 2, PAGE_SIZE], become pairs of slots, [PAGE_SIZE / 2, dim].
inline void keys_as_values(const uint8_t* keys, int dim, uint8_t* values) {
  using Four = uint64_t __attribute__((vector_size(32)));  // each two columns of two slots
  for (int d = 0; d < dim / 2; d += 4)
    for (int slot = 0; slot < PAGE_SIZE; slot += 8) {
      Four x[4];
      for (int i = 0; i < 4; i++) {
        std::memcpy(&x[i], keys + sizeof(uint32_t) * (size_t(d + i) * PAGE_SIZE + slot), sizeof(Four));
        x[i] = (x[i] & 0xffff00000000ffff) | (x[i] & 0xffff0000) << 16 | (x[i] >> 16 & 0xffff0000);
      }
      for (int i = 0; i < 4; i++) {
        const Four row{x[0][i], x[1][i], x[2][i], x[3][i]};
        std::memcpy(values + sizeof(uint32_t) * (size_t(slot / 2 + i) * dim + 2 * d), &row, sizeof(Four));
      }
    }
}

// The codes of 4 bits in the low and the high halves of bytes, times 16, as integers of 8 bits.
inline I low_codes(I bytes) { return add_planes<-16, 4>(int_zero(), bytes); }
inline I high_codes(I bytes) { return add_planes<-16, 0>(int_zero(), bytes); }

// Pages to prefetch during products with others: the i-th with the i-th; null for none.
struct Ahead {
  const uint8_t* const* pages;
  size_t bytes;

  void ask(int i) const {
    if (pages) fetch_bytes(pages[i], bytes);
  }
};

// What a head adds to scores of the first `count` entries of a sequence, in nats; to others 0.
struct EntryBias {
  const float* values = nullptr;
  int count = 0;
};

constexpr float UNSEEN = -1e30f;  // the score of a masked key: finite, and its power of 2 is 0

// Pages of a sequence that a head reads, of which `before` entries precede the first.
struct Reads {
  const Span* spans;
  int count, head, before;
  EntryBias bias;

  // Without leading pages of which the head sees no entry: these cost no time.
  Reads seen() const {
    Reads left = *this;
    for (const float* values = bias.values; values && left.count;) {
      const int entries = left.spans->stop - left.spans->start, end = left.before + entries;
      if (end > bias.count || std::any_of(values + left.before, values + end, [](float one) { return one > UNSEEN; })) break;
      left.spans++, left.count--, left.before = end;
    }
    return left;
  }
};

// Asks for the codes of the next split in even steps: a burst would wait for the few buffers of outstanding lines.
class Fetching {
 public:
  // `steps`: the sum of those that are asked for, about.
  Fetching(const Layer& layer, const Reads& pages, int steps)
      : layer_(layer), pages_(pages), bytes_(layer.piece_bytes()),
        quota_(std::max(1, int(pages.count * bytes_ / LINE) / steps)) {}

  void ask(int steps) {
    for (int i = 0; i < steps * quota_; i++, at_ += LINE) {
      if (at_ >= bytes_) {
        if (next_ == pages_.count) return;
        piece_ = layer_.page(0, pages_.spans[next_++].page, pages_.head), at_ = 0;
      }
      fetch(piece_ + at_);
    }
  }

 private:
  const Layer& layer_;
  const Reads& pages_;
  int next_ = 0;
  const size_t bytes_;
  const int quota_;
  const uint8_t* piece_ = nullptr;
  size_t at_ = SIZE_MAX;
};

struct Query {
  int order;  // of the last entry that it attends to, its own but for attention in both directions
  int position;
};

// A softmax-weighted sum of values before the division: [dim] at out.
struct Partial {
  float *out, *top, *total;
};

struct Scratch {
  Buffer weights, shares, outs;   // shares: weights as Half, or as integers
  Buffer values;                  // of a split whose keys are values
  Buffer queries, scores, sums, columns;  // where K and V are codes: see attention_codes.h
};
