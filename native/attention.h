// Attention over pages with an online softmax (FlashAttention), keys in table order, TILE pages at a time.
//
// What a row computes depends on its own entries alone: tiles begin at fixed places of the table, a key that a row may
// not see has weight 0, and every sum has a fixed order. So decode rows and rows of any chunk get the same bits.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

constexpr int PAGE_SIZE = 16, TILE = 2, KEYS = PAGE_SIZE * TILE;

struct Span {
  int32_t page, start, stop, position;
};

// K and V of one layer: [2, pages, kv_heads, PAGE_SIZE, dim] of float16.
struct Layer {
  uint16_t* data;
  int64_t pages;
  int kv_heads, dim;
  uint16_t* page(int side, int64_t page, int head) const {
    return data + (((side * pages + page) * kv_heads + head) * PAGE_SIZE) * dim;
  }
};

struct Query {
  const float* q;  // [dim], scaled
  float* out;      // [dim]
  int order;       // entries before and including its own, minus one
  int position;
};

struct Scratch {
  std::vector<float> keys, values, outs, state, scores;
};

// Scores of R rows against a tile's keys, which lie transposed, a page after the other: keys[TILE][dim][16].
template <int R>
inline void scores_of(const Query* rows, const float* keys, int dim, float* out) {
  __m512 acc[R][TILE];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < TILE; i++) acc[r][i] = _mm512_setzero_ps();
  for (int d = 0; d < dim; d++) {
    __m512 k[TILE];
    for (int i = 0; i < TILE; i++) k[i] = _mm512_loadu_ps(keys + 16 * (i * dim + d));
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m512 q = _mm512_set1_ps(rows[r].q[d]);
      for (int i = 0; i < TILE; i++) acc[r][i] = _mm512_fmadd_ps(q, k[i], acc[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < TILE; i++) _mm512_storeu_ps(out + r * KEYS + 16 * i, acc[r][i]);
}

inline void scores(const Query* rows, int count, const float* keys, int dim, float* out) {
  for (; count >= 8; count -= 8, rows += 8, out += 8 * KEYS) scores_of<8>(rows, keys, dim, out);
  switch (count) {
    case 1: return scores_of<1>(rows, keys, dim, out);
    case 2: return scores_of<2>(rows, keys, dim, out);
    case 3: return scores_of<3>(rows, keys, dim, out);
    case 4: return scores_of<4>(rows, keys, dim, out);
    case 5: return scores_of<5>(rows, keys, dim, out);
    case 6: return scores_of<6>(rows, keys, dim, out);
    case 7: return scores_of<7>(rows, keys, dim, out);
  }
}

inline void transpose_keys(const uint16_t* page, int dim, float* out) {
  for (int d = 0; d < dim; d += 16) {
    __m512 rows[16], t[16];
    for (int k = 0; k < 16; k++) rows[k] = load_half(page + k * dim + d);
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
      t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
      for (int j = 0; j < 2; j++) {
        const __m512d a = _mm512_castps_pd(t[i + j]), b = _mm512_castps_pd(t[i + j + 2]);
        rows[i + 2 * j] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
        rows[i + 2 * j + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
      }
    for (int i = 0; i < 4; i++)
      for (int j = 0; j < 2; j++) {  // rows[4 * block + i] holds columns i, i + 4, i + 8, i + 12 of 4 keys
        t[8 * j + i] = _mm512_shuffle_f32x4(rows[i + 8 * j], rows[i + 8 * j + 4], 0x88);
        t[8 * j + i + 4] = _mm512_shuffle_f32x4(rows[i + 8 * j], rows[i + 8 * j + 4], 0xdd);
      }
    for (int i = 0; i < 8; i++) {
      const __m512 even = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88), odd = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
      const int c = i % 4 + (i < 4 ? 0 : 4);
      _mm512_storeu_ps(out + 16 * (d + c), even);
      _mm512_storeu_ps(out + 16 * (d + c + 8), odd);
    }
  }
}

// out = out * decay + weights . values, over DIM / 16 registers.
template <int BLOCKS>
inline void add_values(float* out, float decay, const float* weights, const float* values, int dim) {
  __m512 acc[BLOCKS];
  for (int b = 0; b < BLOCKS; b++) acc[b] = _mm512_mul_ps(_mm512_loadu_ps(out + 16 * b), _mm512_set1_ps(decay));
  for (int k = 0; k < KEYS; k++) {
    const __m512 w = _mm512_set1_ps(weights[k]);
#pragma GCC unroll 8
    for (int b = 0; b < BLOCKS; b++) acc[b] = _mm512_fmadd_ps(w, _mm512_loadu_ps(values + k * dim + 16 * b), acc[b]);
  }
  for (int b = 0; b < BLOCKS; b++) _mm512_storeu_ps(out + 16 * b, acc[b]);
}

// Rows that share a sequence and a KV head, in order, against the spans of the sequence.
inline void attend(const Layer& layer, int head, const Span* spans, int num_spans, int window, Query* rows, int count,
                   Scratch& scratch) {
  const int dim = layer.dim;
  scratch.keys.resize(TILE * 16 * dim), scratch.values.resize(KEYS * dim);
  scratch.scores.resize(size_t(count) * KEYS), scratch.state.resize(2 * count);
  float *top = scratch.state.data(), *total = top + count;
  for (int r = 0; r < count; r++) {
    top[r] = -INFINITY, total[r] = 0;
    std::fill_n(rows[r].out, dim, 0.0f);
  }
  const int last_order = rows[count - 1].order, first_position = rows[0].position;
  int before = 0;  // entries before the tile
  for (int first = 0; first < num_spans && before <= last_order; first += TILE) {
    const int pages = std::min(TILE, num_spans - first);
    int base[TILE], entries = 0;
    for (int i = 0; i < pages; i++) {
      base[i] = before + entries - spans[first + i].start;  // order of slot 0
      entries += spans[first + i].stop - spans[first + i].start;
    }
    before += entries;
    const Span& end = spans[first + pages - 1];
    if (window > 0 && end.position + end.stop - end.start - 1 <= first_position - window) continue;
    // Pages lie anywhere, so only we know which comes next.
    for (int i = first + TILE; i < std::min(first + 2 * TILE, num_spans); i++)
      for (int side = 0; side < 2; side++) {
        const char* next = (const char*)layer.page(side, spans[i].page, head);
        for (int line = 0; line < 2 * PAGE_SIZE * dim; line += 64) _mm_prefetch(next + line, _MM_HINT_T0);
      }
    for (int i = 0; i < pages; i++) {
      transpose_keys(layer.page(0, spans[first + i].page, head), dim, scratch.keys.data() + i * 16 * dim);
      const uint16_t* v = layer.page(1, spans[first + i].page, head);
      float* values = scratch.values.data() + i * 16 * dim;
      for (int j = 0; j < 16 * dim; j += 16) _mm512_storeu_ps(values + j, load_half(v + j));
    }
    if (pages < TILE) std::fill_n(scratch.values.data() + pages * 16 * dim, (TILE - pages) * 16 * dim, 0.0f);
    scores(rows, count, scratch.keys.data(), dim, scratch.scores.data());  // a missing page's are never looked at
    for (int r = 0; r < count; r++) {
      float* weights = scratch.scores.data() + size_t(r) * KEYS;
      __m512 s[TILE];
      __mmask16 seen_any = 0;
      for (int i = 0; i < TILE; i++) {
        __mmask16 seen = 0;
        if (i < pages) {
          const Span& span = spans[first + i];
          const int high = std::min(span.stop, rows[r].order - base[i] + 1);
          const int low = window > 0 ? std::max(span.start, rows[r].position - window - span.position + span.start + 1)
                                     : span.start;
          if (high > low) seen = (uint32_t(1) << high) - (uint32_t(1) << low);
        }
        s[i] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), seen, weights + 16 * i);
        seen_any |= seen;
      }
      if (!seen_any) continue;  // nothing would change
      __m512 highest = s[0];
      for (int i = 1; i < TILE; i++) highest = _mm512_max_ps(highest, s[i]);
      const float new_top = std::max(top[r], max16(highest));
      __m512 sum = _mm512_setzero_ps();
      for (int i = 0; i < TILE; i++) {
        s[i] = exp16(_mm512_sub_ps(s[i], _mm512_set1_ps(new_top)));
        sum = _mm512_add_ps(sum, s[i]);
        _mm512_storeu_ps(weights + 16 * i, s[i]);
      }
      const float decay = _mm512_cvtss_f32(exp16(_mm512_set1_ps(top[r] - new_top)));
      top[r] = new_top;
      total[r] = total[r] * decay + sum16(sum);
      const float* values = scratch.values.data();
      switch (dim) {
        case 64: add_values<4>(rows[r].out, decay, weights, values, dim); break;
        case 128: add_values<8>(rows[r].out, decay, weights, values, dim); break;
        default:
          for (int d = 0; d < dim; d += 64) add_values<4>(rows[r].out + d, decay, weights, values + d, dim);
      }
    }
  }
  for (int r = 0; r < count; r++) {
    const __m512 share = _mm512_set1_ps(1.0f / total[r]);
    for (int d = 0; d < dim; d += 16) _mm512_storeu_ps(rows[r].out + d, _mm512_mul_ps(_mm512_loadu_ps(rows[r].out + d), share));
  }
}
