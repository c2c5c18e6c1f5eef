// The head of a decoder: logits, and what sampling asks of them, found while they are in cache. Where tokens alone are
// wanted see search.h.
#pragma once
#include "layers.h"
#include "pass.h"

constexpr int HEAD_PHASES = 3;  // at most

inline void run_head(Model& m, Model::Private& own, const Product& product, int count) {
  const Linear& layer = *m.head;
  const Rows rows = prepare(m, own, layer, product.x, count, product.inputs, m.head_norm);
  const int chunks = chunks_of(layer.width), panels = int(layer.jobs.size());
  const int some = even_part(CHUNK / PANEL / layer.unit, units_at_once(layer, count)) * layer.unit;
  m.team->share(chunks, own.member, [&](int chunk) {
    const int first = chunk * (CHUNK / PANEL), last = std::min(panels, first + CHUNK / PANEL);
    for (int i = first; i < last; i += some)
      multiply_all(own, &layer.jobs[i], std::min(some, last - i), layer, rows, count, storing(layer, product.out));
    for (size_t r = 0; r < size_t(count); r++)
      product.chunks[r * chunks + chunk] = summarize_chunk(product.out + r * layer.width, layer.width, chunk);
  });
  m.team->share(count, own.member, [&](int r) {
    product.summaries[r] = merge_chunks(product.chunks + size_t(r) * chunks, chunks);
  });
}
