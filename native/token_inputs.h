// Numbers of each row's token for every block, beside the residual stream (Gemma 4's per-layer embeddings).
#pragma once
#include "layers.h"
#include "pass.h"

// Makes those of all blocks, from the rows' embeddings x.
void make_token_numbers(Model& m, Model::Private& own, const Pass& pass, const float* x) {
  const TokenInputs& in = *m.inputs;
  const int count = pass.batch.num_rows, width = in.projection.width;
  const Rows rows = Rows::in(pass.tokens.rows, count, in.projection.cols);
  m.spread(count, own, [&](int row) { prepare_row(m, own, x, nullptr, in.projection, rows, row); });
  store_linear(m, own, in.projection, rows, count, pass.tokens.made, [] {});
  m.meet(own);
  // The product is that of x / sqrt(hidden); a norm ignores the factor, but for its epsilon.
  const float eps = m.config.eps * m.config.hidden;
  const F scale = set1(std::sqrt(float(in.size))), half = set1(std::sqrt(0.5f));
  m.spread(count, own, [&](int row) {
    float* found = own.row.get<float>(width);
    read_row(Format(in.format), pass.batch.token_inputs + row * in.row_bytes(), width, found);
    const float* made = pass.tokens.made + size_t(row) * width;
    float* out = pass.tokens.numbers + size_t(row) * width;
    for (int first = 0; first < width; first += in.size) {
      float normed[MOST_TOKEN_INPUTS];
      rms_norm(made + first, in.norm, in.size, eps, normed);
      for (int i = 0; i < in.size; i += 16)
        store(out + first + i, mul(fma(load(found + first + i), scale, load(normed + i)), half));
    }
  });
}

// activation(gate x) times a block's numbers of these rows of the pass, packed for the next product.
Rows gate_token_numbers(Model& m, Model::Private& own, const Pass& pass, size_t block, Rows inputs, uint8_t* memory) {
  const BlockInputs& in = *m.blocks[block].inputs;
  const std::span<const int64_t> places = pass.rows(block);
  const Rows out = Rows::in(memory, inputs.count, in.projection.cols);
  const float* numbers = pass.tokens.numbers + block * m.inputs->size;
  auto emit = [&](const Job* jobs, int n, int first, int count, const F* sums) {
    for (; n > 0; n -= in.gate.unit, jobs += in.gate.unit, sums += in.gate.unit * ROW_BLOCK)
      for (int start = 0; start < count; start += PANEL) {
        const int some = std::min(PANEL, count - start);
        F a[PANEL], b[PANEL];
        for (int i = 0; i < some; i++) {
          const float* row = numbers + size_t(places[first + start + i]) * m.inputs->projection.width + jobs->column;
          a[i] = activated(m.config, sums[start + i], load(row));
          b[i] = activated(m.config, sums[ROW_BLOCK + start + i], load(row + PANEL));
        }
        put_columns(in.projection.kinds, a, b, out, first + start, some, jobs->column);
      }
  };
  linear(m, own, in.gate, inputs, inputs.count, emit, [&] { fetch_start(m, own, in.projection, inputs.count); });
  m.meet(own);
  return out;
}
