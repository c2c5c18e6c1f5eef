// A decoder's whole forward pass in one call, and its C interface. The Python side describes the model once.
#include <algorithm>
#include <memory>

#include "attention.h"
#ifdef __AMX_BF16__
#include "gemm_amx.h"
#else
#include "gemm.h"
#endif
#include "summary.h"
#include "threads.h"

constexpr int PAIRS_UNIT = 4;  // panels of two matrices in turn that make a group of 32 outputs

// Panels in the order in which they are computed.
struct Linear {
  std::vector<Job> jobs;
  const float* bias = nullptr;
  int cols, width = 0;
  int unit = 2;  // panels that belong together
  Kinds kinds;

  // Outputs one after another; or with `pairs`, the panels of two matrices in turn.
  Linear(std::vector<const Matrix*> parts, const float* bias = nullptr, bool pairs = false)
      : bias(bias), cols(parts[0]->cols) {
    for (auto* part : parts) kinds.add(part->format);
    if (pairs) {
      for (int p = 0; p < parts[0]->rows / PANEL; p++)
        for (auto* part : parts) jobs.push_back({part, p, p * PANEL});
      width = parts[0]->rows, unit = PAIRS_UNIT;
      return;
    }
    for (auto* part : parts) {
      for (int p = 0; p < part->rows / PANEL; p++) jobs.push_back({part, p, width + p * PANEL});
      width += part->rows;
    }
  }
  int units() const { return (int(jobs.size()) + unit - 1) / unit; }
};

struct Block {
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm, *attn_post_norm, *mlp_post_norm;
  Linear qkv, o, gate_up, down;
  int rope, window;
};

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  F squares = zero();
  for (int i = 0; i < n; i += 16) squares = fma(load(x + i), load(x + i), squares);
  const F scale = set1(1.0f / std::sqrt(sum(squares) / n + eps));
  for (int i = 0; i < n; i += 16) store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// Turn the pairs (i, i + dim / 2) of one head.
void rotate(float* head, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int i = 0; i < half; i += 16) {
    const F a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, fnma(b, s, mul(a, c)));
    store(head + half + i, fma(a, s, mul(b, c)));
  }
}

struct Config {
  int32_t hidden, intermediate, heads, kv_heads, dim, gelu, num_ropes;
  float eps, attention_scale, embedding_scale;
};

// Rows of a step; see RaggedBatch in kernels/interface.py.
struct Batch {
  int32_t num_rows, num_sequences;
  const int64_t *tokens, *pages, *slots;
  const int64_t* positions;
  const int32_t* row_starts;      // [sequences + 1]
  const int32_t* span_starts;     // [sequences + 1]
  const Span* spans;              // of all sequences
  const float *cos, *sin;         // [ropes, turns, dim / 2], by position
  int64_t turns;
  int64_t num_queries;            // rows whose queries are handed out,
  const int64_t* query_rows;      // these,
  float* queries;                 // to [blocks, num_queries, heads * dim]
  const float* dropout;           // [blocks, rows, hidden], of the inputs of MLPs; null for none
};

// Rows of one sequence that attend together: all splits of a head by one member, or each by any.
struct Piece {
  int sequence, first, count;  // rows
  std::vector<Split> splits;
};

struct Model {
  Config config;
  const Matrix* embed;
  std::vector<Block> blocks;
  Team* team;
  // Shared between the members of the team, sized for the largest step so far.
  Buffer x, qkv, attended, gated, out, prepared, partials;
  struct Private {
    int member;
    Buffer norm, prepared, sums;
    Workspace work;
    Scratch scratch;
    std::vector<Query> queries;
    std::vector<Partial> outs;
  };
  std::vector<Private> own;
  // Runs body(own) on all members of the team.
  template <class Body>
  void run(const Body& body) {
    team->run([&](int member) {
      body(own[member]);
      own[member].work.end();
    });
  }
};

constexpr int FEW_ROWS = 2;  // so few rows are prepared by every member for itself, which saves a barrier

// One row in whatever its layer multiplies.
void prepare_row(const float* x, const Linear& layer, Rows rows, int row) {
  size_t at;
  int stride;
  rows.place(row, at, stride);
  for (int c = 0; c < layer.cols; c += GROUP, at += stride) put_group(layer.kinds, load(x + c), load(x + c + 16), rows, at);
}

