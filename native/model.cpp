// The C interface: see twostroke/backends/native/library.py. The Python side describes the model once.
#include <optional>

#include "block.h"
#include "head.h"
#include "likeliest.h"
#include "rank_orders.h"
#include "search.h"
#include "sketch_making.h"

// A team has one run at a time. Threads of the caller take turns, each for a whole call.
using Turn = std::lock_guard<std::recursive_mutex>;

// Runs job(own, product) for rows of the caller. Members may still read its data when this returns. Without `out` the
// results are another rank's.
template <class Job>
static void multiply_rows(Model& m, const Linear& layer, const float* x, int count, float* out, Summary* summaries,
                          int phases, const Job& job) {
  const Turn turn(m.team->turn);
  const int run = m.team->vacant();
  Product& product = m.products[run];
  product.begin(layer, x, count, out);
  m.team->run(run, phases, product.pure, m.job([&product, job](Model::Private& own) { job(own, product); }));
  if (product.copied && out) std::copy_n(product.out, size_t(count) * layer.width, out);
  if (summaries) std::copy_n(product.summaries, count, summaries);
}

static void run_logits(Model& m, const float* x, int count, float* out, Summary* summaries) {
  auto job = [&m, count](Model::Private& own, Product& product) { run_head(m, own, product, count); };
  multiply_rows(m, *m.head, x, count, out, summaries, HEAD_PHASES, job);
}

static const Search& run_search(Model& m, const float* x, int count, const Noise* noises, bool by_sketch) {
  const int run = m.team->vacant();
  Search& search = m.searches[run];
  search.begin(*m.head, x, noises, count, by_sketch);
  const bool pure = !m.ranks;
  m.team->run(run, SEARCH_PHASES, pure,
              m.job([&m, &search, count](Model::Private& own) { run_search(m, own, search, count); }));
  return search;
}

static const Pass& run_pass(Model& m, const Batch& batch, uint8_t* kv, const int64_t* strides, bool by_row) {
  const int run = m.team->vacant(), blocks = int(m.blocks.size());
  Pass& pass = m.passes[run];
  pass.begin(m, batch, kv, strides, m.team->size(), m.common, by_row);
  m.team->run(run, blocks * BLOCK_PHASES + EMBED_PHASES, pass.pure(), m.job([&m, &pass, blocks](Model::Private& own) {
    embed(m, own, pass, inputs_of(m, pass, 0));
    pass.begin_reads(own.work.ahead, 0, own.member, {m.blocks[0].qkv.groups()});
    for (int i = 0; i < blocks; i++) run_block(m, own, pass, i);
  }));
  return pass;
}

// Gives an order for this model to the other ranks.
static void give(Model& m, const Shelf& shelf, Order order) {
  auto& models = m.ranks->models;
  order.model = int(std::find(models.begin(), models.end(), &m) - models.begin());
  m.ranks->give(shelf.packed(order), shelf.used());
}

// By the others: follows an order. Its pointers are offsets in the data that it comes with.
static void obey(Ranks& ranks, const Order& given) {
  const Order order = Shelf(ranks).unpacked(given);
  Model& m = *(Model*)ranks.models[order.model];
  if (order.kind == Order::FORWARD) {
    const Ranks::Pool& pool = ranks.pools[order.pool];
    run_pass(m, order.batch, pool.data + order.kv, pool.strides.empty() ? order.strides : pool.strides.data(), true);
  } else if (order.kind == Order::LOGITS) {
    run_logits(m, order.x, order.count, nullptr, nullptr);
  } else {
    run_search(m, order.x, order.count, order.noises, order.by_sketch);
  }
}

static uint32_t lost(const Model& m) { return m.ranks ? m.ranks->lost() : 0; }

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

