// The parts of a decoder, in the form that kernels use.
#pragma once
#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

#ifdef __AMX_BF16__
#include "gemm_amx.h"
#else
#include "gemm.h"
#endif
#include "gguf_rows.h"
#include "router.h"

constexpr int PAIRS_UNIT = 4;  // alternating panels of two matrices that make a group of 32 outputs

// 32 columns of input rows, one row after another: a[i] and b[i].
inline void put_columns(Kinds kinds, const F* a, const F* b, Rows rows, int first, int count, int column) {
  for (int i = 0; i < count;) {
    const Place place = rows.place(first + i);
    if (std::min(count - i, place.left) >= PANEL)
      put_groups(kinds, a + i, b + i, rows, place, column / GROUP), i += PANEL;
    else
      put_group(kinds, a[i], b[i], rows, place, column / GROUP), i++;
  }
  if (rows.idle_behind(first + count)) clear_idle(kinds, rows, column / GROUP);
}

// Panels in the order of computation: of all outputs, or of those that a rank computes (ranks.h).
struct Linear {
  std::vector<Job> jobs;
  const float* bias = nullptr;
  int cols, width = 0;  // of the whole layer
  int unit = 2;  // panels that are computed together
  Kinds kinds;

  // Outputs in order; with `pairs`, alternating panels of two matrices.
  Linear(std::vector<const Matrix*> parts, const float* bias = nullptr, bool pairs = false)
      : bias(bias), cols(parts[0]->cols) {
    for (auto* part : parts) kinds.add(part->format);
    if (pairs) {
      for (int p = 0; p < parts[0]->rows / PANEL; p++)
        for (auto* part : parts) jobs.push_back({part, p, part->first + p * PANEL});
      width = parts[0]->all, unit = PAIRS_UNIT;
    } else {
      for (auto* part : parts) {
        for (int p = 0; p < part->rows / PANEL; p++) jobs.push_back({part, p, width + part->first + p * PANEL});
        width += part->all;
      }
    }
    link();
  }
  // Panels half a head apart are adjacent, as RoPE rotates them together; with `whole`, units are whole heads.
  void by_heads(int dim, bool whole) {
    const int half = dim / PANEL / 2;
    if (whole) unit = 2 * half;
    const std::vector<Job> plain = jobs;
    for (size_t i = 0; i < jobs.size() && !whole; i++) {
      const size_t head = i / (2 * half) * (2 * half), place = i % (2 * half);
      jobs[i] = plain[head + place / 2 + place % 2 * half];
    }
    link();
  }
  F biased(F sum, const Job& job) const { return plus(sum, bias, job); }
  static F plus(F sum, const float* bias, const Job& job) { return bias ? add(sum, load(bias + job.column)) : sum; }
  // The same with pairs, for a panel of the first matrix (0) or of the second.
  F biased_pair(F sum, const Job& job, int which) const {
    return bias ? add(sum, load(bias + which * width + job.column)) : sum;
  }
  int units() const { return ceil_div(int(jobs.size()), unit); }
  size_t groups() const { return jobs.size() * (cols / GROUP); }  // groups of weights in all panels

 private:
  // Sets each job's successor, for prefetching; that of the last job is the memory after it.
  void link() {
    auto begin = [&](size_t i) { return i < jobs.size() ? jobs[i].begin() : jobs.back().end(); };
    for (size_t i = 0; i < jobs.size(); i++) jobs[i].next = begin(i + 1), jobs[i].after_next = begin(i + 2);
  }
};

enum Activation { SILU, GELU, SWIGLU_OAI, RELU2 };

struct Config {
  int32_t hidden, intermediate, activation, num_ropes;
  int32_t kv_format;  // how keys and values are stored, a KvFormat
  int32_t q_width, kv_width, half_dim;  // of the widest attention: heads x dim, KV heads x dim, and dim / 2
  int32_t vocab;             // without the padding of the head's last panel
  int32_t embedding_format;  // format of the caller's embedding rows, if `embed` is null
  float eps, embedding_scale;
  float residual_scale;  // of what blocks add to the residual
  float score_cap, logit_cap;  // bounds of query-key products and of logits (cap16); 0 for none