// Rows ready to be multiplied, each first normed if a norm is given, and then scaled if factors are.
Rows prepare(Model& m, Model::Private& own, const Linear& layer, const float* x, int count, const float* norm,
             const float* factors = nullptr) {
  const int cols = layer.cols;
  auto row = [&](Rows rows, int i) {
    const float* source = x + size_t(i) * cols;
    if (norm) {
      float* normed = own.norm.get<float>(cols);
      rms_norm(source, norm, cols, m.config.eps, normed);
      for (int c = 0; factors && c < cols; c += 16)
        store(normed + c, mul(load(normed + c), load(factors + size_t(i) * cols + c)));
      source = normed;
    }
    prepare_row(source, layer, rows, i);
  };
  if (count <= FEW_ROWS) {
    Rows rows = Rows::in(own.prepared.get<uint8_t>(Rows::bytes(count, cols)), count, cols);
    for (int i = 0; i < count; i++) row(rows, i);
    return rows;
  }
  Rows rows = Rows::in(m.prepared.get<uint8_t>(0), count, cols);
  m.team->share(count, own.member, [&](int i) { row(rows, i); });
  return rows;
}

// Ask for what this member reads first of a layer, while there is nothing better to do.
void fetch_start(const Model& m, const Model::Private& own, const Linear& layer, int count) {
  constexpr size_t BYTES = 16 << 10;
  if (count > ROW_BLOCK) return;
  const size_t first = size_t(m.team->begin(layer.units(), own.member)) * layer.unit;
  for (size_t i = first, bytes = 0; i < layer.jobs.size() && bytes < BYTES; i++) {
    const Job& job = layer.jobs[i];
    const size_t more = std::min(job.matrix->panel_bytes(), BYTES - bytes);
    fetch_bytes(job.matrix->panel(job.panel), more), bytes += more;
  }
}

// Every panel times every row. emit(jobs, n, first row, rows, sums [n][ROW_BLOCK]) takes the results of a unit's n
// panels; finish() is called when a member has nothing left to do.
template <class Emit, class Finish>
void linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, const Emit& emit,
            const Finish& finish) {
  F* sums = own.sums.get<F>(size_t(std::max(PAIRS_UNIT, PANELS_TOGETHER)) * ROW_BLOCK);
  // Many rows go by fewer times if more panels are taken at a time; but there have to be enough pieces to share.
  const int most = std::max(1, count > ROW_BLOCK / 8 ? PANELS_TOGETHER / layer.unit : 1);
  const int units = std::clamp(layer.units() / (4 * m.team->size()), 1, most), unit = units * layer.unit;
  const int pieces = (layer.units() + units - 1) / units;
  m.team->share(pieces, own.member, [&](int piece) {
    const Job* jobs = &layer.jobs[size_t(piece) * unit];
    const int n = std::min(unit, int(layer.jobs.size()) - piece * unit);
    for (int first = 0; first < count; first += ROW_BLOCK) {
      const int block = std::min(ROW_BLOCK, count - first);
      multiply(jobs, n, rows, first, block, sums, own.work);
      emit(jobs, n, first, block, sums);
    }
  }, finish);
}

template <class Finish>
void store_linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, float* out, bool add_to,
                  const Finish& finish) {
  auto emit = [&](const Job* jobs, int n, int first, int block, const F* sums) {
    for (int r = 0; r < block; r++)
      for (int i = 0; i < n; i++) {
        float* place = out + size_t(first + r) * layer.width + jobs[i].column;
        F sum = sums[i * ROW_BLOCK + r];
        if (layer.bias) sum = add(sum, load(layer.bias + jobs[i].column));
        store(place, add_to ? add(sum, load(place)) : sum);
      }
  };
  linear(m, own, layer, rows, count, emit, finish);
}

// Gate and up to rows that the next layer can multiply: a unit's four panels are one group of it.
Rows gated_linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, const Linear& next) {
  const Rows out = Rows::in(m.gated.get<uint8_t>(0), count, next.cols);
  auto gated = [&](F gate, F up) { return mul(m.config.gelu ? gelu16(gate) : silu16(gate), up); };
  auto emit = [&](const Job* jobs, int n, int first, int block, const F* sums) {
    for (; n > 0; n -= layer.unit, jobs += layer.unit, sums += layer.unit * ROW_BLOCK)
      for (int r = 0; r < block; r++) {
        const F a = gated(sums[r], sums[ROW_BLOCK + r]), b = gated(sums[2 * ROW_BLOCK + r], sums[3 * ROW_BLOCK + r]);
        size_t at;
        int stride;
        out.place(first + r, at, stride);
        at += size_t(jobs->column / GROUP) * stride;
        put_group(next.kinds, a, b, out, at);
      }
  };
  linear(m, own, layer, rows, count, emit, [&] { fetch_start(m, own, next, count); });
  return out;
}

