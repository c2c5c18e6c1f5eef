// The head of a decoder: logits, and what sampling asks of them, found while they are in cache; or the tokens alone that
// are the likeliest, or drawn.
#pragma once
#include <bit>

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

constexpr int SEARCH_PHASES = 4;  // at most

// The largest product of each row with its noise, from the panels that the sketch does not rule out.
inline void run_search(Model& m, Model::Private& own, const Search& search, int count) {
  const Linear& layer = *m.head;
  const Sketch& sketch = *m.sketch;
  const Rows rows = prepare_together(m, own, layer, search.x, count, search.inputs, m.head_norm);
  const SketchRows sketched = sketch.prepare(layer.kinds, rows, search.noises, own.sketched);
  const int chunks = chunks_of(layer.width), panels = int(layer.jobs.size());
  auto noisy = [&](const F* sums, int r, int column) {
    const Noise& noise = search.noises[r];
    return with_noise(sums[r], noise, gumbel(noise, column));
  };
  auto each_panel = [&](int chunk, const auto& action) {
    for (int p = chunk * (CHUNK / PANEL); p < std::min(panels, (chunk + 1) * (CHUNK / PANEL)); p++) action(p);
  };
  m.team->share(chunks, own.member, [&](int chunk) {
    each_panel(chunk, [&](int p) {
      float likely[SKETCH_ROWS], highest[SKETCH_ROWS];
      sketch.bounds(p, sketched, likely, highest);
      for (int r = 0; r < count; r++) {
        const size_t at = size_t(r) * panels + p;
        search.likely[at] = likely[r], search.highest[at] = highest[r];
      }
    });
  });
  // One that is likely to be the largest, or not far from it.
  m.team->share(count, own.member, [&](int r) {
    const float* likely = search.likely + size_t(r) * panels;
    Job job = layer.jobs[std::max_element(likely, likely + panels) - likely];
    job.next = job.begin();
    multiply_all(own, &job, 1, layer, rows, count, [&](const Job*, int, int, int, const F* sums) {
      search.floors[r] = top(noisy(sums, r, job.column));
    });
  });
  m.team->share(chunks, own.member, [&](int chunk) {
    own.candidates.clear();
    each_panel(chunk, [&](int p) {
      bool may_win = false;
      for (int r = 0; r < count; r++) may_win |= !(search.highest[size_t(r) * panels + p] < search.floors[r]);
      if (may_win) own.candidates.push_back(layer.jobs[p]);
    });
    for (size_t i = 0; i + 1 < own.candidates.size(); i++) own.candidates[i].next = own.candidates[i + 1].begin();
    Best found[SKETCH_ROWS];  // another member may be in this piece: it gets to see nothing unfinished
    for (const Job& job : own.candidates)
      multiply_all(own, &job, 1, layer, rows, count, [&](const Job*, int, int, int, const F* sums) {
        for (int r = 0; r < count; r++) {
          const F values = noisy(sums, r, job.column);
          if (const float value = top(values); found[r].value < value)
            found[r] = {value, job.column + std::countr_zero(equal_lanes(values, set1(value)))};
        }
      });
    for (int r = 0; r < count; r++) search.found[r * chunks + chunk] = found[r];
  });
}

// Of each row the first of its largest; -1 where that is not a finite number.
inline void end_search(const Search& search, int count, int chunks, int32_t* columns) {
  for (int r = 0; r < count; r++) {
    const auto* found = search.found + r * chunks;
    const Best best = *std::max_element(found, found + chunks);
    columns[r] = std::isfinite(search.floors[r]) && std::isfinite(best.value) ? best.column : -1;
  }
}
