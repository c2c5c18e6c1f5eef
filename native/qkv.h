// Queries, keys and values: the outputs of a block's first product get norm and RoPE while they are in cache, and are
// stored in the number format of attention.
#pragma once
#include "layers.h"
#include "pass.h"

// Their destinations. Queries of the heads that share a KV head are together, by row: [kv_heads, rows, repeat, dim].
// Keys and values: [rows, 2, kv_heads, dim].
struct Heads {
  const Config& config;
  const Block& block;
  const Batch& batch;
  Half* queries;
  uint16_t* entries;
  float* handed_out;      // [num_queries, q_width]
  const int32_t* places;  // [rows], index of a row in `handed_out` or -1; null for none
  float* gates;           // [rows, q_width]

  // 16 columns of a row of a head from `at` on, and those half a head later: RoPE rotates the two together.
  void put(int row, int head, int at, F x, F y) const {
    const AttentionShape& c = block.attention;
    const int half = c.dim / 2, repeat = c.repeat();
    if (const int gate = head - c.heads - 2 * c.kv_heads; gate >= 0) {
      float* out = gates + size_t(row) * config.q_width + size_t(gate) * c.dim + at;
      return store(out, sigmoid16(x)), store(out + half, sigmoid16(y));
    }
    if (head < c.heads + c.kv_heads) {
      const size_t angles = (size_t(head < c.heads ? c.query_rope : c.rope) * batch.turns + row) * config.half_dim + at;
      const F cos = load(batch.cos + angles), sin = load(batch.sin + angles);
      const F turned = fnma(y, sin, mul(x, cos));
      y = fma(x, sin, mul(y, cos)), x = turned;
    }
    if (head >= c.heads) {
      uint16_t* out = entries + (size_t(row) * 2 * c.kv_heads + head - c.heads) * c.dim + at;
      return store_bf16(out, x), store_bf16(out + half, y);
    }
    const F scale = set1(c.scale);
    x = mul(x, scale), y = mul(y, scale);
    if (places && places[row] >= 0) {
      float* out = handed_out + size_t(places[row]) * config.q_width + size_t(head) * c.dim + at;
      store(out, x), store(out + half, y);
    }
    Half* out = query(row, head / repeat) + head % repeat * c.dim + at;
    narrow(out, x), narrow(out + half, y);
  }
  Half* query(int row, int kv_head) const {
    const AttentionShape& c = block.attention;
    return queries + (size_t(kv_head) * batch.num_rows + row) * c.repeat() * c.dim;
  }

 private:
  // Softmax uses powers of 2, which saves one multiplication per weight.
  static void narrow(Half* out, F query) { store_narrow(out, mul(query, set1(LOG2_E))); }
};

// With norms over all heads together: products are stored in `made`, and then put.
void project_whole(Model& m, Model::Private& own, const Normed& from, const Heads& to, float* made) {
  const Block& b = to.block;
  const AttentionShape& c = b.attention;
  const float* scales = scales_of(m, own, from);
  const int width = b.qkv.width, half = c.dim / 2, queries = c.heads * c.dim, keys = b.k_norm ? c.kv_heads * c.dim : 0;
  auto emit = [&](const Job* jobs, int n, int first, int block, const F* sums) {
    for (int r = 0; r < block; r++)
      for (int i = 0; i < n; i++) {
        const F sum = mul(sums[i * ROW_BLOCK + r], set1(scales[first + r]));
        store(made + size_t(first + r) * width + jobs[i].column, b.qkv.biased(sum, jobs[i]));
      }
  };
  linear(m, own, b.qkv, from.rows, from.rows.count, emit, [] {});
  m.meet(own);
  m.spread(from.rows.count, own, [&](int row) {
    const float* x = made + size_t(row) * width;
    float* whole = own.row.get<float>(width);
    rms_norm(x, b.q_norm, queries, m.config.eps, whole);
    if (keys) rms_norm(x + queries, b.k_norm, keys, m.config.eps, whole + queries);
    std::copy(x + queries + keys, x + width, whole + queries + keys);
    for (int at = 0; at < width; at += c.dim)
      for (int d = at; d < at + half; d += PANEL) to.put(row, at / c.dim, d - at, load(whole + d), load(whole + half + d));
  });
}

void project_heads(Model& m, Model::Private& own, const Normed& from, const Heads& to, float* made) {
  const Block& b = to.block;
  if (b.attention.whole_norm) return project_whole(m, own, from, to, made);
  const AttentionShape& c = b.attention;
  const int unit = b.qkv.unit, half = c.dim / 2;
  const bool whole_heads = b.q_norm || b.k_norm;
  const float* scales = scales_of(m, own, from);
  auto emit = [&](const Job* jobs, int n, int first, int block, const F* sums) {
    for (; n > 0; n -= unit, jobs += unit, sums += unit * ROW_BLOCK) {
      const int head = jobs->column / c.dim, at = jobs->column % c.dim;
      const float* norm = head < c.heads                    ? b.q_norm
                          : head < c.heads + c.kv_heads     ? b.k_norm
                          : head < c.heads + 2 * c.kv_heads ? b.v_norm
                                                            : nullptr;
      for (int r = 0; r < block; r++) {
        const F scale = set1(scales[first + r]);
        auto made = [&](int i) { return b.qkv.biased(mul(sums[i * ROW_BLOCK + r], scale), jobs[i]); };
        if (!whole_heads) {
          to.put(first + r, head, at, made(0), made(1));
          continue;
        }
        float* whole = own.row.get<float>(c.dim);
        for (int i = 0; i < unit; i++) store(whole + PANEL * i, made(i));
        if (norm) rms_norm(whole, norm, c.dim, m.config.eps, whole);
        for (int d = 0; d < half; d += PANEL) to.put(first + r, head, d, load(whole + d), load(whole + half + d));
      }
    }
  };
  linear(m, own, b.qkv, from.rows, from.rows.count, emit, [] {});
}

// Copies keys and values to pages. A late member must not do this: pages may have another owner after the pass.
void store_entries(Model& m, Model::Private& own, const Heads& from, Layer kv) {
  const Batch& batch = from.batch;
  const AttentionShape& c = from.block.attention;
  if (!c.own_entries) return;
  const int64_t* pages = batch.pages + size_t(c.group) * batch.num_rows;
  m.team->share_once(batch.num_rows, own.member, [&](int row) {
    const uint16_t* k = from.entries + size_t(row) * 2 * kv.kv_heads * kv.dim;
    for (int h = c.first_kv_head; h < c.last_kv_head; h++)
      kv.store(pages[row], h, int(batch.slots[row]), k + h * kv.dim, k + (kv.kv_heads + h) * kv.dim);
  });
}