  size_t embedding_bytes() const { return raw_row_bytes(Format(embedding_format), hidden); }  // of such a row
};

// A layer's attention, and the place of its entries: a group of layers (models/layer_groups.py), and a place in the
// pages of the group. Another layer with the same place may have made them.
struct AttentionShape {
  int32_t heads, kv_heads, dim;
  int32_t first_kv_head, last_kv_head;  // whose keys and values are made here: all or a rank's
  int32_t any_head;  // whether ranks share out attention by its work, and not by who made keys and values
  int32_t rope, query_rope;  // of keys, and of queries, which may also grow with their position
  int32_t window, group, place;
  int32_t own_entries;  // whether this layer makes the keys and values that it reads
  int32_t whole_norm;   // whether norms of q and k are over all heads together
  int32_t both_ways;    // whether a row attends to the entries behind it too, as far as to those before it
  float scale;
  const float* sink_logits;  // [heads], each of a key without a value; or null

  // Whether its work is divided in the same way.
  bool divides_like(const AttentionShape& other) const {
    return heads == other.heads && kv_heads == other.kv_heads && any_head == other.any_head && window == other.window;
  }
  int repeat() const { return heads / kv_heads; }  // query heads of a KV head
  // The place of its K and V among all layers, which are of one group or have one each, where heads hold other entries.
  int bias_place() const { return group + place; }
};

enum StateKind { GATED_DELTA_NET, SHORT_CONVOLUTION, MAMBA2 };  // models/recurrent.py

// A layer's state, the places of its entries, and its vectors.
struct StateShape {
  int32_t kind;
  int32_t k_heads, v_heads, k_dim, v_dim, conv_width;
  int32_t tiled;  // whether every k_heads-th head of v has the same head of k, and not neighbours
  int32_t rows_group, rows_place, inputs_group, inputs_place;
  // Of a snapshot: the layer's first page, numbers that are together in a page, and how many of these are in each.
  int32_t first_page, snapshot_row, rows_in_page;
  const float* conv;  // [conv_width, conv_size]; of the following, a kind's own, the others null
  const float *decay, *dt_bias, *norm, *conv_bias, *skip;  // [v_heads] twice, [v_dim or v_size], [conv_size], [v_heads]

  // How many of the heads of v that share a head of k a member computes together: all, if those are not many.
  int together() const {
    int count = v_heads / k_heads;
    for (int most = 8; kind == MAMBA2 && count > most; most--)
      if (count % most == 0) count = most;
    return count;
  }
  // The g-th of the heads of v that share a head of k.
  int v_head(int head, int g) const { return tiled ? g * k_heads + head : head * (v_heads / k_heads) + g; }
  int k_size() const { return k_heads * k_dim; }
  int v_size() const { return v_heads * v_dim; }
  int conv_size() const { return 2 * k_size() + v_size(); }
  // Columns of a row: a head of k, then what the heads of v that share it have written; after all, sums of log decays.
  int key_column(int head) const { return head * (k_dim + v_heads / k_heads * v_dim); }
  int written_column(int head) const {
    const int group = v_heads / k_heads, key = tiled ? head % k_heads : head / group;
    return key_column(key) + k_dim + (tiled ? head / k_heads : head % group) * v_dim;
  }
  int row_size() const { return kind == SHORT_CONVOLUTION ? 0 : k_size() + v_size() + 2 * v_heads; }
  size_t state_size() const { return size_t(v_heads) * k_dim * v_dim; }
  int products() const { return kind == SHORT_CONVOLUTION ? 3 : kind == MAMBA2 ? 5 : 6; }  // matrices of the first product
  // Columns of the first product behind those of the convolution. Matrices have whole panels.
  int z_column() const { return conv_size(); }
  int b_column() const { return z_column() + v_size(); }
  int a_column() const { return b_column() + (kind == MAMBA2 ? 0 : (v_heads + PANEL - 1) / PANEL * PANEL); }
};

