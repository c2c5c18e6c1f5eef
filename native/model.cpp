// A decoder's whole forward pass in one call, and its C interface. The Python side describes the model once.
#include <sys/mman.h>

#include <memory>

#include "attention.h"
#include "gemm.h"
#include "threads.h"

namespace {

struct Linear {
  std::vector<const Matrix*> parts;
  const float* bias = nullptr;
  int rows() const {
    int sum = 0;
    for (auto* part : parts) sum += part->rows;
    return sum;
  }
};

struct Block {
  const float *attn_norm, *mlp_norm, *q_norm, *k_norm, *attn_post_norm, *mlp_post_norm;
  Linear qkv, o, gate_up, down;
  int rope, window;
};

struct Buffer {
  std::vector<uint8_t> memory;
  template <class T>
  T* get(size_t count) {
    if (memory.size() < count * sizeof(T) + 64) memory.resize(count * sizeof(T) + 64);
    return (T*)((uintptr_t(memory.data()) + 63) / 64 * 64);
  }
};

void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
  __m512 sum = _mm512_setzero_ps();
  for (int i = 0; i < n; i += 16) {
    const __m512 v = _mm512_loadu_ps(x + i);
    sum = _mm512_fmadd_ps(v, v, sum);
  }
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(sum16(sum) / n + eps));
  for (int i = 0; i < n; i += 16)
    _mm512_storeu_ps(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(x + i), scale), _mm512_loadu_ps(weight + i)));
}

// Turn the pairs (i, i + dim / 2) of one head.
void rotate(float* head, const float* cos, const float* sin, int dim) {
  const int half = dim / 2;
  for (int i = 0; i < half; i += 16) {
    const __m512 a = _mm512_loadu_ps(head + i), b = _mm512_loadu_ps(head + half + i);
    const __m512 c = _mm512_loadu_ps(cos + i), s = _mm512_loadu_ps(sin + i);
    _mm512_storeu_ps(head + i, _mm512_fnmadd_ps(b, s, _mm512_mul_ps(a, c)));
    _mm512_storeu_ps(head + half + i, _mm512_fmadd_ps(a, s, _mm512_mul_ps(b, c)));
  }
}

}  // namespace

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
  const float *cos, *sin;         // [ropes, rows, dim / 2]
};

struct Model {
  Config config;
  const Matrix* embed;
  std::vector<Block> blocks;
  Team* team;
  // Shared between the members of the team, sized for the largest step so far.
  Buffer x, qkv, attended, gated, out, quantized;
  struct Private {
    Buffer norm, quantized, tile;
    Scratch scratch;
    std::vector<Query> queries;
  };
  std::vector<Private> own;
};

namespace {

constexpr int FEW_ROWS = 2;     // so few rows are prepared by every member for itself, which saves a barrier
constexpr int ROW_BLOCK = 64;   // rows whose activations stay in cache while panels go by
constexpr int UNIT = 4;         // panels a member takes at a time
constexpr int QUERY_ROWS = 16;  // rows of a chunk that share converted keys and values

// Quantized rows, each first normed if a norm is given; ready when this returns.
Rows prepare(Model& m, Model::Private& own, const float* x, int count, int cols, const float* norm) {
  auto row = [&](Rows rows, int i) {
    const float* source = x + size_t(i) * cols;
    if (norm) {
      float* normed = own.norm.get<float>(cols);
      rms_norm(source, norm, cols, m.config.eps, normed);
      source = normed;
    }
    quantize_row(source, rows.at(i));
  };
  if (count <= FEW_ROWS) {
    Rows rows = Rows::in(own.quantized.get<uint8_t>(Rows::bytes(count, cols)), count, cols);
    for (int i = 0; i < count; i++) row(rows, i);
    return rows;
  }
  Rows rows = Rows::in(m.quantized.get<uint8_t>(0), count, cols);
  m.team->share(count, [&](int i) { row(rows, i); });
  return rows;
}

// Every panel of every part times every row; emit(row, column, 16 sums) takes the results.
template <class Emit>
void linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, const Emit& emit) {
  const int units = (layer.rows() / PANEL + UNIT - 1) / UNIT;
  m.team->share(units, [&](int unit) {
    __m512* sums = own.tile.get<__m512>(ROW_BLOCK);
    for (int first = 0; first < count; first += ROW_BLOCK) {
      const int n = std::min(ROW_BLOCK, count - first);
      int column = 0, panel = 0;
      for (auto* part : layer.parts) {
        const int panels = part->rows / PANEL;
        for (int p = std::max(0, unit * UNIT - panel); p < std::min(panels, (unit + 1) * UNIT - panel); p++) {
          multiply(*part, p, rows.at(first), n, sums);
          for (int i = 0; i < n; i++) emit(first + i, column + p * PANEL, sums[i]);
        }
        panel += panels, column += part->rows;
      }
    }
  });
}

