// The head of a decoder: logits, and what sampling asks of them, found while they are in cache.
#pragma once
#include "layers.h"
#include "pass.h"

constexpr int HEAD_PHASES = 3;  // at most

inline void run_head(Model& m, Model::Private& own, const Product& product, int count) {
  const Linear& layer = *m.head;
  const Rows rows = prepare(m, own, layer, product.x, count, product.inputs, m.head_norm);
  const int chunks = chunks_of(layer.width), panels = int(layer.jobs.size());
  const int unit = count > ROW_BLOCK / 8 ? std::min(8, PANELS_TOGETHER) : layer.unit;
  m.team->share(chunks, own.member, [&](int chunk) {
    const int first = chunk * (CHUNK / PANEL), last = std::min(panels, first + CHUNK / PANEL);
    for (int i = first; i < last; i += unit)
      multiply_all(own, &layer.jobs[i], std::min(unit, last - i), layer, rows, count, storing(layer, product.out, nullptr));
    for (int r = 0; r < count; r++) {
      const int column = chunk * CHUNK;
      product.chunks[size_t(r) * chunks + chunk] = summarize_chunk(
          product.out + size_t(r) * layer.width + column, column, std::min(CHUNK, layer.width - column));
    }
  });
  m.team->share(count, own.member, [&](int r) {
    product.summaries[r] = merge_chunks(product.chunks + size_t(r) * chunks, chunks);
  });
}