void rope_and_store(Model& m, Model::Private& own, const Block& b, const Batch& batch, Layer kv, float* qkv) {
  const Config& c = m.config;
  const int width = (c.heads + 2 * c.kv_heads) * c.dim;
  m.team->share(batch.num_rows, own.member, [&](int row) {
    float* heads = qkv + size_t(row) * width;
    const size_t angles = (size_t(b.rope) * batch.turns + batch.positions[row]) * (c.dim / 2);
    for (int h = 0; h < c.heads + c.kv_heads; h++) {
      float* head = heads + h * c.dim;
      if (b.q_norm) rms_norm(head, h < c.heads ? b.q_norm : b.k_norm, c.dim, c.eps, head);
      rotate(head, batch.cos + angles, batch.sin + angles, c.dim);
    }
    const F scale = set1(c.attention_scale);
    for (int i = 0; i < c.heads * c.dim; i += 16) store(heads + i, mul(load(heads + i), scale));
    const int64_t page = batch.pages[row], slot = batch.slots[row];
    for (int h = 0; h < c.kv_heads; h++) {
      const float *k = heads + (c.heads + h) * c.dim, *v = k + c.kv_heads * c.dim;
      uint16_t *keys = kv.page(0, page, h) + slot, *values = kv.page(1, page, h) + slot * c.dim;
      for (int d = 0; d < c.dim; d += 16) {
        uint16_t halves[16];
        store(halves, load(k + d));
        for (int i = 0; i < 16; i++) keys[(d + i) * PAGE_SIZE] = halves[i];
        store(values + d, load(v + d));
      }
    }
  });
}

// Turned and scaled, as attention takes them.
void hand_out_queries(Model& m, Model::Private& own, const Batch& batch, size_t block, const float* qkv) {
  const Config& c = m.config;
  const size_t size = size_t(c.heads) * c.dim, width = size + 2 * size_t(c.kv_heads) * c.dim;
  m.team->share(int(batch.num_queries), own.member, [&](int i) {
    const float* queries = qkv + batch.query_rows[i] * width;
    std::copy_n(queries, size, batch.queries + (block * batch.num_queries + i) * size);
  });
}

// Pieces of few rows, whose splits may go to several members, get room for the results of each.
struct Attention {
  std::vector<Piece> pieces;
  struct Unit {
    int piece, head, split;  // split -1: all of them
    size_t partial;          // first of `count * repeat`
  };
  std::vector<Unit> units, shared;  // shared: those to be merged, split counts how many
  size_t num_partials = 0;
};

Query query_of(const Batch& batch, int sequence, int row, int entries) {
  return {entries - (batch.row_starts[sequence + 1] - row), int(batch.positions[row])};
}

int entries_of(const Batch& batch, int s) {
  int entries = 0;
  for (int i = batch.span_starts[s]; i < batch.span_starts[s + 1]; i++) entries += batch.spans[i].stop - batch.spans[i].start;
  return entries;
}

// What is to be computed, of a layer with this window.
Attention plan_attention(const Config& c, const Batch& batch, int window) {
  Attention plan;
  const int repeat = c.heads / c.kv_heads;
  for (int s = 0; s < batch.num_sequences; s++) {
    const int entries = entries_of(batch, s), num_spans = batch.span_starts[s + 1] - batch.span_starts[s];
    for (int row = batch.row_starts[s]; row < batch.row_starts[s + 1]; row += QUERY_ROWS) {
      Piece piece{s, row, std::min(QUERY_ROWS, batch.row_starts[s + 1] - row), {}};
      find_splits(batch.spans + batch.span_starts[s], num_spans, window, query_of(batch, s, row, entries),
                  query_of(batch, s, row + piece.count - 1, entries), piece.splits);
      const int index = int(plan.pieces.size()), splits = int(piece.splits.size()), queries = piece.count * repeat;
      for (int head = 0; head < c.kv_heads; head++) {
        if (piece.count > FEW_ROWS || splits == 1) {
          plan.units.push_back({index, head, -1, 0});
          continue;
        }
        plan.shared.push_back({index, head, splits, plan.num_partials});
        for (int split = 0; split < splits; split++, plan.num_partials += queries)
          plan.units.push_back({index, head, split, plan.num_partials});
      }
      plan.pieces.push_back(std::move(piece));
    }
  }
  return plan;
}

