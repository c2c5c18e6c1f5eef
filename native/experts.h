// The MLPs of a block with experts: a router chooses a few for each row, and the rows of an expert are multiplied
// together, so that its weights are read once. Experts that no row chose are not read.
//
// A row's result is the sum of its experts' outputs in the order of their numbers. So its bits do not depend on the
// other rows of an expert.
//
// The number of pieces of a phase depends on the choices. A late member must compute the same number after the others
// have finished the phase or the block. So choices are kept until the pass is over.
#pragma once
#include "layers.h"
#include "pass.h"

constexpr int ROUTER_TILE = TILE_SUMS < 16 ? 2 : 4;  // rows and experts whose products fit in registers

// Logits of some rows, `cols` numbers each, for some experts: each is a separate sum.
template <int ROWS, int EXPERTS>
inline void route_tile(const float* x, const float* weights, const float* bias, int cols, const float* scales, float* out,
                       int stride) {
  F sums[ROWS][EXPERTS];
  for (int r = 0; r < ROWS; r++)
    for (int e = 0; e < EXPERTS; e++) sums[r][e] = zero();
  for (int i = 0; i < cols; i += 16) {
    F row[ROWS];
    for (int r = 0; r < ROWS; r++) row[r] = load(x + size_t(r) * cols + i);
    for (int e = 0; e < EXPERTS; e++) {
      if (ROWS < ROUTER_TILE) fetch(weights + size_t(EXPERTS + e) * cols + i);  // prefetch for the next tile
      const F weight = load(weights + size_t(e) * cols + i);
      for (int r = 0; r < ROWS; r++) sums[r][e] = fma(row[r], weight, sums[r][e]);
    }
  }
  for (int r = 0; r < ROWS; r++)
    for (int e = 0; e < EXPERTS; e++) out[r * stride + e] = sum(sums[r][e]) * scales[r] + (bias ? bias[e] : 0.0f);
}

// Logits of the router for `x`, normalized by `from`.
void route(Model& m, Model::Private& own, const Router& router, const Normed& from, const float* scales, const float* x,
           float* logits) {
  const int cols = from.rows.cols, count = from.rows.count, tiles = ceil_div(count, ROUTER_TILE);
  m.spread(tiles * ceil_div(router.experts, PANEL), own, [&](int piece) {
    const int row = piece % tiles * ROUTER_TILE, expert = piece / tiles * PANEL;
    const int rows = std::min(ROUTER_TILE, count - row), experts = std::min(PANEL, router.experts - expert);
    float* normed = own.row.get<float>(size_t(ROUTER_TILE) * cols);
    for (int r = 0; r < rows; r++)
      for (int i = 0; i < cols; i += 16) {
        const size_t at = size_t(row + r) * cols + i;
        const F value = mul(load(x + at), from.weight(i));
        store(normed + size_t(r) * cols + i, from.factors ? mul(value, load(from.factors + at)) : value);
      }
    const float* weights = router.weights + size_t(expert) * cols;
    float* out = logits + size_t(row) * router.stride() + expert;
    in_tiles<ROUTER_TILE>(rows, 0, [&]<int R>(int r) {
      in_tiles<ROUTER_TILE>(experts, 0, [&]<int E>(int e) {
        route_tile<R, E>(normed + size_t(r) * cols, weights + size_t(e) * cols,
                         router.bias ? router.bias + expert + e : nullptr, cols, scales + row + r,
                         out + r * router.stride() + e, router.stride());
      });
    });
  });
}

// An expert's rows, copied for this member, and the scales of their products.
struct Gathered {
  Rows rows;
  const float* scales;
};
Gathered gather_expert(Model::Private& own, const Normed& from, const float* scales, const Routes::Group& group) {
  const int cols = from.rows.cols;
  const Rows rows = Rows::in(own.gathered.get<uint8_t>(Rows::bytes(group.count, cols)), group.count, cols);
  float* their_scales = own.gathered_scales.get<float>(group.count);
  const Routes::Row* chosen = own.routes.rows(group);
  for (int i = 0; i < group.count; i++) {
    copy_row(from.kinds, from.rows, chosen[i].row, rows, i);
    their_scales[i] = scales[chosen[i].row];
  }
  return {rows, their_scales};
}

// The jobs of some units, followed by those at `then`.
inline const Job* jobs_before(Model::Private& own, const Linear& layer, int unit, int n, const Job* then) {
  const int first = unit * layer.unit, last = std::min(first + n * layer.unit, int(layer.jobs.size()));
  own.jobs.assign(layer.jobs.begin() + first, layer.jobs.begin() + last);
  Job* end = own.jobs.data() + own.jobs.size();
  end[-1].next = end[-2].after_next = then[0].begin(), end[-1].after_next = then[1].begin();
  return own.jobs.data();
}

