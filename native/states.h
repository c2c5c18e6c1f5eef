// Layers with a state (models/recurrent.py), for the rows of a pass. A member computes a head of keys of one sequence, with
// heads of values that share it, in chunks. Every sum has an order of its own: over numbers of keys, and over rows from
// the chunk's first on. So bits do not depend on how many rows came at once.
#pragma once
#include "layers.h"
#include "pass.h"

constexpr int STATE_CHUNK = 64;  // positions between two snapshots
constexpr int MAX_CONV = 256;  // most inputs that a convolution sees
constexpr int CHANNELS = 64;  // of a short convolution, that a member computes together

inline F exp16(F x) { return power16(mul(x, set1(LOG2_E))); }
inline float exp_of(float x) { return first_lane(exp16(set1(x))); }

// The layer's part of a snapshot: rows of numbers in pages.
struct Snapshot {
  float* base;  // of frame 0
  const int32_t* pages;  // the layer's frames; null for zeros
  size_t page_floats;
  int row_floats, rows_in_page;
  float* row(int i) const { return base + pages[i / rows_in_page] * page_floats + size_t(i % rows_in_page) * row_floats; }
  float* number(size_t i) const { return row(int(i / row_floats)) + i % row_floats; }
};

// out[r] = start[r] plus the sum of x[r][j] times row j, over j in order, in columns from `column` on; without `start`, 0.
template <int R, int V>
inline void sum_tile(const float* const* rows, int count, const float* const* x, int column, const float* const* start,
                     float* const* out) {
  F sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = start ? load(start[r] + column + 16 * v) : zero();
  for (int j = 0; j < count; j++) {
    F row[V];
    for (int v = 0; v < V; v++) row[v] = load(rows[j] + column + 16 * v);
    for (int r = 0; r < R; r++) {
      const F factor = set1(x[r][j]);
      for (int v = 0; v < V; v++) sums[r][v] = fma(factor, row[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out[r] + column + 16 * v, sums[r][v]);
}
template <int R>
inline void sum_rows(const float* const* rows, int count, const float* const* x, int width, const float* const* start,
                     float* const* out) {
  constexpr int V = std::clamp(TILE_SUMS / R, 1, 8);
  int column = 0;
  for (; column + 16 * V <= width; column += 16 * V) sum_tile<R, V>(rows, count, x, column, start, out);
  for (; column < width; column += 16) sum_tile<R, 1>(rows, count, x, column, start, out);
}
// The same for `many` sums, whose columns are `width`.
inline void weighted_sums(const float* const* rows, int count, const float* const* x, int many, int width,
                          const float* const* start, float* const* out) {
  auto from = [&](int r) { return start ? start + r : nullptr; };
  int r = 0;
  for (; r + 4 <= many; r += 4) sum_rows<4>(rows, count, x + r, width, from(r), out + r);
  for (; r + 2 <= many; r += 2) sum_rows<2>(rows, count, x + r, width, from(r), out + r);
  for (; r < many; r++) sum_rows<1>(rows, count, x + r, width, from(r), out + r);
}

// What a member needs for a head of keys, in one piece of memory.
struct StateWork {
  float *keys, *queries;  // [STATE_CHUNK, k_dim], of the chunk's rows
  float* out;  // [v_dim], of a row
  float *seen, *asked;  // [STATE_CHUNK, v_dim]: the state times k and q of the new rows
  float *keyed, *scores;  // [STATE_CHUNK, STATE_CHUNK]: keys times keys and times queries of the new rows
  float *sums, *shares;  // [STATE_CHUNK]: sums of log decays; factors
  float* weighted;  // [k_dim, STATE_CHUNK]: keys by their decay to the chunk's end
  float* state;  // [heads of v of the head, k_dim, v_dim]
  float* before;  // [heads of v of the head, STATE_CHUNK]: sums of log decays of the open chunk
  float* open_written;  // [heads of v of the head, STATE_CHUNK, v_dim]
  static size_t size(const StateShape& c) {
    const size_t group = c.together();
    return size_t(STATE_CHUNK) * (3 * c.k_dim + 2 * c.v_dim + 2 * STATE_CHUNK + 2) + c.v_dim +
           group * (size_t(c.k_dim) * c.v_dim + STATE_CHUNK * (1 + c.v_dim));
  }
  static StateWork in(float* at, const StateShape& c) {
    StateWork w;
    const size_t group = c.together();
    auto take = [&](float*& place, size_t count) { place = at, at += count; };
    take(w.keys, STATE_CHUNK * c.k_dim), take(w.queries, STATE_CHUNK * c.k_dim), take(w.weighted, STATE_CHUNK * c.k_dim);
    take(w.out, c.v_dim);
    take(w.seen, STATE_CHUNK * c.v_dim), take(w.asked, STATE_CHUNK * c.v_dim);
    take(w.keyed, STATE_CHUNK * STATE_CHUNK), take(w.scores, STATE_CHUNK * STATE_CHUNK), take(w.sums, STATE_CHUNK),
        take(w.shares, STATE_CHUNK);
    take(w.state, group * c.k_dim * c.v_dim), take(w.before, group * STATE_CHUNK),
        take(w.open_written, group * STATE_CHUNK * c.v_dim);
    return w;
  }
};

// A layer with a state in a pass.
struct StateRun {
  Model& m;
  const Block& block;
  const StateShape& c;
  const Pass& pass;
  const Batch& batch;
  PassMemory::Places at;

  // Heads of v that a member computes together, which share a head of k: the g-th is number `first + g` of that head's.
  struct Part {
    int key, first, count;
    int v_head(const StateShape& c, int g) const { return c.v_head(key, first + g); }
  };
  bool corrects() const { return c.kind == GATED_DELTA_NET; }  // whether u depends on what the state has for its key

  // Where the entries before the step lie: the last `count` of them, oldest first.
  void last_entries(int sequence, int group, int place, int count, int size, const uint16_t** out) const {
    const Span* spans = spans_of(batch, group);
    int span = batch.span_starts[sequence + 1] - 1, skip = batch.row_starts[sequence + 1] - batch.row_starts[sequence];
    for (int i = count - 1; i >= 0; span--) {
      const int held = spans[span].stop - spans[span].start, mine = held - skip;
      skip = std::max(0, -mine);
      for (int j = mine - 1; j >= 0 && i >= 0; j--, i--)
        out[i] = pass.entry(group, place, spans[span].page, spans[span].start + j, size);
    }
  }

  Snapshot source(int sequence) const { return snapshot(batch.state_sources + size_t(sequence) * batch.state_pages); }
  Snapshot snapshot(const int32_t* pages) const {
    return {pass.state_base(), pages[0] < 0 ? nullptr : pages + c.first_page, pass.page_floats(), c.snapshot_row,
            c.rows_in_page};
  }

  // Inputs of the convolution of a sequence, by their distance from the step's first: rows of this step, then entries in
  // pages, then what the snapshot has of older ones.
  struct Inputs {
    const StateRun& run;
    int first, old;
    const uint16_t* known[MAX_CONV];
    Snapshot from;

    Inputs(const StateRun& run, int sequence)
        : run(run), first(run.batch.row_starts[sequence]),
          old(std::min(run.c.conv_width - 1, int(run.batch.state_counts[sequence]))), from(run.source(sequence)) {
      run.last_entries(sequence, run.c.inputs_group, run.c.inputs_place, old, run.c.conv_size(), known);
    }
    F at(int row, int column) const {
      const StateShape& c = run.c;
      if (row >= 0) return load_bf16(run.at.state_inputs + size_t(first + row) * c.conv_size() + column);
      if (old + row >= 0) return load_bf16(known[old + row] + column);
      if (!from.pages) return zero();
      return load(from.number(c.state_size() + size_t(c.conv_width - 1 + old + row) * c.conv_size() + column));
    }
  };

  // 16 columns from `column` on of the convolution of a new row.
  F convolved(const Inputs& inputs, int row, int column) const {
    const int width = c.conv_width;
    const uint16_t* first = at.state_inputs + size_t(inputs.first + row - width + 1) * c.conv_size() + column;
    const bool here = row >= width - 1;  // whether this step has all of them
    F made = c.conv_bias ? load(c.conv_bias + column) : zero();
    for (int i = 0; i < width; i++) {
      const F x = here ? load_bf16(first + size_t(i) * c.conv_size()) : inputs.at(row - width + 1 + i, column);
      made = fma(x, load(c.conv + size_t(i) * c.conv_size() + column), made);
    }
    return made;
  }
  void convolve(const Inputs& inputs, int row, int column, int size, float* out) const {
    for (int d = 0; d < size; d += 16) store(out + d, silu16(convolved(inputs, row, column + d)));
  }

  // Channels of a short convolution of a sequence: its products b x, and c times what it makes of them.
  void run_channels(int sequence, int first_column, int last_column) const {
    const int first = batch.row_starts[sequence], count = batch.row_starts[sequence + 1] - first, size = c.conv_size();
    const Inputs inputs(*this, sequence);
    auto made = [&](int row, int which, int d) {
      return load(at.projected + size_t(first + row) * block.qkv.width + which * size + d);
    };
    for (int row = 0; row < count; row++)
      for (int d = first_column; d < last_column; d += 16)
        store_bf16(at.state_inputs + size_t(first + row) * size + d, mul(made(row, 0, d), made(row, 2, d)));
    for (int row = 0; row < count; row++)
      for (int d = first_column; d < last_column; d += 16)
        store(at.mixed + size_t(first + row) * size + d, mul(made(row, 1, d), convolved(inputs, row, d)));
  }

  static void normalize(float* x, int size, float factor) {
    F squares = zero();
    for (int i = 0; i < size; i += 16) squares = fma(load(x + i), load(x + i), squares);
    const F scale = set1(factor / std::sqrt(sum(squares) + 1e-6f));
    for (int i = 0; i < size; i += 16) store(x + i, mul(load(x + i), scale));
  }
  static void round_to_bf16(float* x, int size) {
    uint16_t halves[16];
    for (int i = 0; i < size; i += 16) store_bf16(halves, load(x + i)), store(x + i, load_bf16(halves));
  }

  // A head of keys of a sequence.
  void run(int sequence, const Part& part, Model::Private& own) const {
    const int first = batch.row_starts[sequence], count = batch.row_starts[sequence + 1] - first;
    const StateWork w = StateWork::in(own.states.get<float>(StateWork::size(c)), c);
    const Snapshot from = source(sequence);
    std::vector<const float*>& rows = own.state_rows;
    rows.resize(size_t(part.count) * c.k_dim);
    for (int g = 0; g < part.count; g++)
      for (int j = 0; j < c.k_dim; j++)
        rows[g * c.k_dim + j] = from.pages ? from.row(part.v_head(c, g) * c.k_dim + j) : m.zeros.data();
    int open = batch.state_counts[sequence];
    load_open(sequence, part, open, w);
    const Inputs inputs(*this, sequence);
    int target = batch.target_starts[sequence];
    for (int start = 0; start < count;) {
      const int64_t position = batch.positions[first + start];
      const int some = std::min(count - start, STATE_CHUNK - int(position % STATE_CHUNK));
      chunk(inputs, part, start, some, open, w, rows.data());
      open += some, start += some;
      if ((position + some) % STATE_CHUNK) continue;
      close(open, part, w, rows.data());
      open = 0;
      if (target < batch.target_starts[sequence + 1] && batch.target_rows[target] == start) keep(target++, part, w);
    }
  }

  // The rows of the open chunk, from their pages.
  void load_open(int sequence, const Part& part, int open, const StateWork& w) const {
    const uint16_t* known[STATE_CHUNK];
    last_entries(sequence, c.rows_group, c.rows_place, open, c.row_size(), known);
    for (int i = 0; i < open; i++) {
      for (int d = 0; d < c.k_dim; d += 16) store(w.keys + i * c.k_dim + d, load_bf16(known[i] + part.key * c.k_dim + d));
      const float* sums = (const float*)(known[i] + c.k_size() + c.v_size());
      for (int g = 0; g < part.count; g++) {
        const int own = part.v_head(c, g);
        std::memcpy(w.before + g * STATE_CHUNK + i, sums + own, 4);
        const uint16_t* u = known[i] + c.k_size() + own * c.v_dim;
        for (int d = 0; d < c.v_dim; d += 16)
          store(w.open_written + (size_t(g) * STATE_CHUNK + i) * c.v_dim + d, load_bf16(u + d));
      }
    }
  }

  // New rows [start, start + some) of a sequence, behind `open` rows of their chunk.
  void chunk(const Inputs& inputs, const Part& part, int start, int some, int open, const StateWork& w,
             const float* const* rows) const {
    for (int i = 0; i < some; i++) {
      float *q = w.queries + i * c.k_dim, *k = w.keys + (open + i) * c.k_dim;
      convolve(inputs, start + i, part.key * c.k_dim, c.k_dim, q);
      convolve(inputs, start + i, c.k_size() + part.key * c.k_dim, c.k_dim, k);
      if (corrects()) normalize(q, c.k_dim, 1.0f / std::sqrt(float(c.k_dim))), normalize(k, c.k_dim, 1.0f);
      round_to_bf16(k, c.k_dim);
      uint16_t* out = at.new_rows + size_t(inputs.first + start + i) * c.row_size() + part.key * c.k_dim;
      for (int d = 0; d < c.k_dim && part.first == 0; d += 16) store_bf16(out + d, load(k + d));
    }
    corrects() ? multiply_keys<true>(some, open, w) : multiply_keys<false>(some, open, w);
    const float* x[2 * STATE_CHUNK];
    float* products[2 * STATE_CHUNK];
    int many = 0;
    for (int i = 0; i < some; i++) {
      if (corrects()) x[many] = w.keys + (open + i) * c.k_dim, products[many++] = w.seen + i * c.v_dim;
      x[many] = w.queries + i * c.k_dim, products[many++] = w.asked + i * c.v_dim;
    }
    for (int g = 0; g < part.count; g++) {
      weighted_sums(rows + g * c.k_dim, c.k_dim, x, many, c.v_dim, nullptr, products);
      for (int i = 0; i < some; i++) advance(inputs, part.v_head(c, g), g, start + i, i, open + i, w);
    }
  }

  // Products of the new rows' queries, and of keys if those are wanted, with all keys up to their own.
  template <bool Keys>
  void multiply_keys(int some, int open, const StateWork& w) const {
    for (int i = 0; i < some; i++) {
      const float *k = w.keys + (open + i) * c.k_dim, *q = w.queries + i * c.k_dim;
      for (int s = 0; s <= open + i; s += 16) {
        F with_key[16], with_query[16];
        for (int j = 0; j < 16; j++) {
          const float* other = w.keys + std::min(s + j, open + i) * c.k_dim;
          with_key[j] = with_query[j] = zero();
          for (int d = 0; d < c.k_dim; d += 16) {
            const F x = load(other + d);
            if constexpr (Keys) with_key[j] = fma(x, load(k + d), with_key[j]);
            with_query[j] = fma(x, load(q + d), with_query[j]);
          }
        }
        if constexpr (Keys) store(w.keyed + i * STATE_CHUNK + s, sums(with_key));
        store(w.scores + i * STATE_CHUNK + s, sums(with_query));
      }
    }
  }

  // u and the output of a row of a head of values: row `i` of the new ones, `place` of the chunk.
  void advance(const Inputs& inputs, int head, int g, int row, int i, int place, const StateWork& w) const {
    const int at_row = inputs.first + row;
    const float* made = at.projected + size_t(at_row) * block.qkv.width;
    const float* z = made + c.z_column() + head * c.v_dim;
    const double x = double(made[c.a_column() + head]) + c.dt_bias[head];
    const double softplus = x > 30 ? x : std::log1p(std::exp(x));
    float* sums = w.before + g * STATE_CHUNK;
    sums[place] = (place ? sums[place - 1] : 0.0f) + float(-double(c.decay[head]) * softplus);
    const float whole = exp_of(sums[place]);
    for (int s = 0; s <= place; s += 16) store(w.shares + s, exp16(min(sub(set1(sums[place]), load(sums + s)), zero())));
    float* u = w.open_written + (size_t(g) * STATE_CHUNK + place) * c.v_dim;
    convolve(inputs, row, 2 * c.k_size() + head * c.v_dim, c.v_dim, u);  // v
    const float* chunk_rows[STATE_CHUNK];
    for (int s = 0; s <= place; s++) chunk_rows[s] = w.open_written + (size_t(g) * STATE_CHUNK + s) * c.v_dim;
    for (int d = 0; d < c.v_dim; d += 16) store(w.out + d, mul(set1(whole), load(w.asked + i * c.v_dim + d)));
    auto sum_up = [&](const float* products, float strength, int count, float* sum) {
      float factors[STATE_CHUNK];
      const float* all = factors;
      for (int s = 0; s < count; s++) factors[s] = strength * w.shares[s] * products[s];
      weighted_sums(chunk_rows, count, &all, 1, c.v_dim, &sum, &sum);
    };
    if (corrects()) {
      const float strength = float(1.0 / (1.0 + std::exp(-double(made[c.b_column() + head]))));
      for (int d = 0; d < c.v_dim; d += 16)
        store(u + d, mul(set1(strength), fnma(set1(whole), load(w.seen + i * c.v_dim + d), load(u + d))));
      sum_up(w.keyed + i * STATE_CHUNK, -strength, place, u);
    } else {
      for (int d = 0; d < c.v_dim; d += 16) {
        const F v = load(u + d);
        store(w.out + d, fma(set1(c.skip[head]), v, load(w.out + d))), store(u + d, mul(set1(float(softplus)), v));
      }
    }
    round_to_bf16(u, c.v_dim);
    sum_up(w.scores + i * STATE_CHUNK, 1.0f, place + 1, w.out);
    if (corrects()) rms_norm(w.out, c.norm, c.v_dim, m.config.eps, w.out);
    // Only what is final: a piece may be computed twice, and another member may read it meanwhile.
    float* out = at.mixed + size_t(at_row) * c.v_size() + head * c.v_dim;
    for (int d = 0; d < c.v_dim; d += 16) store(out + d, mul(load(w.out + d), silu16(load(z + d))));
    uint16_t* row_out = at.new_rows + size_t(at_row) * c.row_size() + c.k_size();
    for (int d = 0; d < c.v_dim; d += 16) store_bf16(row_out + head * c.v_dim + d, load(u + d));
    std::memcpy(row_out + c.v_size() + 2 * head, sums + place, 4);
  }

  // The state at the end of a chunk of `count` rows, which takes the place of the one before.
  void close(int count, const Part& part, const StateWork& w, const float** rows) const {
    constexpr int TOGETHER = 4;
    const float* chunk_rows[STATE_CHUNK];
    for (int g = 0; g < part.count; g++) {
      const float *sums = w.before + g * STATE_CHUNK, last = sums[count - 1], whole = exp_of(last);
      for (int s = 0; s < count; s++) {
        const float share = exp_of(last - sums[s]);
        for (int j = 0; j < c.k_dim; j++) w.weighted[j * STATE_CHUNK + s] = share * w.keys[s * c.k_dim + j];
        chunk_rows[s] = w.open_written + (size_t(g) * STATE_CHUNK + s) * c.v_dim;
      }
      float* state = w.state + size_t(g) * c.k_dim * c.v_dim;
      for (int j = 0; j < c.k_dim; j += TOGETHER) {
        const float* x[TOGETHER];
        float* out[TOGETHER];
        for (int r = 0; r < TOGETHER; r++) {
          const float* before = rows[g * c.k_dim + j + r];
          x[r] = w.weighted + (j + r) * STATE_CHUNK, out[r] = state + (j + r) * c.v_dim;
          for (int d = 0; d < c.v_dim; d += 16) store(out[r] + d, mul(set1(whole), load(before + d)));
          rows[g * c.k_dim + j + r] = out[r];
        }
        weighted_sums(chunk_rows, count, x, TOGETHER, c.v_dim, out, out);
      }
    }
  }
  // Keeps the state of a head for a snapshot, until pages may be written.
  void keep(int target, const Part& part, const StateWork& w) const {
    const size_t size = size_t(c.k_dim) * c.v_dim;
    for (int g = 0; g < part.count; g++)
      std::copy_n(w.state + g * size, size, at.new_states + target * c.state_size() + part.v_head(c, g) * size);
  }
};

// Copies new entries and states to pages, which all ranks have. A late member must not do this: pages may have another
// owner after the pass.
inline void store_states(Model& m, Model::Private& own, const StateRun& run) {
  const Batch& batch = run.batch;
  const StateShape& c = run.c;
  const int rows = batch.num_rows, targets = batch.target_starts[batch.num_sequences];
  m.share_once(rows + targets, own, [&](int i) {
    if (i < rows) {
      auto put = [&](int group, int place, const uint16_t* from, int size) {
        const int64_t page = batch.pages[size_t(group) * rows + i];
        if (page >= 0)
          std::copy_n(from + size_t(i) * size, size, run.pass.entry(group, place, page, int(batch.slots[i]), size));
      };
      if (c.row_size()) put(c.rows_group, c.rows_place, run.at.new_rows, c.row_size());
      return put(c.inputs_group, c.inputs_place, run.at.state_inputs, c.conv_size());
    }
    const int target = i - rows, sequence = batch.target_sequences[target], count = batch.target_rows[target];
    const Snapshot to = run.snapshot(batch.target_pages + size_t(target) * batch.state_pages);
    const float* state = run.at.new_states + target * c.state_size();
    for (int row = 0; row < c.v_heads * c.k_dim; row++) std::copy_n(state + size_t(row) * c.v_dim, c.v_dim, to.row(row));
    const StateRun::Inputs inputs(run, sequence);
    const int last = c.conv_width - 1;
    for (int j = 0; j < last; j++)
      for (int d = 0; d < c.conv_size(); d += 16)
        store(to.number(c.state_size() + size_t(j) * c.conv_size() + d), inputs.at(count - last + j, d));
  });
}

// A layer with a state, up to its output projection, whose packed inputs are stored in `out`: those of `kept` rows.
inline void run_states(Model& m, Model::Private& own, const Pass& pass, const Block& b, const Normed& from,
                       const PassMemory::Places& at, std::span<const int64_t> kept, Rows out) {
  const StateShape& c = *b.state;
  const StateRun run{m, b, c, pass, pass.batch, at};
  const float* scales = scales_of(m, own, from);
  linear(m, own, b.qkv, from.rows, from.rows.count, [&](const Job* jobs, int n, int first, int block, const F* sums) {
    for (int r = 0; r < block; r++)
      for (int i = 0; i < n; i++) {
        const int row = first + r, column = jobs[i].column;
        const F x = mul(sums[i * ROW_BLOCK + r], set1(scales[row]));
        if (c.kind != SHORT_CONVOLUTION && column < c.conv_size())
          store_bf16(at.state_inputs + size_t(row) * c.conv_size() + column, x);
        else
          store(at.projected + size_t(row) * b.qkv.width + column, x);
      }
  }, [] {});
  m.meet(own);
  const int parts = c.v_heads / (c.k_heads * c.together());  // of a head of k
  const int units = c.kind == SHORT_CONVOLUTION ? ceil_div(c.conv_size(), CHANNELS) : c.k_heads * parts;  // of a sequence
  m.spread(pass.batch.num_sequences * units, own, [&](int unit) {
    const int sequence = unit / units, part = unit % units;
    if (c.kind == SHORT_CONVOLUTION)
      return run.run_channels(sequence, part * CHANNELS, std::min((part + 1) * CHANNELS, c.conv_size()));
    run.run(sequence, {part / parts, part % parts * c.together(), c.together()}, own);
  });
  store_states(m, own, run);
  m.share(int(kept.size()), own, [&](int i) {
    const float* mixed = at.mixed + size_t(kept[i]) * c.v_size();
    if (c.kind == MAMBA2) {
      const int size = c.v_size() / c.k_heads;
      float* normed = own.row.get<float>(c.v_size());
      for (int group = 0; group < c.v_size(); group += size)
        rms_norm(mixed + group, c.norm + group, size, m.config.eps, normed + group);
      mixed = normed;
    }
    prepare_row(mixed, b.o, out, i);
  });
}