// See twostroke_add_block. `mlps`: gate (or null), up and down of each.
static Block& add_block(Model& m, const float** norms, void** matrices, const float** biases, const AttentionShape& attention,
                        Router router, void** mlps, int count) {
  auto part = [](void* matrix) { return (const Matrix*)matrix; };
  std::vector<const Matrix*> turned{part(matrices[0])};
  if (matrices[1]) turned.push_back(part(matrices[1])), turned.push_back(part(matrices[2]));
  Linear qkv(turned, biases[0]);
  qkv.by_heads(attention.dim, (norms[2] || norms[3]) && !attention.whole_norm);
  Linear o({part(matrices[3])}, biases[1]);
  Block b{norms[0],       norms[1],     norms[2],  norms[3], norms[4], norms[5], norms[6], norms[7] ? *norms[7] : 1.0f,
          std::move(qkv), std::move(o), attention, {},       router,   {},       {},       {}};
  if (norms[8]) b.inputs.emplace(BlockInputs{Linear({part(matrices[7])}), Linear({part(matrices[8])}), norms[8]});
  b.mlps.reserve(count);
  for (int i = 0; i < count && mlps[1]; i++, mlps += 3) {
    const Matrix *gate = part(mlps[0]), *up = part(mlps[1]), *down = part(mlps[2]);
    auto bias = [&](int which, int size) { return biases[which] ? biases[which] + size_t(i) * size : nullptr; };
    b.mlps.emplace_back(gate, up, down, bias(2, (gate ? 2 : 1) * up->all), bias(3, down->all));
    b.mlp_kinds.add(b.mlps.back().gate_up.kinds);
  }
  return m.blocks.emplace_back(std::move(b));
}

// The first product of a block, of further matrices.
static Linear first_product(const Block& b, void** matrices, int count) {
  std::vector<const Matrix*> parts;
  for (int i = 0; i < count; i++) parts.push_back((const Matrix*)matrices[i]);
  return Linear(parts, b.qkv.bias);
}

#pragma GCC visibility push(default)
extern "C" {

// A digest of the sources that this was compiled from (backends/native/sources.py); 0 if whoever compiled gave none.
#ifndef SOURCES
#define SOURCES 0
#endif
int64_t twostroke_sources() { return SOURCES; }

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
  } catch (const std::system_error&) { return nullptr; }
}
void twostroke_team_free(void* team) { delete (Team*)team; }

// Returns when no member is working any more.
void twostroke_settle(void* team) {
  const Turn turn(((Team*)team)->turn);
  ((Team*)team)->settle();
}

// An empty matrix, or the part of one of `all` rows that begins at row `begin`; null if there is no memory.
void* twostroke_matrix(int format, int rows, int cols, int begin, int all) {
  auto matrix = std::make_unique<Matrix>(Matrix{Format(format), rows, cols, nullptr, nullptr, 0.0f, begin, all});
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

// The bound of a matrix's weights. Raises it to that of the whole matrix, of which this is a part.
float twostroke_matrix_bound(void* matrix, float bound) {
  Matrix& m = *(Matrix*)matrix;
  return m.highest = std::max(m.highest, bound);
}

void twostroke_matrix_free(void* matrix) { delete (Matrix*)matrix; }

int64_t twostroke_matrix_bytes(void* matrix) { return ((Matrix*)matrix)->bytes(); }

void twostroke_unpack(void* matrix, int row, float* out) { unpack_row(*(Matrix*)matrix, row, out); }

void twostroke_read_row(int format, const uint8_t* raw, int cols, float* out) { read_row(Format(format), raw, cols, out); }

// A model without blocks, which are added later. Without matrices it can multiply others.
void* twostroke_model(void* team, const Config* config, void* embed, void* head, const float* norm) {
  auto* m = new Model(*config, (const Matrix*)embed, (Team*)team);
  m->head_matrix = (const Matrix*)head;
  if (head) m->head = std::make_unique<Linear>(std::vector{(const Matrix*)head}), m->head_norm = norm;
  return m;
}

// Before blocks: see TokenInputs. A block's part has `size` numbers, and the caller's table rows in `format`.
void twostroke_token_inputs(void* model, void* projection, const float* norm, int size, int format) {
  ((Model*)model)->inputs.emplace(TokenInputs{Linear({(const Matrix*)projection}), norm, size, format});
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
// logits. Returns 0, or which rank is lost (ranks.h): then the results mean nothing.
int twostroke_logits(void* model, const float* x, int count, float* out, Summary* summaries) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  std::optional<Ranks::Pinned> pinned;
  if (m.ranks && !lost(m)) {
    pinned.emplace(*m.ranks);
    Shelf shelf(*m.ranks);
    Order order{.kind = Order::LOGITS, .count = count, .x = x};
    shelf.put(order.x, size_t(count) * m.head->cols);
    give(m, shelf, order);
  }
  run_logits(m, x, count, out, summaries);
  return int(lost(m));
}

// Makes a sketch for twostroke_search. Returns its bytes; 0 if it would be of no use, -1 if there is no memory.
int64_t twostroke_sketch(void* model) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  const Matrix& head = *m.head_matrix;
  // Bounds of products are none of capped logits.
  if (head.layout().bits <= SKETCH_BITS || rounds_minima(head.format) || m.config.logit_cap > 0) return 0;
  try {
    m.sketch = Sketch::of(head, m.head_norm, *m.team);
  } catch (const std::bad_alloc&) { return -1; }
  return m.sketch ? int64_t(m.sketch->bytes()) : 0;
}

