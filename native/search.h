// Tokens without logits: for each row the argmax of the head's products with noise, which is the likeliest token or a
// sample. Products are compared in registers or cache, and never stored.
//
// With few rows a sketch of the head (sketch.h), if there is one, first rules out most panels.
#pragma once
#include "head.h"

constexpr int SEARCH_PHASES = 4;  // at most

// Logits of a panel. Those of padding columns can never be the largest.
inline F of_tokens(const Model& m, F products, int column) {
  const int left = m.config.vocab - column;
  const F logits = capped(m, products);
  return left >= PANEL ? logits : select((1u << left) - 1, logits, set1(-INFINITY));
}

inline void search_all(Model& m, Model::Private& own, const Search& search, int count) {
  const Linear& layer = *m.head;
  const Rows rows = prepare(m, own, layer, search.x, count, search.inputs, m.head_norm);
  const int chunks = chunks_of(layer.width), before = first_chunk(layer);
  m.team->share(own_chunks(layer), own.member, [&](int i) {
    Highest* highest = own.found.get<Highest>(count);
    std::fill_n(highest, count, Highest{});
    multiply_chunk(own, layer, i, rows, count, [&](const Job* jobs, int n, int first, int block, const F* sums) {
      for (int r = 0; r < block; r++)
        for (int i = 0; i < n; i++) {
          const F products = of_tokens(m, sums[i * ROW_BLOCK + r], jobs[i].column);
          highest[first + r].look(products, search.noises[first + r], jobs[i].column);
        }
    });
    for (int r = 0; r < count; r++) search.found[r * chunks + before + i] = highest[r].best();
  });
}

// A search of the panels that the sketch does not rule out.
inline void search_by_sketch(Model& m, Model::Private& own, const Search& search, int count) {
  const Linear& layer = *m.head;
  const Sketch& sketch = *m.sketch;
  const Rows rows = prepare_together(m, own, layer, search.x, count, search.inputs, m.head_norm);
  const SketchRows sketched = sketch.prepare(layer.kinds, rows, search.noises, own.sketched);
  const int chunks = chunks_of(layer.width), panels = layer.width / PANEL;
  const int before = first_chunk(layer), skipped = before * (CHUNK / PANEL);  // chunks and panels of other ranks
  m.team->share(own_chunks(layer), own.member, [&](int i) {
    const auto [first, end] = panels_of(layer, i);
    for (int p = first; p < end; p++) {
      float likely[SKETCH_ROWS], highest[SKETCH_ROWS];
      sketch.bounds(p, skipped + p, sketched, likely, highest);
      for (int r = 0; r < count; r++) {
        const size_t at = size_t(r) * panels + skipped + p;
        search.likely[at] = likely[r], search.highest[at] = highest[r];
      }
    }
  });
  // Panels one by one, each for all rows.
  auto look_at = [&](const Job& job, Highest* highest) {
    multiply_all(own, &job, 1, layer, rows, count, [&](const Job*, int, int, int, const F* sums) {
      for (int r = 0; r < count; r++) highest[r].look(of_tokens(m, sums[r], job.column), search.noises[r], job.column);
    });
  };
  m.meet(own);
  // A product that is likely to be the largest, or close to it.
  m.team->share(count, own.member, [&](int r) {
    const float* likely = search.likely + size_t(r) * panels;
    const ptrdiff_t best = std::max_element(likely, likely + panels) - likely - skipped;
    if (best < 0 || best >= ptrdiff_t(layer.jobs.size())) return;  // another rank's
    Job job = layer.jobs[best];
    job.next = job.begin();
    Highest found[SKETCH_ROWS];
    look_at(job, found);
    search.floors[r] = found[r].best().value;
  });
  m.meet(own);
  m.team->share(own_chunks(layer), own.member, [&](int i) {
    own.candidates.clear();
    const auto [first, end] = panels_of(layer, i);
    for (int p = first; p < end; p++) {
      bool may_win = false;
      for (int r = 0; r < count; r++) may_win |= !(search.highest[size_t(r) * panels + skipped + p] < search.floors[r]);
      if (may_win) own.candidates.push_back(layer.jobs[p]);
    }
    for (size_t i = 0; i + 1 < own.candidates.size(); i++) own.candidates[i].next = own.candidates[i + 1].begin();
    Highest found[SKETCH_ROWS];  // another member may be in this piece, and must not read incomplete data
    for (const Job& job : own.candidates) look_at(job, found);
    for (int r = 0; r < count; r++) search.found[r * chunks + before + i] = found[r].best();
  });
}

inline void run_search(Model& m, Model::Private& own, const Search& search, int count) {
  own.live = {search.made};
  if (search.sketched) return search_by_sketch(m, own, search, count);
  search_all(m, own, search, count);
}

// The first column of each row's largest value; -1 if that is not finite.
inline void end_search(const Search& search, int count, int chunks, int32_t* columns) {
  for (int r = 0; r < count; r++) {
    const auto* found = search.found + r * chunks;
    const Best best = *std::max_element(found, found + chunks);
    columns[r] = std::isfinite(best.value) ? best.column : -1;
  }
}
