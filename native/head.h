// The head of a decoder: logits, and the summaries for sampling, computed while logits are in cache. See search.h for
// tokens without logits.
#pragma once
#include "layers.h"
#include "pass.h"

// The chunks of a head, or of a rank's part, which begins with a whole chunk; they are counted from its first.
inline int own_chunks(const Linear& layer) { return chunks_of(int(layer.jobs.size()) * PANEL); }
inline int first_chunk(const Linear& layer) { return layer.jobs.empty() ? 0 : layer.jobs[0].column / CHUNK; }

// The panels of a chunk: the first, and one past the last.
inline std::pair<int, int> panels_of(const Linear& layer, int chunk) {
  constexpr int PANELS = CHUNK / PANEL;
  return {chunk * PANELS, std::min(int(layer.jobs.size()), (chunk + 1) * PANELS)};
}

// Multiplies all panels of a chunk with every row, some rows at a time.
template <class Emit>
void multiply_chunk(Model::Private& own, const Linear& layer, int chunk, Rows rows, int count, const Emit& emit) {
  const int some = even_part(CHUNK / PANEL / layer.unit, units_at_once(layer, count)) * layer.unit;
  const auto [first, end] = panels_of(layer, chunk);
  for (int p = first; p < end; p += some)
    multiply_all(own, &layer.jobs[p], std::min(some, end - p), layer, rows, count, emit);
}

// Products of the head as logits.
inline F capped(const Model& m, F products) {
  return m.config.logit_cap > 0 ? cap16(products, m.config.logit_cap) : products;
}

constexpr int HEAD_PHASES = 3;  // at most

inline void run_head(Model& m, Model::Private& own, const Product& product, int count) {
  const Linear& layer = *m.head;
  own.live = {product.made};
  const Rows rows = prepare(m, own, layer, product.x, count, product.inputs, m.head_norm);
  const int chunks = chunks_of(layer.width), before = first_chunk(layer);
  auto emit = [&](const Job* jobs, int n, int first, int block, const F* sums) {
    for (int r = 0; r < block; r++)
      for (int i = 0; i < n; i++)
        store(product.out + size_t(first + r) * layer.width + jobs[i].column, capped(m, sums[i * ROW_BLOCK + r]));
  };
  m.team->share(own_chunks(layer), own.member, [&](int i) {
    const int chunk = before + i;
    multiply_chunk(own, layer, i, rows, count, emit);
    for (size_t r = 0; r < size_t(count); r++)
      product.chunks[r * chunks + chunk] = summarize_chunk(product.out + r * layer.width, m.config.vocab, chunk);
  });
  m.meet(own);
  m.spread(count, own, [&](int r) { product.summaries[r] = merge_chunks(product.chunks + size_t(r) * chunks, chunks); });
}
