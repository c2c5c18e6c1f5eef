// The layers of a block except attention, for the rows of a pass.
#pragma once
#include "model.h"
#include "norms.h"

// Packs one row in the formats that its layer multiplies.
void prepare_row(const float* x, const Linear& layer, Rows rows, int row) {
  const Place place = rows.place(row);
  for (int g = 0; g < rows.groups(); g++, x += GROUP) put_group(layer.kinds, load(x), load(x + 16), rows, place, g);
  if (rows.idle_behind(row + 1))
    for (int g = 0; g < rows.groups(); g++) clear_idle(layer.kinds, rows, g);
}

// The same for row `row` of x, after a norm if one is given.
void prepare_row(Model& m, Model::Private& own, const float* x, const float* norm, const Linear& layer, Rows rows, int row) {
  const float* source = x + size_t(row) * layer.cols;
  if (norm) {
    float* normed = own.row.get<float>(layer.cols);
    rms_norm(source, norm, layer.cols, m.config.eps, normed);
    source = normed;
  }
  prepare_row(source, layer, rows, row);
}

// Packed rows in `memory`, for all members.
Rows prepare_together(Model& m, Model::Private& own, const Linear& layer, const float* x, int count, uint8_t* memory,
                      const float* norm) {
  const Rows rows = Rows::in(memory, count, layer.cols);
  m.team->share(count, own.member, [&](int i) { prepare_row(m, own, x, norm, layer, rows, i); });
  return rows;
}

// The same for the next phase only; few rows are packed by every member for itself.
Rows prepare(Model& m, Model::Private& own, const Linear& layer, const float* x, int count, uint8_t* memory,
             const float* norm) {
  if (count > FEW_ROWS) return prepare_together(m, own, layer, x, count, memory, norm);
  const Rows rows = Rows::in(own.prepared.get<uint8_t>(Rows::bytes(count, layer.cols)), count, layer.cols);
  for (int i = 0; i < count && !m.team->late(own.member); i++) prepare_row(m, own, x, norm, layer, rows, i);
  return rows;
}

// The scales of products of normalized rows, for this member.
const float* scales_of(const Model& m, Model::Private& own, const Normed& normed) {
  float* scales = own.scales.get<float>(Normed::padded(normed.rows.count));
  normed.scales(m.config.eps, scales);
  return scales;
}

// Prefetches the part of a layer that this member reads first, while it would otherwise wait.
void fetch_start(const Model& m, const Model::Private& own, const Linear& layer, int count) {
  if (count > ROW_BLOCK) return;
  const size_t first = size_t(m.team->first(layer.units(), own.member)) * layer.unit;
  size_t left = 2 * AHEAD;
  for (size_t i = first; i < layer.jobs.size() && left > 0; i++) {
    const Matrix& matrix = *layer.jobs[i].matrix;
    if (i == first) left = std::max(left, matrix.scale_bytes() + AHEAD);  // long rows have many scales
    const size_t some = std::min(matrix.panel_bytes(), left);
    fetch_bytes(layer.jobs[i].begin(), some), left -= some;
  }
}

// Some panels times every row. emit(jobs, n, first row, rows, sums [n][ROW_BLOCK]) takes the results.
template <class Emit>
void multiply_all(Model::Private& own, const Job* jobs, int n, const Linear& layer, Rows rows, int count, const Emit& emit) {
  F* sums = own.sums.get<F>(size_t(n) * ROW_BLOCK);
  for (int first = 0; first < count; first += ROW_BLOCK) {
    const int block = std::min(ROW_BLOCK, count - first);
    multiply(jobs, n, rows, first, block, sums, own.work);
    emit(jobs, n, first, block, sums);
  }
}

// The most units of panels to take at a time: with many rows, the number that is best for the rows.
inline int units_at_once(const Linear& layer, int count) {
  return count > ROW_BLOCK / 8 ? std::max(1, most_panels(count, layer.cols) / layer.unit) : 1;
}

constexpr int FEW_INPUTS = 128 << 10;  // numbers of all rows that fit in an L2 cache beside weights

// Every panel times every row, in whole units; finish() is called when a member has no work left.
template <class Emit, class Finish>
void linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, const Emit& emit,
            const Finish& finish) {
  const int panels = int(layer.jobs.size());
  if (count * layer.cols <= FEW_INPUTS) fetch_rows(layer.kinds, rows);
  m.team->share_parts(layer.units(), units_at_once(layer, count), own.member, [&](int unit, int n) {
    const int first = unit * layer.unit, last = std::min(first + n * layer.unit, panels);
    multiply_all(own, &layer.jobs[first], last - first, layer, rows, count, emit);
  }, finish);
}