void store_linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, float* out, bool add) {
  const int width = layer.rows();
  linear(m, own, layer, rows, count, [&](int row, int column, __m512 sum) {
    float* place = out + size_t(row) * width + column;
    if (layer.bias) sum = _mm512_add_ps(sum, _mm512_loadu_ps(layer.bias + column));
    if (add) sum = _mm512_add_ps(sum, _mm512_loadu_ps(place));
    _mm512_storeu_ps(place, sum);
  });
}

void gated_linear(Model& m, Model::Private& own, const Linear& layer, Rows rows, int count, float* out) {
  const Matrix &gate = *layer.parts[0], &up = *layer.parts[1];
  m.team->share((gate.rows / PANEL + 1) / 2, [&](int unit) {
    __m512 *g = own.tile.get<__m512>(2 * ROW_BLOCK), *u = g + ROW_BLOCK;
    for (int first = 0; first < count; first += ROW_BLOCK) {
      const int n = std::min(ROW_BLOCK, count - first);
      for (int p = 2 * unit; p < std::min(gate.rows / PANEL, 2 * unit + 2); p++) {
        multiply(gate, p, rows.at(first), n, g);
        multiply(up, p, rows.at(first), n, u);
        for (int i = 0; i < n; i++)
          _mm512_storeu_ps(out + size_t(first + i) * gate.rows + p * PANEL,
                           _mm512_mul_ps(m.config.gelu ? gelu16(g[i]) : silu16(g[i]), u[i]));
      }
    }
  });
}

void rope_and_store(Model& m, const Block& b, const Batch& batch, Layer kv, float* qkv) {
  const Config& c = m.config;
  const int width = (c.heads + 2 * c.kv_heads) * c.dim;
  m.team->share(batch.num_rows, [&](int row) {
    float* heads = qkv + size_t(row) * width;
    const size_t angles = (size_t(b.rope) * batch.num_rows + row) * (c.dim / 2);
    for (int h = 0; h < c.heads + c.kv_heads; h++) {
      float* head = heads + h * c.dim;
      if (b.q_norm) rms_norm(head, h < c.heads ? b.q_norm : b.k_norm, c.dim, c.eps, head);
      rotate(head, batch.cos + angles, batch.sin + angles, c.dim);
    }
    const __m512 scale = _mm512_set1_ps(c.attention_scale);
    for (int i = 0; i < c.heads * c.dim; i += 16) _mm512_storeu_ps(heads + i, _mm512_mul_ps(_mm512_loadu_ps(heads + i), scale));
    for (int side = 0; side < 2; side++)
      for (int h = 0; h < c.kv_heads; h++) {
        const float* source = heads + (c.heads + side * c.kv_heads + h) * c.dim;
        uint16_t* place = kv.page(side, batch.pages[row], h) + batch.slots[row] * c.dim;
        for (int d = 0; d < c.dim; d += 16) store_half(place + d, _mm512_loadu_ps(source + d));
      }
  });
}

struct Piece {
  int sequence, first, count;  // rows
};