// For ranks, some of which could not make theirs.
void twostroke_drop_sketch(void* model) { ((Model*)model)->sketch.reset(); }

// The tokens with the largest logits, with noise, for rows [count, hidden] of a pass; -1 if the largest is not finite.
// If `highest` is not null, the sketch is used, and its upper bounds of panels are stored there: [count, panels].
// Returns as twostroke_logits.
int twostroke_search(void* model, const float* x, int count, const Noise* noises, int32_t* tokens, float* highest) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  const bool by_sketch = m.sketch && (highest || count <= SKETCH_PAYS);
  std::optional<Ranks::Pinned> pinned;
  if (m.ranks && !lost(m)) {
    pinned.emplace(*m.ranks);
    Shelf shelf(*m.ranks);
    Order order{.kind = Order::SEARCH, .count = count, .x = x, .noises = noises, .by_sketch = by_sketch};
    shelf.put(order.x, size_t(count) * m.head->cols), shelf.put(order.noises, count);
    give(m, shelf, order);
  }
  const Search& search = run_search(m, x, count, noises, by_sketch);
  end_search(search, count, chunks_of(m.head->width), tokens);
  if (highest) std::copy_n(search.highest, size_t(count) * (m.head->width / PANEL), highest);
  return int(lost(m));
}

// The summaries of [rows, count] logits.
void twostroke_summarize(void* team, const float* logits, int rows, int count, Summary* out) {
  const auto found = each_chunk<Summary>(
      team, rows, count, [&](int row, int chunk) { return summarize_chunk(logits + size_t(row) * count, count, chunk); });
  for (int row = 0; row < rows; row++) out[row] = merge_chunks(&found[size_t(row) * chunks_of(count)], chunks_of(count));
}