// Stores the products in `out`.
inline auto storing(const Linear& layer, float* out) {
  return [&layer, out](const Job* jobs, int n, int first, int block, const F* sums) {
    for (int r = 0; r < block; r++)
      for (int i = 0; i < n; i++) {
        const size_t place = size_t(first + r) * layer.width + jobs[i].column;
        store(out + place, layer.biased(sums[i * ROW_BLOCK + r], jobs[i]));
      }
  };
}
template <class Finish>
void store_linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, float* out,
                  const Finish& finish) {
  linear(m, own, layer, rows, count, storing(layer, out), finish);
}

// Adds the products with `bias`, times `factor`, to `before`, stores the sums in `out`, and passes them to the next layer
// if there is one.
inline auto adding(const Linear& layer, const float* bias, float factor, const float* before, float* out, const Normed* to) {
  return [&layer, bias, factor, before, out, to](const Job* jobs, int n, int first, int block, const F* sums) {
    for (; n > 0; n -= 2, jobs += 2, sums += 2 * ROW_BLOCK)
      for (int start = 0; start < block; start += PANEL) {
        const int some = std::min(PANEL, block - start), row = first + start;
        F a[PANEL], b[PANEL];
        auto added = [&](int job, int i) {
          const F sum = Linear::plus(sums[job * ROW_BLOCK + start + i], bias, jobs[job]);
          return fma(sum, set1(factor), load(before + size_t(row + i) * layer.width + jobs[job].column));
        };
        for (int i = 0; i < some; i++) a[i] = added(0, i), b[i] = added(1, i);
        for (int i = 0; i < some; i++) {  // not between the loads: loads of later rows would wait for the stores
          float* x = out + size_t(row + i) * layer.width;
          store(x + jobs[0].column, a[i]), store(x + jobs[1].column, b[i]);
        }
        if (to) to->put(row, some, jobs->column, a, b);
      }
  };
}
template <class Finish>
void add_linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, const float* before, float* out,
                const Normed* to, const Finish& finish) {
  linear(m, own, layer, rows, count, adding(layer, layer.bias, m.config.residual_scale, before, out, to), finish);
}

// The same for a layer's output, after a norm; the sums are multiplied by `scale`.
void post_norm_add(Model& m, Model::Private& own, const float* norm, int count, const float* made, const float* before,
                   float scale, float* out, const Normed* to) {
  const int n = m.config.hidden;
  const F factor = set1(m.config.residual_scale), times = set1(scale);
  m.spread(count, own, [&](int row) {
    const size_t at = size_t(row) * n;
    float* normed = own.row.get<float>(n);
    rms_norm(made + at, norm, n, m.config.eps, normed);
    for (int i = 0; i < n; i += GROUP) {
      const F a = mul(fma(load(normed + i), factor, load(before + at + i)), times);
      const F b = mul(fma(load(normed + i + 16), factor, load(before + at + i + 16)), times);
      store(out + at + i, a), store(out + at + i + 16, b);
      if (to) to->put(row, i, a, b);
    }
  });
}

inline F activated(const Config& c, F gate, F up) {
  if (c.activation == SWIGLU_OAI) return swiglu_oai16(gate, up);
  if (c.activation == RELU2) return mul(max(gate, zero()), up);
  return mul(c.activation == GELU ? gelu16(gate) : silu16(gate), up);
}

// Scales gate and up, and packs the gated rows for the next layer: a unit's panels, four or two without a gate, are one
// group of its input.
inline auto gating(const Model& m, const Linear& layer, const float* scales, Rows out, const Linear& next) {
  return [&m, &layer, scales, out, &next](const Job* jobs, int n, int first, int block, const F* sums) {
    for (; n > 0; n -= layer.unit, jobs += layer.unit, sums += layer.unit * ROW_BLOCK)
      for (int start = 0; start < block; start += PANEL) {
        const int some = std::min(PANEL, block - start);
        F a[PANEL], b[PANEL];
        for (int i = 0; i < some; i++) {
          const F scale = set1(scales[first + start + i]);
          auto sum = [&](int panel, int which) {
            return layer.biased_pair(mul(sums[panel * ROW_BLOCK + start + i], scale), jobs[panel], which);
          };
          auto gated = [&](int half) {
            if (layer.unit == PAIRS_UNIT) return activated(m.config, sum(2 * half, 0), sum(2 * half + 1, 1));
            const F up = sum(half, 0);
            return activated(m.config, up, up);
          };
          a[i] = gated(0), b[i] = gated(1);
        }
        put_columns(next.kinds, a, b, out, first + start, some, jobs->column);
      }
  };
}
Rows gated_linear(Model& m, Model::Private& own, const Mlp& mlp, const Normed& from, uint8_t* memory) {
  const int count = from.rows.count;
  const Rows out = Rows::in(memory, count, mlp.down.cols);
  const float* scales = scales_of(m, own, from);
  linear(m, own, mlp.gate_up, from.rows, count, gating(m, mlp.gate_up, scales, out, mlp.down),
         [&] { fetch_start(m, own, mlp.down, count); });
  m.meet(own);
  return out;
}
