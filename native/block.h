// A block of a decoder, for the rows of a pass.
#pragma once
#include <optional>

#include "attention_codes.h"
#include "experts.h"
#include "latent.h"
#include "token_inputs.h"
#include "states.h"

// Attention; the results are packed as rows for the output projection.
template <class Finish>
void attention(Model& m, Model::Private& own, const Heads& heads, const Attention& plan, Layer kv,
               const PassMemory::Places& room, Rows out, const Finish& finish) {
  float* const memory = room.partials;
  const Block& b = heads.block;
  const AttentionShape& c = b.attention;
  const Batch& batch = heads.batch;
  const int repeat = c.repeat(), stride = c.dim + 16;
  const float cap = m.config.score_cap * LOG2_E;  // as queries are multiplied by it
  auto partial_at = [&](float* base, size_t i) {
    float* place = base + i * stride;
    return Partial{place, place + c.dim, place + c.dim + 1};
  };
  const bool coded = kv.coded();
  auto put = [&](const Piece& piece, int head, float* wholes) {  // [rows, repeat]
    for (int i = 0; i < piece.count * repeat && coded; i++) rotate_back(partial_at(wholes, i).out, c.dim);
    for (int start = 0; start < piece.count; start += PANEL)
      for (int h = 0; h < repeat; h++) {
        const int some = std::min(PANEL, piece.count - start), column = (head * repeat + h) * c.dim;
        auto query = [&](int i) { return partial_at(wholes, size_t(start + i) * repeat + h); };
        float shares[PANEL];
        for (int i = 0; i < some; i++)
          shares[i] =
              c.sink_logits ? share_beside(query(i), c.sink_logits[head * repeat + h] * LOG2_E) : 1.0f / *query(i).total;
        const LatentShape* latent = b.latent ? &b.latent->shape : nullptr;
        auto place = [&](int d) { return latent ? latent->column(d) : d; };
        for (int d = 0; d < (latent ? latent->rank : c.dim); d += GROUP) {
          F x[PANEL], y[PANEL];
          for (int i = 0; i < some; i++) {
            const float* sums = query(i).out;
            x[i] = mul(load(sums + place(d)), set1(shares[i])), y[i] = mul(load(sums + place(d + 16)), set1(shares[i]));
            if (!b.gated) continue;
            const float* gate = heads.gates + size_t(piece.first + start + i) * m.config.q_width + column + d;
            x[i] = mul(x[i], load(gate)), y[i] = mul(y[i], load(gate + 16));
          }
          if (latent)
            put_columns(b.latent->v_kinds, x, y, head_rows(room.seen_rows, h, out.count, latent->rank), piece.to + start,
                        some, d);
          else
            put_columns(b.o.kinds, x, y, out, piece.to + start, some, column + d);
        }
      }
  };
  auto reads = [&](const Attention::Unit& unit, const Split& s) {
    Reads made = reads_of(plan, batch, c.group, unit, s);
    made.bias = bias_of(batch, plan.pieces[unit.piece].sequence, c.bias_place(), c.kv_heads, unit.head);
    return made.seen();
  };
  auto reads_after = [&](const Attention::Unit& unit, std::span<const Split> rest, const Attention::Unit& after) {
    for (const Split& s : rest)
      if (const Reads pages = reads(unit, s); pages.count) return pages;
    return reads_of(plan, batch, c.group, after, splits_of(plan, after)[0]);
  };
  const int units = int(plan.units.size());
  m.team->share(units, own.member, [&](int u) {
    const Attention::Unit &unit = plan.units[u], &after = plan.units[std::min(u + 1, units - 1)];
    const Piece& piece = plan.pieces[unit.piece];
    const int queries = piece.count * repeat, entries = entries_of(batch, piece.sequence);
    own.queries.clear();
    for (int i = 0; i < queries; i++)
      own.queries.push_back(query_of(c, batch, piece.sequence, piece.first + i / repeat, entries));
    const std::span<const Split> splits = splits_of(plan, unit);
    std::optional<CodedQueries> codes;
    if (coded) codes = CodedQueries::in(own.scratch.queries, heads.query(piece.first, unit.head), queries, c.dim);
    auto split = [&](size_t index, float* base, size_t first) {
      const Reads pages = reads(unit, splits[index]);
      own.outs.clear();
      for (int i = 0; i < queries; i++) own.outs.push_back(partial_at(base, first + i));
      if (!pages.count) {
        for (const Partial& out : own.outs) std::fill_n(out.out, c.dim, 0.0f), *out.top = *out.total = 0;
        return;
      }
      const Reads next = reads_after(unit, splits.subspan(index + 1), after);
      if (coded)
        return attend_codes(kv, pages, next, c.window, cap, own.queries.data(), *codes, queries, own.outs.data(),
                            own.scratch);
      attend_split(kv, pages, next, c.window, cap, own.queries.data(), heads.query(piece.first, unit.head), queries,
                   own.outs.data(), own.scratch);
    };
    if (unit.split >= 0) return split(0, memory, unit.partial);
    float *parts = own.scratch.outs.get<float>(2 * size_t(queries) * stride), *wholes = parts + size_t(queries) * stride;
    for (size_t i = 0; i < splits.size(); i++) {
      split(i, i ? parts : wholes, 0);
      for (int q = 0; q < queries && i; q++) merge(partial_at(wholes, q), own.outs[q], c.dim);
    }
    put(piece, unit.head, wholes);
  }, finish);
  if (!plan.num_partials) return;
  if (c.any_head) m.meet(own);
  m.team->share(int(plan.shared.size()), own.member, [&](int u) {
    const Attention::Unit& unit = plan.shared[u];
    const Piece& piece = plan.pieces[unit.piece];
    const int queries = piece.count * repeat;
    float* wholes = own.scratch.outs.get<float>(size_t(queries) * stride);
    std::copy_n(partial_at(memory, unit.partial).out, size_t(queries) * stride, wholes);
    for (int split = 1; split < unit.split; split++)
      for (int i = 0; i < queries; i++)
        merge(partial_at(wholes, i), partial_at(memory, unit.partial + size_t(split) * queries + i), c.dim);
    put(piece, unit.head, wholes);
  });
}