void attention(Model& m, Model::Private& own, const Block& b, const Batch& batch, const std::vector<Piece>& pieces,
               Layer kv, const float* qkv, float* out) {
  const Config& c = m.config;
  const int width = (c.heads + 2 * c.kv_heads) * c.dim, repeat = c.heads / c.kv_heads;
  m.team->share(int(pieces.size()) * c.kv_heads, [&](int unit) {
    const Piece& piece = pieces[unit / c.kv_heads];
    const int head = unit % c.kv_heads, s = piece.sequence;
    const Span* spans = batch.spans + batch.span_starts[s];
    const int num_spans = batch.span_starts[s + 1] - batch.span_starts[s];
    int entries = 0;
    for (int i = 0; i < num_spans; i++) entries += spans[i].stop - spans[i].start;
    own.queries.clear();
    for (int row = piece.first; row < piece.first + piece.count; row++)
      for (int r = 0; r < repeat; r++) {
        const size_t at = size_t(head * repeat + r) * c.dim;
        own.queries.push_back({qkv + size_t(row) * width + at, out + size_t(row) * c.heads * c.dim + at,
                               entries - (batch.row_starts[s + 1] - row), int(batch.positions[row])});
      }
    attend(kv, head, spans, num_spans, b.window, own.queries.data(), int(own.queries.size()), own.scratch);
  });
}

