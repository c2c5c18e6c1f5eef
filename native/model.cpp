// The C interface: see twostroke/backends/native/library.py. The Python side describes the model once.
#include "block.h"
#include "head.h"
#include "likeliest.h"
#include "search.h"
#include "sketch_making.h"

// A team has one run at a time. Threads of the caller take turns, each for a whole call.
using Turn = std::lock_guard<std::recursive_mutex>;

// Runs job(own, product) for rows of the caller. Members may still read its data when this returns.
template <class Job>
static void multiply_rows(Model& m, const Linear& layer, const float* x, int count, float* out, Summary* summaries,
                          int phases, const Job& job) {
  const Turn turn(m.team->turn);
  const int run = m.team->vacant();
  Product& product = m.products[run];
  product.begin(layer, x, count, out);
  m.team->run(run, phases, product.pure, m.job([&product, job](Model::Private& own) { job(own, product); }));
  if (product.pure) std::copy_n(product.out, size_t(count) * layer.width, out);
  if (summaries) std::copy_n(product.summaries, count, summaries);
}

// Calls found(row, chunk) for [rows, count] logits, row after row, on all members of the team.
template <class Found, class Find>
static std::vector<Found> each_chunk(void* team, int rows, int count, const Find& find) {
  const int chunks = chunks_of(count);
  std::vector<Found> found(size_t(rows) * chunks);
  const Turn turn(((Team*)team)->turn);
  ((Team*)team)->run(1, [&](int member) {
    ((Team*)team)->share(rows * chunks, member, [&](int i) { found[i] = find(i / chunks, i % chunks); });
  });
  return found;
}

// See twostroke_add_block. `mlps`: gate, up and down of each.
static void add_block(Model& m, const float** norms, void** matrices, const float* bias, int rope, int window, Router router,
                      void** mlps, int count) {
  auto part = [](void* matrix) { return (const Matrix*)matrix; };
  Linear qkv({part(matrices[0]), part(matrices[1]), part(matrices[2])}, bias);
  qkv.by_heads(m.config.dim, norms[2] || norms[3]);
  Block b{norms[0], norms[1], norms[2], norms[3], norms[4], norms[5], std::move(qkv), Linear({part(matrices[3])}),
          rope,     window,   {},       router,   {}};
  b.mlps.reserve(count);
  for (int i = 0; i < count; i++, mlps += 3) {
    b.mlps.emplace_back(part(mlps[0]), part(mlps[1]), part(mlps[2]));
    for (int input = 0; input < 2; input++) b.mlp_kinds.add(part(mlps[input])->format);
  }
  m.blocks.push_back(std::move(b));
}