void embed(Model& m, Model::Private& own, const Pass& pass, const Normed& to) {
  const int hidden = m.config.hidden;
  float* out = pass.room.of(0).x;
  own.live = pass.live(0, true);
  // A rank that has a part of the embedding looks up its tokens.
  auto absent = [&](int64_t token) { return token < m.embed->first || token >= m.embed->first + m.embed->rows; };
  auto look_up = [&](int row) {
    float *weights = own.row.get<float>(hidden), *x = out + size_t(row) * hidden;
    const int64_t token = pass.batch.tokens[row];
    if (m.embed && absent(token)) return;
    if (pass.batch.hidden)
      std::copy_n(pass.batch.hidden + size_t(row) * hidden, hidden, weights);
    else if (m.embed)
      unpack_row(*m.embed, int(token) - m.embed->first, weights);
    else
      read_row(Format(m.config.embedding_format), pass.batch.embeddings + row * m.config.embedding_bytes(), hidden, weights);
    const F scale = set1(m.config.embedding_scale);
    for (int i = 0; i < hidden; i += GROUP) {
      const F a = mul(load(weights + i), scale), b = mul(load(weights + i + 16), scale);
      store(x + i, a), store(x + i + 16, b);
      to.put(row, i, a, b);
    }
  };
  if (!m.embed) {
    m.spread(pass.batch.num_rows, own, look_up);
  } else {
    m.team->share(pass.batch.num_rows, own.member, look_up);
    m.meet(own);
  }
  if (m.inputs) make_token_numbers(m, own, pass, out);
}

// Some rows of x, packed.
void gather(Model& m, Model::Private& own, std::span<const int64_t> rows, const float* x, float* out) {
  const size_t hidden = m.config.hidden;
  m.spread(int(rows.size()), own, [&](int i) { std::copy_n(x + rows[i] * hidden, hidden, out + i * hidden); });
}

// The inputs of a block's first product.
Normed inputs_of(const Model& m, const Pass& pass, size_t i) {
  if (m.blocks[i].beside) return inputs_of(m, pass, i - 1);
  const Block& b = m.blocks[i];
  const PassMemory::Places at = pass.room.of(i);
  Kinds kinds = b.qkv.kinds;
  if (i + 1 < m.blocks.size() && m.blocks[i + 1].beside) kinds.add(m.blocks[i + 1].qkv.kinds);
  return {Rows::in(at.inputs, pass.batch.num_rows, b.qkv.cols), kinds, b.attn_norm, nullptr, at.squares};
}

constexpr int EMBED_PHASES = 4, BLOCK_PHASES = 32;  // at most