// Sums of exp((logit - top) * gain) of rows whose gain is above 0.
void twostroke_weigh(void* team, const float* logits, int rows, int count, const float* tops, const float* gains,
                     double* sums) {
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

// Norms: attention, MLP, q, k, v, after attention, after MLP; the scale of the residual at the end, which only a block with
// the last two has; and that of BlockInputs. Matrices: q, k, v, o, gate, up, down, and two of BlockInputs; k and v are null if the
// entries are another layer's. Biases: of q, k and v; of o; of gate and up; of down; of the router. Norms and biases are
// null if absent, as are all three matrices of the MLP of a block that has none.
void twostroke_add_block(void* model, const float** norms, void** matrices, const float** biases,
                         const AttentionShape* attention) {
  add_block(*(Model*)model, norms, matrices, biases, *attention, Router{}, matrices + 4, 1);
}

// The same for a block with experts, without a norm after them; their biases follow one another. A sixth of `biases` is
// Router's `selection`. Matrices: q, k, v, o; of experts: gate, up, down of each, and then of the shared expert if there
// is one. `router`: [experts, hidden], and `shared_gate`: [hidden] or null, which must outlive the model. Each row has
// `chosen` experts, whose weights are divided by their sum if `normalized`, and multiplied by `scale`. Groups: see Router.
void twostroke_add_experts_block(void* model, const float** norms, void** matrices, const float** biases,
                                 const AttentionShape* attention, const float* router, int experts, int chosen,
                                 int normalized, int sigmoid, int groups, int groups_chosen, float scale,
                                 void** expert_matrices, int shared, const float* shared_gate) {
  const Router chooses{router,    experts, chosen,  bool(normalized), biases[4],    bool(sigmoid),
                       biases[5], scale,   nullptr, groups,           groups_chosen};
  Block& b = add_block(*(Model*)model, norms, matrices, biases, *attention, chooses, expert_matrices, experts);
  if (!shared) return;
  auto part = [&](int i) { return (const Matrix*)expert_matrices[3 * experts + i]; };
  b.shared.emplace(SharedExpert{Mlp(part(0), part(1), part(2), nullptr, nullptr), shared_gate});
  b.mlp_kinds.add(b.shared->mlp.gate_up.kinds);
}

// Lets the experts of the last block, and the shared expert, have norms of their own: see ExpertNorms. `factors`: see
// Router.
void twostroke_add_expert_norms(void* model, const float** norms, const float* factors) {
  Block& b = ((Model*)model)->blocks.back();
  b.expert_norms = {norms[0], norms[1], norms[2], norms[3]}, b.router.factors = factors;
}

// Lets the last block's mixer read the inputs of the block's before it, which has no MLP. Before its other parts are added.
void twostroke_add_beside(void* model) {
  Model& m = *(Model*)model;
  m.blocks.back().beside = true;
}

// Lets the last block have a state in place of attention. Matrices: q, k, v, z, b, a, without b for
// Mamba-2; b, c, x of a short convolution.
void twostroke_add_state(void* model, void** matrices, const StateShape* shape) {
  Model& m = *(Model*)model;
  Block& b = m.blocks.back();
  b.qkv = first_product(b, matrices, shape->products()), b.state = *shape;
  m.zeros.resize(std::max(m.zeros.size(), size_t(std::max(shape->v_dim, PANEL))));
}

// Lets the last block have latent entries. Matrices: q, or the first of its two, the entry's, and the second or null; and
// for each head k_up and v_up.
void twostroke_add_latent(void* model, void** matrices, const LatentShape* shape) {
  Block& b = ((Model*)model)->blocks.back();
  auto part = [&](int i) { return Linear({(const Matrix*)matrices[i]}); };
  Latent made{*shape, {}, {}, {}, {}};
  if (matrices[2]) made.q_up.emplace(part(2));
  for (int head = 0; head < b.attention.heads; head++) {
    made.k_up.push_back(part(3 + 2 * head)), made.v_up.push_back(part(4 + 2 * head));
    made.v_kinds.add(((const Matrix*)matrices[4 + 2 * head])->format);
  }
  b.qkv = first_product(b, matrices, 2), b.latent.emplace(std::move(made));
}

// Lets the last block gate what attention makes. Matrices: q, k, v, gate.
void twostroke_add_gate(void* model, void** matrices) {
  Block& b = ((Model*)model)->blocks.back();
  b.qkv = first_product(b, matrices, 4), b.gated = true;
  b.qkv.by_heads(b.attention.dim, b.q_norm || b.k_norm);
}

// Runs all rows through every block, writing K and V to `kv`, which for each group of layers is [depth, 2, pages,
// kv_heads, ...]; `strides`: [groups, 3], of the first three dimensions in bytes. Result: [wanted, hidden]. Members may
// still read weights and `kv` when this, twostroke_logits or twostroke_search returns: call twostroke_settle before
// freeing either. Returns as twostroke_logits.
int twostroke_forward(void* model, const Batch* batch, uint8_t* kv, const int64_t* strides, float* result) {
  Model& m = *(Model*)model;
  const Turn turn(m.team->turn);
  if (!m.ranks) {
    run_pass(m, *batch, kv, strides, false).hand_out(result);
    return 0;
  }
  if (lost(m)) return int(lost(m));
  const Ranks::Pinned pinned(*m.ranks);
  Shelf shelf(*m.ranks);
  Order order{.kind = Order::FORWARD, .strides = strides, .batch = shelved(m, shelf, *batch)};
  shelf.put(order.strides, 3 * m.groups());
  for (const Ranks::Pool& pool : m.ranks->pools) {
    if (const int64_t at = kv - pool.data; pool.data && at >= 0 && at < int64_t(pool.bytes))
      order.pool = int(&pool - m.ranks->pools.data()), order.kv = at;
  }
  give(m, shelf, order);
  run_pass(m, order.batch, kv, strides, true).hand_out(result);
  const size_t queries = m.blocks.size() * batch->num_queries * m.config.q_width;
  if (queries) std::copy_n(order.batch.queries, queries, batch->queries);
  const size_t states = (m.blocks.size() + 1) * batch->num_states * m.config.hidden;
  if (batch->num_states) std::copy_n(order.batch.states, states, batch->states);
  return int(lost(m));
}

// Ranks: see ranks.h. `memory` of `bytes` is shared and zeroed; `cores` is a list of `num_cores`, which may be empty.
void* twostroke_ranks(uint8_t* memory, int64_t bytes, int rank, int size, double patience_s, const int32_t* cores,
                      int num_cores) {
  return new Ranks(memory, bytes - 2 * HUGE_PAGE, rank, size, patience_s, Cores({cores, size_t(num_cores)}));
}
void twostroke_ranks_free(void* ranks) { delete (Ranks*)ranks; }

// Lets a model compute with others. In all ranks the same models join in the same order.
void twostroke_join(void* model, void* ranks) {
  Ranks& with = *(Ranks*)ranks;
  ((Model*)model)->join(with);
  with.models.push_back(model);
}

// Where this process has the memory of a pool, or nowhere any more. In all ranks a pool has the same number. `strides`:
// [groups, 3], of layers, sides and pages, if this rank has its own heads alone, and `data` is where head 0 would be.
void twostroke_pool(void* ranks, int number, uint8_t* data, int64_t bytes, const int64_t* strides, int groups) {
  auto& pools = ((Ranks*)ranks)->pools;
  if (number >= int(pools.size())) pools.resize(number + 1);
  pools[number] = {data, size_t(bytes), std::vector<int64_t>(strides, strides + 3 * groups)};
}

// Ranks without common memory: see Ranks::part. `twin`: as much memory again, zeroed.
void twostroke_part(void* ranks, uint8_t* twin, Ranks::Exchange exchange, Ranks::Tell tell) {
  ((Ranks*)ranks)->part(twin, exchange, tell);
}
// Called by `exchange` with what each other rank has sent.
void twostroke_apply(void* ranks, const uint8_t* changes, int64_t bytes) {
  ((Ranks*)ranks)->mirror->apply(changes, size_t(bytes));
}
// By the others: follows what `tell` of rank 0 has sent. Returns as twostroke_logits.
int twostroke_obey(void* handle, const uint8_t* command, const uint8_t* data, int64_t bytes) {
  Ranks& ranks = *(Ranks*)handle;
  Order order;
  std::memcpy(&order, command, sizeof(order));
  uint8_t* const shelf = ranks.region(BATCH);
  std::memcpy(shelf, data, size_t(bytes));
  ranks.mirror->settle({shelf, size_t(bytes)});
  obey(ranks, order);
  return int(ranks.lost());
}

// By rank 0: lets the others return from twostroke_follow, as there is a message for them.
void twostroke_listen(void* ranks) { ((Ranks*)ranks)->give(Order{.kind = Order::LISTEN}); }

// By the others: follows orders until there is a message (0), or a rank is lost (see twostroke_logits).
int twostroke_follow(void* handle) {
  Ranks& ranks = *(Ranks*)handle;
  Order given;
  while (ranks.take(given)) {
    if (given.kind == Order::LISTEN) return 0;
    obey(ranks, given);
  }
  return int(ranks.lost());
}

// Marks a rank as lost, for all ranks.
void twostroke_lose(void* ranks, int rank) { ((Ranks*)ranks)->lose(1 + rank); }
// 0, or 1 + the rank that was lost first, or 1000 + one that was late.
int twostroke_lost(void* ranks) { return int(((Ranks*)ranks)->lost()); }
}
#pragma GCC visibility pop