#pragma GCC visibility push(default)
extern "C" {

// Whether this process may use the instructions that this library is compiled for. Must be called before all others.
int twostroke_usable() {
#ifdef __AMX_BF16__
  return request_tiles();
#else
  return 1;
#endif
}

// Null if the system allows no more threads.
void* twostroke_team(int size) {
  try {
    return new Team(size);
  } catch (const std::system_error&) {
    return nullptr;
  }
}
void twostroke_team_free(void* team) { delete (Team*)team; }

// Returns when no member is working any more.
void twostroke_settle(void* team) {
  const Turn turn(((Team*)team)->turn);
  ((Team*)team)->settle();
}

// An empty matrix; null if there is no memory.
void* twostroke_matrix(int format, int rows, int cols) {
  auto matrix = std::make_unique<Matrix>(Matrix{Format(format), rows, cols, nullptr, nullptr, 0.0f});
  matrix->memory = take_memory(matrix->bytes());
  matrix->data = matrix->memory.get();
  return matrix->data ? matrix.release() : nullptr;
}

// Packs `count` raw rows with stride row_bytes as the rows of a matrix from `first` on. Both are multiples of a panel;
// a vocabulary is padded.
void twostroke_pack(void* team, void* matrix, int first, int count, const uint8_t* raw, int64_t row_bytes) {
  Matrix& packed = *(Matrix*)matrix;
  Team& members = *(Team*)team;
  const Turn turn(members.turn);
  std::vector<float> highest(members.all());
  members.run(1, [&](int member) {
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

void twostroke_read_row(int format, const uint8_t* raw, int cols, float* out) { read_row(Format(format), raw, cols, out); }

// A model without blocks, which are added later. Without matrices it can multiply others.
void* twostroke_model(void* team, const Config* config, void* embed, void* head, const float* norm) {
  auto* m = new Model(*config, (const Matrix*)embed, (Team*)team);
  if (head) m->head = std::make_unique<Linear>(std::vector{(const Matrix*)head}), m->head_norm = norm;
  return m;
}

void twostroke_model_free(void* model) { delete (Model*)model; }

// [count, cols] float32 times the matrix: [count, rows]. The team and buffers are those of `model`.
void twostroke_multiply(void* model, void* matrix, const float* x, int count, float* out) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  const Linear layer{{(const Matrix*)matrix}};
  multiply_rows(m, layer, x, count, out, nullptr, 2, [&m, &layer, count](Model::Private& own, Product& product) {
    const Rows rows = prepare(m, own, layer, product.x, count, product.inputs, nullptr);
    store_linear(m, own, layer, rows, count, product.out, [] {});
  });
  m.team->settle();
}

// Normalizes [count, hidden] of a pass, and computes logits [count, rows of the head] and summaries of the tokens'
// logits.
void twostroke_logits(void* model, const float* x, int count, float* out, Summary* summaries) {
  Model& m = *(Model*)model;
  auto job = [&m, count](Model::Private& own, Product& product) { run_head(m, own, product, count); };
  multiply_rows(m, *m.head, x, count, out, summaries, HEAD_PHASES, job);
}

// Makes a sketch for twostroke_search. Returns its bytes; 0 if it would be of no use, -1 if there is no memory.
int64_t twostroke_sketch(void* model) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  const Matrix& head = *m.head->jobs[0].matrix;
  if (head.layout().bits <= SKETCH_BITS || rounds_minima(head.format)) return 0;
  try {
    m.sketch = Sketch::of(head, m.head_norm, *m.team);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return m.sketch ? int64_t(m.sketch->bytes()) : 0;
}

// The tokens with the largest logits, with noise, for rows [count, hidden] of a pass; -1 if the largest is not finite.
// If `highest` is not null, the sketch is used, and its upper bounds of panels are stored there: [count, panels].
void twostroke_search(void* model, const float* x, int count, const Noise* noises, int32_t* tokens, float* highest) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  const int run = m.team->vacant();
  Search& search = m.searches[run];
  search.begin(*m.head, x, noises, count, m.sketch && (highest || count <= SKETCH_PAYS));
  m.team->run(run, SEARCH_PHASES, true, m.job([&m, &search, count](Model::Private& own) { run_search(m, own, search, count); }));
  end_search(search, count, chunks_of(m.head->width), tokens);
  if (highest) std::copy_n(search.highest, count * m.head->jobs.size(), highest);
}

// The summaries of [rows, count] logits.
void twostroke_summarize(void* team, const float* logits, int rows, int count, Summary* out) {
  const auto found = each_chunk<Summary>(team, rows, count, [&](int row, int chunk) {
    return summarize_chunk(logits + size_t(row) * count, count, chunk);
  });
  for (int row = 0; row < rows; row++) out[row] = merge_chunks(&found[size_t(row) * chunks_of(count)], chunks_of(count));
}

// Sums of exp((logit - top) * gain) of rows whose gain is above 0.
void twostroke_weigh(void* team, const float* logits, int rows, int count, const float* tops, const float* gains, double* sums) {
  const auto found = each_chunk<float>(team, rows, count, [&](int row, int chunk) {
    return gains[row] > 0 ? weigh_chunk(logits + size_t(row) * count, count, chunk, tops[row], gains[row]) : 0;
  });
  for (int row = 0; row < rows; row++) {
    const float* first = &found[size_t(row) * chunks_of(count)];
    sums[row] = std::accumulate(first, first + chunks_of(count), 0.0);
  }
}

// The first of each row's largest logits, with noise.
void twostroke_draw(void* team, const float* logits, int rows, int count, const Noise* noises, int32_t* tokens) {
  const auto found = each_chunk<Best>(team, rows, count, [&](int row, int chunk) {
    return draw_chunk(logits + size_t(row) * count, count, chunk, noises[row]);
  });
  for (int row = 0; row < rows; row++) {
    const Best* first = &found[size_t(row) * chunks_of(count)];
    tokens[row] = std::max_element(first, first + chunks_of(count))->column;
  }
}

// The columns of each row's counts[row] largest logits, in [rows, count], and their number in `found`: see likeliest.h.
void twostroke_likeliest(void* team, const float* logits, int rows, int count, const int32_t* counts, const float* floors,
                         int32_t* columns, int32_t* found) {
  Team& members = *(Team*)team;
  const Turn turn(members.turn);
  std::vector<Buffer> buffers(members.all());
  members.run(1, [&](int member) {
    members.share(rows, member, [&](int row) {
      const size_t at = size_t(row) * count;
      found[row] = counts[row] ? likeliest(logits + at, count, counts[row], floors[row], columns + at, buffers[member]) : 0;
    });
  });
}

// Norms: attention, MLP, q, k, after attention, after MLP; null if absent. Matrices: q, k, v, o, gate, up, down.
void twostroke_add_block(void* model, const float** norms, void** matrices, const float* bias, int rope, int window) {
  add_block(*(Model*)model, norms, matrices, bias, rope, window, Router{}, matrices + 4, 1);
}

// The same for a block with experts, without a norm after them. Matrices: q, k, v, o; of experts: gate, up, down of
// each. `router`: [experts, hidden], which must outlive the model. Each row has `chosen` experts, whose weights are
// divided by their sum if `normalized`.
void twostroke_add_experts_block(void* model, const float** norms, void** matrices, const float* bias, int rope, int window,
                                 const float* router, int experts, int chosen, int normalized, void** expert_matrices) {
  add_block(*(Model*)model, norms, matrices, bias, rope, window, Router{router, experts, chosen, bool(normalized)},
            expert_matrices, experts);
}

// Runs all rows through every block, writing K and V to kv [blocks, 2, pages, kv_heads, ...], whose first three
// dimensions have strides; result: [wanted, hidden]. Members may still read weights and `kv` when this,
// twostroke_logits or twostroke_search returns: call twostroke_settle before freeing either.
void twostroke_forward(void* model, const Batch* batch, uint16_t* kv, const int64_t* strides, float* result) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  const int run = m.team->vacant(), blocks = int(m.blocks.size());
  Pass& pass = m.passes[run];
  pass.begin(m, *batch, kv, strides, m.team->size(), m.common);
  m.team->run(run, blocks * BLOCK_PHASES + 1, pass.pure(), m.job([&m, &pass, blocks](Model::Private& own) {
    embed(m, own, pass, inputs_of(m, pass, 0));
    pass.begin_reads(own.work.ahead, m.blocks[0], 0, own.member, {m.blocks[0].qkv.groups()});
    for (int i = 0; i < blocks; i++) run_block(m, own, pass, i);
  }));
  pass.hand_out(result);
}
}
#pragma GCC visibility pop