// Ask for the keys that this member looks at first.
void fetch_keys(const Model& m, const Model::Private& own, const Batch& batch, const Attention& plan, Layer kv) {
  if (batch.num_rows > ROW_BLOCK) return;
  const Attention::Unit& unit = plan.units[m.team->begin(int(plan.units.size()), own.member)];
  const Piece& piece = plan.pieces[unit.piece];
  const Split& split = piece.splits[std::max(0, unit.split)];
  const Span* spans = batch.span_starts[piece.sequence] + batch.spans + split.first;
  for (int i = 0; i < split.count; i++)
    fetch_bytes(kv.page(0, spans[i].page, unit.head), size_t(2) * PAGE_SIZE * kv.dim);
}

template <class Finish>
void attention(Model& m, Model::Private& own, const Block& b, const Batch& batch, const Attention& plan, Layer kv,
               const float* qkv, float* out, const Finish& finish) {
  const Config& c = m.config;
  const int width = (c.heads + 2 * c.kv_heads) * c.dim, repeat = c.heads / c.kv_heads, stride = c.dim + 16;
  float* memory = m.partials.get<float>(0);
  auto partial_at = [&](float* base, size_t i) {
    float* place = base + i * stride;
    return Partial{place, place + c.dim, place + c.dim + 1};
  };
  auto result = [&](const Piece& piece, int head, int i) {  // of query i: [row, repeat]
    return out + (size_t(piece.first + i / repeat) * c.heads + head * repeat + i % repeat) * c.dim;
  };
  m.team->share(int(plan.units.size()), own.member, [&](int u) {
    const Attention::Unit& unit = plan.units[u];
    const Piece& piece = plan.pieces[unit.piece];
    const int queries = piece.count * repeat, entries = entries_of(batch, piece.sequence);
    const Span* spans = batch.spans + batch.span_starts[piece.sequence];
    own.queries.clear();
    Half* narrow = own.scratch.queries.get<Half>(size_t(queries) * c.dim);
    for (int i = 0; i < queries; i++) {
      const int row = piece.first + i / repeat;
      const float* q = qkv + size_t(row) * width + (unit.head * repeat + i % repeat) * c.dim;
      own.queries.push_back(query_of(batch, piece.sequence, row, entries));
      narrow_query(q, c.dim, narrow + size_t(i) * c.dim);
    }
    auto split = [&](const Split& s, float* base, size_t first) {
      own.outs.clear();
      for (int i = 0; i < queries; i++) own.outs.push_back(partial_at(base, first + i));
      attend_split(kv, unit.head, spans + s.first, s.count, s.before, b.window, own.queries.data(), narrow,
                   queries, own.outs.data(), own.scratch);
    };
    if (unit.split >= 0) return split(piece.splits[unit.split], memory, unit.partial);
    float *outs = own.scratch.outs.get<float>(size_t(queries) * stride), *state = own.scratch.state.get<float>(2 * queries);
    std::fill_n(state, 2 * queries, 0.0f);
    auto whole = [&](int i) {
      return Partial{result(piece, unit.head, i), state + 2 * i, state + 2 * i + 1};
    };
    for (int i = 0; i < queries; i++) std::fill_n(whole(i).out, c.dim, 0.0f);
    for (const Split& s : piece.splits) {
      split(s, outs, 0);
      for (int i = 0; i < queries; i++) merge(whole(i), own.outs[i], c.dim);
    }
    for (int i = 0; i < queries; i++) divide(whole(i), c.dim);
  }, finish);
  if (plan.shared.empty()) return;
  m.team->share(int(plan.shared.size()), own.member, [&](int u) {
    const Attention::Unit& unit = plan.shared[u];
    const Piece& piece = plan.pieces[unit.piece];
    const int queries = piece.count * repeat;
    for (int i = 0; i < queries; i++) {
      float top = 0, total = 0;
      const Partial whole{result(piece, unit.head, i), &top, &total};
      std::fill_n(whole.out, c.dim, 0.0f);
      for (int split = 0; split < unit.split; split++)
        merge(whole, partial_at(memory, unit.partial + size_t(split) * queries + i), c.dim);
      divide(whole, c.dim);
    }
  });
}