void post_norm_add(Model& m, const float* norm, int count, float* out, float* x) {
  const int n = m.config.hidden;
  m.team->share(count, [&](int row) {
    float *y = out + size_t(row) * n, *place = x + size_t(row) * n;
    rms_norm(y, norm, n, m.config.eps, y);
    for (int i = 0; i < n; i += 16) _mm512_storeu_ps(place + i, _mm512_add_ps(_mm512_loadu_ps(place + i), _mm512_loadu_ps(y + i)));
  });
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

void* twostroke_team(int size) { return new Team(size); }
void twostroke_team_free(void* team) { delete (Team*)team; }

// A matrix of `rows` raw rows that lie row_bytes apart; null without memory.
void* twostroke_pack(void* team, int format, int rows, int cols, const uint8_t* raw, int64_t row_bytes) {
  auto matrix = std::make_unique<Matrix>();
  const Layout& l = LAYOUTS[format];
  *matrix = {Format(format), rows, cols, block_bytes(l) * (cols / l.block), nullptr};
  // Huge pages: a core that streams weights would otherwise look up an address every 4 KiB.
  constexpr size_t HUGE_PAGE = 2 << 20;
  const size_t align = matrix->bytes() < 4 * HUGE_PAGE ? 64 : HUGE_PAGE;  // small ones would waste most of a page
  const size_t size = (matrix->bytes() + align - 1) / align * align;
  matrix->data = (uint8_t*)std::aligned_alloc(align, size);
  if (!matrix->data) return nullptr;
  if (align == HUGE_PAGE) madvise(matrix->data, size, MADV_HUGEPAGE);
  Matrix& packed = *matrix;
  Team& members = *(Team*)team;
  members.run([&](int) {
    members.share(rows / PANEL, [&](int p) {
      pack_panel(packed, raw + size_t(p) * PANEL * row_bytes, row_bytes, packed.data + p * packed.panel_bytes);
    });
  });
  return matrix.release();
}

void twostroke_matrix_free(void* matrix) {
  std::free(((Matrix*)matrix)->data);
  delete (Matrix*)matrix;
}

int64_t twostroke_matrix_bytes(void* matrix) { return ((Matrix*)matrix)->bytes(); }

void twostroke_unpack(void* matrix, int row, float* out) { unpack_row(*(Matrix*)matrix, row, out); }

// [count, cols] float32 times the matrix: [count, rows].
void twostroke_multiply(void* team, void* matrix, const float* x, int count, float* out) {
  const Matrix& w = *(Matrix*)matrix;
  Buffer memory;
  Rows rows = Rows::in(memory.get<uint8_t>(Rows::bytes(count, w.cols)), count, w.cols);
  Team& members = *(Team*)team;
  members.run([&](int) {
    members.share(count, [&](int i) { quantize_row(x + size_t(i) * w.cols, rows.at(i)); });
    members.share(w.rows / PANEL, [&](int p) {
      std::vector<float> sums(size_t(count) * PANEL + 16);
      __m512* tile = (__m512*)((uintptr_t(sums.data()) + 63) / 64 * 64);
      multiply(w, p, rows, count, tile);
      for (int i = 0; i < count; i++) _mm512_storeu_ps(out + size_t(i) * w.rows + p * PANEL, tile[i]);
    });
  });
}

void* twostroke_model(void* team, const Config* config, void* embed) {
  auto* m = new Model{*config, (const Matrix*)embed, {}, (Team*)team, {}, {}, {}, {}, {}, {}, {}};
  m->own.resize(m->team->size());
  return m;
}

void twostroke_model_free(void* model) { delete (Model*)model; }

// Norms: attention, MLP, q, k, after attention, after MLP; null where there is none. Matrices: q, k, v, o, gate, up, down.
void twostroke_add_block(void* model, const float** norms, void** matrices, const float* bias, int rope, int window) {
  auto part = [&](int i) { return (const Matrix*)matrices[i]; };
  ((Model*)model)->blocks.push_back({norms[0], norms[1], norms[2], norms[3], norms[4], norms[5],
                                     {{part(0), part(1), part(2)}, bias}, {{part(3)}}, {{part(4), part(5)}}, {{part(6)}},
                                     rope, window});
}

// Run all rows through every block, writing K and V to kv [blocks, 2, pages, kv_heads, 16, dim]; hidden: [rows, hidden].
void twostroke_forward(void* model, const Batch* batch_, uint16_t* kv, int64_t pages, float* hidden) {
  Model& m = *(Model*)model;
  const Config& c = m.config;
  const Batch& batch = *batch_;
  const int n = batch.num_rows, q_size = c.heads * c.dim, qkv_size = q_size + 2 * c.kv_heads * c.dim;
  float* qkv = m.qkv.get<float>(size_t(n) * qkv_size);
  float* attended = m.attended.get<float>(size_t(n) * q_size);
  float* gated = m.gated.get<float>(size_t(n) * c.intermediate);
  float* out = m.out.get<float>(size_t(n) * c.hidden);
  m.quantized.get<uint8_t>(Rows::bytes(n, std::max({c.hidden, c.intermediate, q_size})));
  std::vector<Piece> pieces;
  for (int s = 0; s < batch.num_sequences; s++)
    for (int row = batch.row_starts[s]; row < batch.row_starts[s + 1]; row += QUERY_ROWS)
      pieces.push_back({s, row, std::min(QUERY_ROWS, batch.row_starts[s + 1] - row)});
  m.team->run([&](int member) {
    Model::Private& own = m.own[member];
    m.team->share(n, [&](int row) {
      float* x = hidden + size_t(row) * c.hidden;
      unpack_row(*m.embed, int(batch.tokens[row]), x);
      if (c.embedding_scale != 1.0f)
        for (int i = 0; i < c.hidden; i++) x[i] *= c.embedding_scale;
    });
    for (size_t i = 0; i < m.blocks.size(); i++) {
      const Block& b = m.blocks[i];
      const Layer layer{kv + i * 2 * pages * c.kv_heads * PAGE_SIZE * c.dim, pages, c.kv_heads, c.dim};
      store_linear(m, own, b.qkv, prepare(m, own, hidden, n, c.hidden, b.attn_norm), n, qkv, false);
      rope_and_store(m, b, batch, layer, qkv);
      attention(m, own, b, batch, pieces, layer, qkv, attended);
      Rows rows = prepare(m, own, attended, n, q_size, nullptr);
      store_linear(m, own, b.o, rows, n, b.attn_post_norm ? out : hidden, !b.attn_post_norm);
      if (b.attn_post_norm) post_norm_add(m, b.attn_post_norm, n, out, hidden);
      gated_linear(m, own, b.gate_up, prepare(m, own, hidden, n, c.hidden, b.mlp_norm), n, gated);
      rows = prepare(m, own, gated, n, c.intermediate, nullptr);
      store_linear(m, own, b.down, rows, n, b.mlp_post_norm ? out : hidden, !b.mlp_post_norm);
      if (b.mlp_post_norm) post_norm_add(m, b.mlp_post_norm, n, out, hidden);
    }
  });
}

// Last norm and head: [count, hidden] to [count, vocabulary].
void twostroke_logits(void* model, const float* norm, void* head, const float* hidden, int count, float* logits) {
  Model& m = *(Model*)model;
  const Linear layer{{(const Matrix*)head}};
  m.quantized.get<uint8_t>(Rows::bytes(count, m.config.hidden));
  m.team->run([&](int member) {
    Model::Private& own = m.own[member];
    store_linear(m, own, layer, prepare(m, own, hidden, count, m.config.hidden, norm), count, logits, false);
  });
}
}
#pragma GCC visibility pop