// Gate and up projections of every expert with rows, by expert and unit.
void gate_experts(Model& m, Model::Private& own, const Block& b, const Normed& from, const float* scales, uint8_t* gated) {
  const auto& groups = own.routes.groups();
  const int units = b.mlps[0].gate_up.units(), count = int(groups.size());
  int present = -1;  // the group whose rows are gathered
  Gathered inputs;
  const int most = units_at_once(b.mlps[0].gate_up, from.rows.count);
  m.team->share_parts(count * units, most, own.member, [&](int first, int n) {
    for (int some; n > 0; first += some, n -= some) {
      const int index = first / units, unit = first % units;
      const Routes::Group& group = groups[index];
      const Mlp& mlp = b.mlps[group.expert];
      some = std::min(n, units - unit);
      if (present != index) inputs = gather_expert(own, from, scales, group), present = index;
      const Job* jobs = &mlp.gate_up.jobs[unit * mlp.gate_up.unit];
      if (unit + some == units && index + 1 < count)
        jobs = jobs_before(own, mlp.gate_up, unit, some, b.mlps[groups[index + 1].expert].gate_up.jobs.data());
      const Rows out = PassMemory::gated_of(gated, group, b.intermediate());
      multiply_all(own, jobs, some * mlp.gate_up.unit, mlp.gate_up, inputs.rows, group.count,
                   gating(m, mlp.gate_up, inputs.scales, out, mlp.down));
    }
  }, [&] { fetch_start(m, own, b.mlps[groups[0].expert].down, from.rows.count); });
  m.meet(own);
}

// Units of outputs for which a member goes through all experts: as many as possible while each member has some pieces,
// since long reads of each expert are faster.
inline int mixed_at_once(const Linear& down, int members) {
  constexpr int PIECES = 8, MOST = 4;
  return even_part(down.units(), std::clamp(down.units() / (PIECES * members), 1, MOST));
}

// Down projections of every expert, weighted and summed for some outputs of all rows at a time. emit(jobs, n, first row,
// rows, sums [n][ROW_BLOCK]) takes the sums.
template <class Emit, class Finish>
void add_experts(Model& m, Model::Private& own, const Block& b, int count, uint8_t* gated, const Emit& emit,
                 const Finish& finish) {
  const auto& groups = own.routes.groups();
  const Linear& first_down = b.mlps[groups[0].expert].down;
  const int units = first_down.units(), some = units ? mixed_at_once(first_down, m.team->size()) : 1;
  m.team->share(ceil_div(units, some), own.member, [&](int piece) {
    const int unit = piece * some, n = std::min(some, units - unit), panels = n * first_down.unit;
    F* sums = own.added.get<F>(size_t(round_up(count, ROW_BLOCK)) * panels);  // [blocks of rows, panels, ROW_BLOCK]
    auto block_of = [&](int row) { return sums + size_t(row / ROW_BLOCK) * panels * ROW_BLOCK; };
    for (int row = 0; row < count; row += ROW_BLOCK)
      for (int p = 0; p < panels; p++) std::fill_n(block_of(row) + p * ROW_BLOCK, std::min(ROW_BLOCK, count - row), zero());
    for (size_t g = 0; g < groups.size(); g++) {
      const Routes::Row* rows = own.routes.rows(groups[g]);
      const Linear& down = b.mlps[groups[g].expert].down;
      const bool last = g + 1 == groups.size();
      const Linear& after = last ? first_down : b.mlps[groups[g + 1].expert].down;
      const Job* then = &after.jobs[std::min(unit + n * last, units - 1) * after.unit];
      const Rows inputs = PassMemory::gated_of(gated, groups[g], b.intermediate());
      auto add_weighted = [&, bias = down.bias](const Job* jobs, int panels, int first, int block, const F* products) {
        for (int r = 0; r < block; r++) {
          const auto [row, weight] = rows[first + r];
          F* to = block_of(row) + row % ROW_BLOCK;
          for (int p = 0; p < panels; p++)
            to[p * ROW_BLOCK] =
                fma(Linear::plus(products[p * ROW_BLOCK + r], bias, jobs[p]), set1(weight), to[p * ROW_BLOCK]);
        }
      };
      multiply_all(own, jobs_before(own, down, unit, n, then), panels, down, inputs, groups[g].count, add_weighted);
    }
    const Job* jobs = &first_down.jobs[unit * first_down.unit];
    for (int row = 0; row < count; row += ROW_BLOCK) emit(jobs, panels, row, std::min(ROW_BLOCK, count - row), block_of(row));
  }, finish);
  m.meet(own);
}

// The sigmoid of each row's product with the shared expert's gate, in [rows, 16]: ranks write no line together.
void weigh_shared(Model& m, Model::Private& own, const SharedExpert& shared, const Normed& from, const float* scales,
                  const float* x, float* out) {
  const int cols = from.rows.cols;
  m.spread(from.rows.count, own, [&](int row) {
    F total = zero();
    for (int i = 0; i < cols; i += 16) {
      const size_t at = size_t(row) * cols + i;
      const F value = mul(load(x + at), from.weight(i));
      total = fma(from.factors ? mul(value, load(from.factors + at)) : value, load(shared.gate + i), total);
    }
    out[row * PANEL] = 1.0f / (1.0f + std::exp(-sum(total) * scales[row]));
  });
}