void run_block(Model& m, Model::Private& own, const Pass& pass, size_t i) {
  const Block& b = m.blocks[i];
  const bool last = i + 1 == m.blocks.size();
  const Linear& following = m.blocks[last ? 0 : i + 1].qkv;
  const Batch& batch = pass.batch;
  own.live = pass.live(i);
  const PassMemory::Places at = pass.room.of(i);
  const std::span<const int64_t> rows = pass.rows(i);
  const int n = int(rows.size());
  auto fetching = [&](const Linear& next) { return [&m, &own, &next, n] { fetch_start(m, own, next, n); }; };
  // A layer's output is added to the residual, directly in one step or after a norm in the other.
  auto add_on = [&](const Linear& layer, Rows rows, const float* norm, float* made, const float* before, float scale,
                    float* out, const Normed* to, const auto& finish) {
    if (!norm) {
      add_linear(m, own, layer, rows, n, before, out, to, finish);
      return m.meet(own);
    }
    store_linear(m, own, layer, rows, n, made, finish);
    m.meet(own);
    post_norm_add(m, own, norm, n, made, before, scale, out, to);
  };
  const size_t handed_out = size_t(batch.num_queries) * m.config.q_width;
  const PassMemory::Places rest = pass.rest(i);
  const Rows attended = Rows::in(rest.attended, n, b.o.cols);
  const Heads heads{m.config, b, batch, at.queries, at.entries, batch.queries + i * handed_out, pass.query_places(),
                    at.gates};
  if (b.state) {
    run_states(m, own, pass, b, inputs_of(m, pass, i), at, rows, attended);
  } else {
    if (b.latent)
      project_latents(m, own, inputs_of(m, pass, i), heads, at);
    else
      project_heads(m, own, inputs_of(m, pass, i), heads, at.projected);
    store_entries(m, own, heads, pass.layer(i));
    if (b.attention.any_head) m.meet(own);
  }
  if (batch.num_states) gather(m, own, pass.state_rows(), at.x, pass.states(i));
  if (!n) return;
  if (pass.cut(i)) gather(m, own, rows, at.x, rest.x);
  if (!b.state) attention(m, own, heads, pass.attention(i), pass.layer(i), rest, attended, fetching(b.o));
  if (b.latent) project_values(m, own, b, rest.seen_rows, attended);
  m.meet(own);
  const Normed next = inputs_of(m, pass, last ? 0 : i + 1);
  const Normed* to = last || m.blocks[i + 1].beside ? nullptr : &next;
  if (b.mlps.empty()) {
    if (!last) pass.begin_reads(own.work.ahead, i + 1, own.member, {b.o.groups(), following.groups()});
    return add_on(b.o, attended, b.attn_post_norm, rest.attention_out, rest.x, b.scale, pass.result(i), to,
                  fetching(following));
  }
  const Mlp& mlp = b.mlps[0];
  const size_t mlps = std::min(size_t(n) * b.router.chosen, b.mlps.size());  // at most
  if (!last)
    pass.begin_reads(own.work.ahead, i + 1, own.member,
                     {b.o.groups(), mlps * mlp.gate_up.groups(), mlps * mlp.down.groups(), following.groups()});
  const float* dropout = batch.dropout ? batch.dropout + i * n * m.config.hidden : nullptr;
  const Rows mlp_inputs = Rows::in(rest.mlp_inputs, n, m.config.hidden);
  const Normed middle{mlp_inputs, b.mlp_kinds, b.mlp_norm, dropout, rest.mlp_squares};
  auto attend = [&](const auto& finish) {
    add_on(b.o, attended, b.attn_post_norm, rest.attention_out, rest.x, 1.0f, rest.after, &middle, finish);
  };
  if (b.mixed()) {
    attend([] {});
    if (!b.expert_norms) return mix_experts(m, own, b, middle, rest, pass.result(i), to, fetching(following));
    mix_normed(m, own, b, middle, rest);
  } else {
    attend(fetching(mlp.gate_up));
  }
  auto feed_forward = [&](float scale, float* out, const Normed* to, const auto& finish) {
    if (b.mixed()) return post_norm_add(m, own, b.mlp_post_norm, n, rest.with_shared, rest.after, scale, out, to);
    const Rows gated = gated_linear(m, own, mlp, middle, rest.gated);
    add_on(mlp.down, gated, b.mlp_post_norm, rest.mlp_out, rest.after, scale, out, to, finish);
  };
  if (!b.inputs) return feed_forward(b.scale, pass.result(i), to, fetching(following));
  const Rows gate_inputs = Rows::in(rest.gate_inputs, n, m.config.hidden);
  const Normed plain{gate_inputs, b.inputs->gate.kinds, nullptr, nullptr, rest.gate_squares};
  feed_forward(1.0f, rest.middle, &plain, fetching(b.inputs->gate));
  const Rows chosen = gate_token_numbers(m, own, pass, i, gate_inputs, rest.token_gated);
  add_on(b.inputs->projection, chosen, b.inputs->norm, rest.token_out, rest.middle, b.scale, pass.result(i), to,
         fetching(following));
}