// The sizes of latent entries and of their heads, and norms: see models/latent.py.
struct LatentShape {
  int32_t rank, rotated, plain, value;
  const float *q_norm, *kv_norm;  // [query_rank], or null; [rank]

  int query() const { return plain + rotated; }
  // The place of a latent's number in an entry; numbers of a panel stay together.
  int column(int d) const { return d < rank / 2 ? rotated / 2 + d : rotated + d; }
};

struct Latent {
  LatentShape shape;
  std::optional<Linear> q_up;
  std::vector<Linear> k_up, v_up;  // of each head
  Kinds v_kinds;                   // the kinds of all heads' `v_up`
};

// A gated MLP: down(act(gate x) * up x). Without a gate, which is null then, up x is both.
struct Mlp {
  Linear gate_up, down;
  Mlp(const Matrix* gate, const Matrix* up, const Matrix* down, const float* gate_up_bias, const float* down_bias)
      : gate_up(gate ? Linear({gate, up}, gate_up_bias, true) : Linear({up}, gate_up_bias)), down({down}, down_bias) {}
};

// An MLP that every row passes beside its experts, weighted by the sigmoid of the row's product with `gate` if it has one.
struct SharedExpert {
  Mlp mlp;
  const float* gate;  // [hidden], or null
};

// Norms of a block whose experts and shared expert each have their own: before the router and the experts, and after the
// shared expert and the others. Both sums pass the block's last norm.
struct ExpertNorms {
  const float *router, *before, *shared_after, *after;
};

constexpr int MOST_TOKEN_INPUTS = 1024;

// Numbers of each row's token for every block: of a table that the caller has, plus those of a product with its embedding.
struct TokenInputs {
  Linear projection;  // [blocks * size, hidden]
  const float* norm;  // [size], of each block's part of the product
  int32_t size, format;  // of a block; of the table's rows

  size_t row_bytes() const { return raw_row_bytes(Format(format), projection.width); }
};

// What a block does with its numbers at the end: x += norm(projection(activation(gate x) * numbers)).
struct BlockInputs {
  Linear gate, projection;
  const float* norm;
};

struct Block {
  // Those before attention and the MLP, of q, k and v, and after attention and the MLP; null for none.
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm, *v_norm, *attn_post_norm, *mlp_post_norm;
  float scale;  // of the residual at the end
  Linear qkv, o;
  AttentionShape attention;
  std::vector<Mlp> mlps;  // the MLP, or the experts, all of one size; none in a block that is a mixer alone
  Router router;          // chooses the experts of a row; without weights there is one MLP
  Kinds mlp_kinds;        // the kinds of their weights
  std::optional<SharedExpert> shared;
  std::optional<ExpertNorms> expert_norms;
  std::optional<BlockInputs> inputs;
  std::optional<StateShape> state;  // in place of attention
  std::optional<Latent> latent;     // if K and V are one
  bool gated = false;               // whether the last columns of `qkv` gate what attention makes
  bool beside = false;              // whether it reads the inputs of the block before it, which has no MLP

  bool mixed() const { return router.weights; }
  int intermediate() const { return mlps[0].down.cols; }
};

struct Decoder {
  Config config;
  const Matrix* embed;  // null if a batch contains the rows
  std::vector<Block> blocks;
  const Matrix* head_matrix = nullptr;  // which a rank may have no row of
  std::unique_ptr<Linear> head;
  const float* head_norm = nullptr;
  std::optional<TokenInputs> inputs;
  std::vector<float> zeros;  // the rows of states before the first token

  // Rows of numbers that are added to scores: one for each layer and KV head.
  size_t bias_rows() const {
    size_t rows = 0;
    for (const Block& b : blocks)
      if (!b.state) rows = std::max(rows, size_t(b.attention.bias_place() + 1) * b.attention.kv_heads);
    return rows;
  }
  // Groups of layers whose entries share pages.
  size_t groups() const {
    int groups = 0;
    for (const Block& b : blocks) {
      groups = std::max(groups, b.attention.group + 1);
      if (b.state) groups = std::max({groups, b.state->rows_group + 1, b.state->inputs_group + 1});
    }
    return size_t(groups);
  }
};