// Adds the shared expert's output to the rows at `at.after`: [rows, hidden].
const float* add_shared(Model& m, Model::Private& own, const SharedExpert& shared, const Normed& from, const float* scales,
                        const PassMemory::Places& at) {
  const Linear& down = shared.mlp.down;
  if (shared.gate) weigh_shared(m, own, shared, from, scales, at.after, at.shares);
  const Rows gated = gated_linear(m, own, shared.mlp, from, at.shared_gated);
  auto emit = [&](const Job* jobs, int n, int first, int block, const F* sums) {
    for (int r = 0; r < block; r++) {
      const F share = set1((shared.gate ? at.shares[(first + r) * PANEL] : 1.0f) * m.config.residual_scale);
      for (int i = 0; i < n; i++) {
        const size_t place = size_t(first + r) * down.width + jobs[i].column;
        store(at.with_shared + place, fma(sums[i * ROW_BLOCK + r], share, load(at.after + place)));
      }
    }
  };
  linear(m, own, down, gated, from.rows.count, emit, [] {});
  m.meet(own);
  return at.with_shared;
}

// Routes the rows of `routed`, and gates those of `from`. Both are the rows at `at.after` normalized.
void choose_and_gate(Model& m, Model::Private& own, const Block& b, const Normed& routed, const Normed& from,
                     const float* scales, const PassMemory::Places& at) {
  const int count = from.rows.count;
  route(m, own, b.router, routed, scales, at.after, at.logits);
  m.team->share(count, own.member, [&](int row) {
    const size_t stride = b.router.stride();
    float* logits = own.row.get<float>(stride);  // another member may read this row, which must never be incomplete
    std::copy_n(at.logits + row * stride, stride, logits);
    own.choices.resize(b.router.chosen);
    choose(b.router, logits, own.choices.data());
    std::copy(own.choices.begin(), own.choices.end(), at.choices + size_t(row) * b.router.chosen);
  });
  own.routes.sort(b.router, at.choices, count);
  gate_experts(m, own, b, from, scales, at.gated);
}

// The MLPs of a block, from the rows of `from`, which are those at `at.after` normalized.
template <class Finish>
void mix_experts(Model& m, Model::Private& own, const Block& b, const Normed& from, const PassMemory::Places& at, float* out,
                 const Normed* to, const Finish& finish) {
  const float* scales = scales_of(m, own, from);
  const float* before = b.shared ? add_shared(m, own, *b.shared, from, scales, at) : at.after;
  choose_and_gate(m, own, b, from, from, scales, at);
  const Linear& down = b.mlps[own.routes.groups()[0].expert].down;
  const auto emit = adding(down, nullptr, m.config.residual_scale, before, out, to);  // each expert adds its bias
  add_experts(m, own, b, from.rows.count, at.gated, emit, finish);
}

// The same where the shared expert and the others have norms of their own: the sum of both after these, in
// `at.with_shared`. The rows of `from` are those of the shared expert.
void mix_normed(Model& m, Model::Private& own, const Block& b, const Normed& from, const PassMemory::Places& at) {
  const int count = from.rows.count, hidden = m.config.hidden;
  const ExpertNorms& norms = *b.expert_norms;
  const Normed routed{from.rows, from.kinds, norms.router, from.factors, from.squares};
  const Normed inputs{Rows::in(at.expert_inputs, count, hidden), from.kinds, norms.before, from.factors, at.expert_squares};
  m.spread(count, own, [&](int row) {
    const float* x = at.after + size_t(row) * hidden;
    for (int i = 0; i < hidden; i += GROUP) inputs.put(row, i, load(x + i), load(x + i + 16));
  });
  store_linear(m, own, b.shared->mlp.down, gated_linear(m, own, b.shared->mlp, from, at.shared_gated), count, at.mlp_out,
               [] {});
  m.meet(own);
  choose_and_gate(m, own, b, routed, inputs, scales_of(m, own, from), at);
  add_experts(m, own, b, count, at.gated, storing(b.mlps[0].down, at.experts_out), [] {});
  m.spread(count, own, [&](int row) {
    float* normed = own.row.get<float>(2 * size_t(hidden));
    const size_t first = size_t(row) * hidden;
    rms_norm(at.mlp_out + first, norms.shared_after, hidden, m.config.eps, normed);
    rms_norm(at.experts_out + first, norms.after, hidden, m.config.eps, normed + hidden);
    for (int i = 0; i < hidden; i += 16) store(at.with_shared + first + i, add(load(normed + i), load(normed + hidden + i)));
  });
}
