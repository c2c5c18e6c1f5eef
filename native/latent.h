// Attention with latent entries (models/latent.py): one vector for all heads, which is K and V.
//
// A head's query is multiplied by its `k_up`, so that it meets latents, and what it attends to by its `v_up`. The inputs of
// both are packed for each head by itself.
#pragma once
#include "qkv.h"

// The packed inputs of a head's matrix, of `cols` columns, in the memory of all heads.
inline Rows head_rows(uint8_t* memory, int head, int count, int cols) {
  return Rows::in(memory + head * head_rows_bytes(count, cols), count, cols);
}

// Calls put(head, jobs, n, first row, rows, sums) for the products of each head's rows, in pieces of a unit.
template <class Put>
void multiply_heads(Model& m, Model::Private& own, const std::vector<Linear>& heads, uint8_t* memory, int count,
                    const Put& put) {
  const int units = heads[0].units();
  m.team->share(int(heads.size()) * units, own.member, [&](int piece) {
    const int head = piece / units, first = piece % units * heads[head].unit;
    const Linear& layer = heads[head];
    multiply_all(own, &layer.jobs[first], layer.unit, layer, head_rows(memory, head, count, layer.cols), count,
                 [&](const Job* jobs, int n, int row, int block, const F* sums) { put(head, jobs, n, row, block, sums); });
  });
}

// Queries and entries of a pass.
struct LatentHeads {
  const Heads& to;
  const Latent& latent;

  // 16 numbers of a head's query, `at` in the order of entries.
  void put_query(int row, int head, int at, F x) const {
    const AttentionShape& c = to.block.attention;
    x = mul(x, set1(c.scale));
    if (to.places && to.places[row] >= 0)
      store(to.handed_out + size_t(to.places[row]) * to.config.q_width + size_t(head) * c.dim + at, x);
    store_narrow(to.query(row, 0) + size_t(head) * c.dim + at, mul(x, set1(LOG2_E)));
  }
  // Calls put(place in an entry, 16 numbers) for a rotated part.
  template <class Put>
  void turn(const float* part, int row, int rope, const Put& put) const {
    const int half = latent.shape.rotated / 2;
    const size_t angles = (size_t(rope) * to.batch.turns + row) * to.config.half_dim;
    for (int d = 0; d < half; d += PANEL) {
      const F x = load(part + d), y = load(part + half + d);
      const F cos = load(to.batch.cos + angles + d), sin = load(to.batch.sin + angles + d);
      put(d, fnma(y, sin, mul(x, cos))), put(to.block.attention.dim / 2 + d, fma(x, sin, mul(y, cos)));
    }
  }
  // Makes a row's entry of what `kv_down` gave, and packs and turns the parts of its queries.
  void put_row(Model::Private& own, int row, const float* queries, const float* entry, uint8_t* plain) const {
    const AttentionShape& c = to.block.attention;
    const LatentShape& s = latent.shape;
    uint16_t* out = to.entries + size_t(row) * 2 * c.dim;
    float* normed = own.row.get<float>(s.rank);
    rms_norm(entry, s.kv_norm, s.rank, to.config.eps, normed);
    for (int d = 0; d < s.rank; d += PANEL) store_bf16(out + s.column(d), load(normed + d));
    turn(entry + s.rank, row, c.rope, [&](int at, F x) { store_bf16(out + at, x); });
    for (int head = 0; head < c.heads; head++, queries += s.query()) {
      prepare_row(queries, latent.k_up[head], head_rows(plain, head, to.batch.num_rows, s.plain), row);
      turn(queries + s.plain, row, c.query_rope, [&](int at, F x) { put_query(row, head, at, x); });
    }
  }
};

void project_latents(Model& m, Model::Private& own, const Normed& from, const Heads& to, const PassMemory::Places& at) {
  const Block& b = to.block;
  const Latent& latent = *b.latent;
  const LatentHeads heads{to, latent};
  const int rows = from.rows.count, width = b.qkv.width, entry = latent.shape.rank + latent.shape.rotated;
  const float* scales = scales_of(m, own, from);
  linear(m, own, b.qkv, from.rows, rows, [&](const Job* jobs, int n, int first, int block, const F* sums) {
    for (int r = 0; r < block; r++)
      for (int i = 0; i < n; i++)
        store(at.projected + size_t(first + r) * width + jobs[i].column,
              mul(sums[i * ROW_BLOCK + r], set1(scales[first + r])));
  }, [] {});
  const float* queries = at.projected;
  size_t stride = width;
  if (latent.q_up) {
    const Linear& up = *latent.q_up;
    const Rows read = Rows::in(at.query_rows, rows, up.cols);
    m.team->share(rows, own.member, [&](int row) {
      float* normed = own.row.get<float>(up.cols);
      rms_norm(at.projected + size_t(row) * width, latent.shape.q_norm, up.cols, m.config.eps, normed);
      prepare_row(normed, up, read, row);
    });
    store_linear(m, own, up, read, rows, at.wide_queries, [] {});
    queries = at.wide_queries, stride = up.width;
  }
  m.team->share(rows, own.member, [&](int row) {
    heads.put_row(own, row, queries + row * stride, at.projected + size_t(row + 1) * width - entry, at.plain_rows);
  });
  multiply_heads(m, own, latent.k_up, at.plain_rows, rows,
                 [&](int head, const Job* jobs, int n, int first, int block, const F* sums) {
    for (int r = 0; r < block; r++)
      for (int i = 0; i < n; i++)
        heads.put_query(first + r, head, latent.shape.column(jobs[i].column), sums[i * ROW_BLOCK + r]);
  });
}

// The inputs of the output projection, of what heads attended to, in `seen`.
void project_values(Model& m, Model::Private& own, const Block& b, uint8_t* seen, Rows out) {
  const int value = b.latent->shape.value;
  multiply_heads(m, own, b.latent->v_up, seen, out.count,
                 [&](int head, const Job* jobs, int n, int first, int block, const F* sums) {
    for (; n > 0; n -= 2, jobs += 2, sums += 2 * ROW_BLOCK)
      for (int start = 0; start < block; start += PANEL)
        put_columns(b.o.kinds, sums + start, sums + ROW_BLOCK + start, out, first + start, std::min(PANEL, block - start),
                    head * value + jobs->column);
  });
}