void post_norm_add(Model& m, Model::Private& own, const float* norm, int count, float* out, float* x) {
  const int n = m.config.hidden;
  m.team->share(count, own.member, [&](int row) {
    float *y = out + size_t(row) * n, *place = x + size_t(row) * n;
    rms_norm(y, norm, n, m.config.eps, y);
    for (int i = 0; i < n; i += 16) store(place + i, add(load(place + i), load(y + i)));
  });
}

#pragma GCC visibility push(default)
extern "C" {

// Whether this process may use what this library is compiled for. To be asked before anything else.
int twostroke_usable() {
#ifdef __AMX_BF16__
  return request_tiles();
#else
  return 1;
#endif
}

void* twostroke_team(int size) { return new Team(size); }
void twostroke_team_free(void* team) { delete (Team*)team; }

// An empty matrix; null without memory.
void* twostroke_matrix(int format, int rows, int cols) {
  auto matrix = std::make_unique<Matrix>(Matrix{Format(format), rows, cols, nullptr, nullptr, 0.0f});
  matrix->memory = take_memory(matrix->bytes());
  matrix->data = matrix->memory.get();
  return matrix->data ? matrix.release() : nullptr;
}

// `count` raw rows that lie row_bytes apart become the rows of a matrix from `first` on; both whole panels.
void twostroke_pack(void* team, void* matrix, int first, int count, const uint8_t* raw, int64_t row_bytes) {
  Matrix& packed = *(Matrix*)matrix;
  Team& members = *(Team*)team;
  std::vector<float> highest(members.size());
  members.run([&](int member) {
    members.share(count / PANEL, member, [&](int p) {
      uint8_t* panel = packed.data + (first / PANEL + p) * packed.panel_bytes();
      const float bound = pack_panel(packed, raw + size_t(p) * PANEL * row_bytes, row_bytes, panel);
      highest[member] = std::max(highest[member], bound);
    });
  });
  packed.highest = std::max(packed.highest, *std::max_element(highest.begin(), highest.end()));
}

void twostroke_matrix_free(void* matrix) { delete (Matrix*)matrix; }

int64_t twostroke_matrix_bytes(void* matrix) { return ((Matrix*)matrix)->bytes(); }

void twostroke_unpack(void* matrix, int row, float* out) { unpack_row(*(Matrix*)matrix, row, out); }

void* twostroke_model(void* team, const Config* config, void* embed) {
  auto* m = new Model;
  m->config = *config, m->embed = (const Matrix*)embed, m->team = (Team*)team;
  m->own.resize(m->team->size());
  for (int i = 0; i < m->team->size(); i++) m->own[i].member = i;
  return m;
}

void twostroke_model_free(void* model) { delete (Model*)model; }

// [count, cols] float32, normed if a norm is given, times the matrix: [count, rows]. `model` lends team and buffers.
void twostroke_multiply(void* model, void* matrix, const float* norm, const float* x, int count, float* out) {
  Model& m = *(Model*)model;
  const Linear layer{{(const Matrix*)matrix}};
  m.prepared.get<uint8_t>(Rows::bytes(count, layer.cols));
  m.run([&](Model::Private& own) {
    store_linear(m, own, layer, prepare(m, own, layer, x, count, norm), count, out, false, [] {});
  });
}

// [rows, count] logits to a summary each; `chunks` has room for all their chunks.
void twostroke_summarize(void* team_, const float* logits, int rows, int count, Summary* chunks, Summary* out) {
  Team& team = *(Team*)team_;
  const int per_row = (count + CHUNK - 1) / CHUNK;
  team.run([&](int member) {
    team.share(rows * per_row, member, [&](int i) {
      const int first = i % per_row * CHUNK;
      chunks[i] = summarize_chunk(logits + size_t(i / per_row) * count + first, first, std::min(CHUNK, count - first));
    });
  });
  for (int row = 0; row < rows; row++) out[row] = merge_chunks(chunks + size_t(row) * per_row, per_row);
}

// Norms: attention, MLP, q, k, after attention, after MLP; null where there is none. Matrices: q, k, v, o, gate, up, down.
void twostroke_add_block(void* model, const float** norms, void** matrices, const float* bias, int rope, int window) {
  auto part = [&](int i) { return (const Matrix*)matrices[i]; };
  ((Model*)model)->blocks.push_back({norms[0], norms[1], norms[2], norms[3], norms[4], norms[5],
                                     Linear({part(0), part(1), part(2)}, bias), Linear({part(3)}),
                                     Linear({part(4), part(5)}, nullptr, true), Linear({part(6)}), rope, window});
}

// Run all rows through every block, writing K and V to kv [blocks, 2, pages, kv_heads, ...], of which the first three
// dimensions have strides; result: [rows, hidden].
void twostroke_forward(void* model, const Batch* batch_, uint16_t* kv, const int64_t* strides, float* result) {
  Model& m = *(Model*)model;
  const Config& c = m.config;
  const Batch& batch = *batch_;
  const int n = batch.num_rows, q_size = c.heads * c.dim, qkv_size = q_size + 2 * c.kv_heads * c.dim;
  float* qkv = m.qkv.get<float>(size_t(n) * qkv_size);
  float* attended = m.attended.get<float>(size_t(n) * q_size);
  float* hidden = m.x.get<float>(size_t(n) * c.hidden);
  m.gated.get<uint8_t>(Rows::bytes(n, c.intermediate));
  float* out = m.out.get<float>(size_t(n) * c.hidden);
  m.prepared.get<uint8_t>(Rows::bytes(n, std::max(c.hidden, q_size)));
  std::vector<std::pair<int, Attention>> plans;  // by window
  auto plan_of = [&](int window) -> Attention& {
    for (auto& [known, plan] : plans)
      if (known == window) return plan;
    return plans.emplace_back(window, plan_attention(c, batch, window)).second;
  };
  for (const Block& b : m.blocks) m.partials.get<float>(plan_of(b.window).num_partials * (c.dim + 16));
  m.run([&](Model::Private& own) {
    m.team->share(n, own.member, [&](int row) {
      float* x = hidden + size_t(row) * c.hidden;
      unpack_row(*m.embed, int(batch.tokens[row]), x);
      if (c.embedding_scale != 1.0f)
        for (int i = 0; i < c.hidden; i++) x[i] *= c.embedding_scale;
    });
    for (size_t i = 0; i < m.blocks.size(); i++) {
      const Block& b = m.blocks[i];
      const Linear& following = m.blocks[(i + 1) % m.blocks.size()].qkv;
      const Attention& plan = plan_of(b.window);
      const Layer layer{kv + i * strides[0], strides[1], strides[2], c.kv_heads, c.dim};
      auto fetching = [&](const Linear& next) { return [&m, &own, &next, n] { fetch_start(m, own, next, n); }; };
      Rows rows = prepare(m, own, b.qkv, hidden, n, b.attn_norm);
      store_linear(m, own, b.qkv, rows, n, qkv, false, [&] { fetch_keys(m, own, batch, plan, layer); });
      rope_and_store(m, own, b, batch, layer, qkv);
      if (batch.num_queries) hand_out_queries(m, own, batch, i, qkv);
      attention(m, own, b, batch, plan, layer, qkv, attended, fetching(b.o));
      rows = prepare(m, own, b.o, attended, n, nullptr);
      store_linear(m, own, b.o, rows, n, b.attn_post_norm ? out : hidden, !b.attn_post_norm, fetching(b.gate_up));
      if (b.attn_post_norm) post_norm_add(m, own, b.attn_post_norm, n, out, hidden);
      const float* dropout = batch.dropout ? batch.dropout + i * n * c.hidden : nullptr;
      rows = prepare(m, own, b.gate_up, hidden, n, b.mlp_norm, dropout);
      rows = gated_linear(m, own, b.gate_up, rows, n, b.down);
      store_linear(m, own, b.down, rows, n, b.mlp_post_norm ? out : hidden, !b.mlp_post_norm, fetching(following));
      if (b.mlp_post_norm) post_norm_add(m, own, b.mlp_post_norm, n, out, hidden);
    }
  });
  std::copy_n(hidden, size_t(n) * c.hidden, result);
}
}
#pragma GCC visibility pop
