// Layers with a state (models/recurrent.py), for the rows of a pass. A member computes a head of keys of one sequence, with
// heads of values that share it, in chunks. Every sum has an order of its own: over numbers of keys, and over rows from
// the chunk's first on. So bits do not depend on how many rows came at once.
#pragma once
#include "layers.h"
#include "pass.h"

constexpr int STATE_CHUNK = 64;  // positions between two snapshots
constexpr int MAX_CONV = 256;  // most inputs that a convolution sees
constexpr int FEW_STATE_ROWS = 4;  // new rows that read others in their pages
constexpr int ROWS_AHEAD = 16;  // of a state, that are fetched before they are read
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
  // The rows from `first` on, without a division for each.
  void rows(int first, int count, const float** out) const {
    for (int page = first / rows_in_page, at = first % rows_in_page; count > 0; page++, at = 0) {
      const float* place = base + pages[page] * page_floats + size_t(at) * row_floats;
      const int some = std::min(count, rows_in_page - at);
      for (int i = 0; i < some; i++, place += row_floats) *out++ = place;
      count -= some;
    }
  }
};

inline F load_number(const float* from) { return load(from); }
inline F load_number(const uint16_t* from) { return load_bf16(from); }

// Sums of rows times factors: of the r-th sum, x[r][j * step] for row j.
struct Factors {
  const float* const* x;
  int step = 1;
  Factors from(int r) const { return {x + r, step}; }
};
// out[r] = start[r] plus the sum of factors times rows, over rows in order, in columns from `column` on; without `start`,
// 0.
template <int R, int V, class Number, class Ahead>
inline void sum_tile(const Number* const* rows, int count, Factors factors, int column, const float* const* start,
                     float* const* out, const Ahead& ahead) {
  F sums[R][V];
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) sums[r][v] = start ? load(start[r] + column + 16 * v) : zero();
  for (int j = 0; j < count; j++) {
    ahead();
    F row[V];
    for (int v = 0; v < V; v++) row[v] = load_number(rows[j] + column + 16 * v);
    for (int r = 0; r < R; r++) {
      const F factor = set1(factors.x[r][j * factors.step]);
      for (int v = 0; v < V; v++) sums[r][v] = fma(factor, row[v], sums[r][v]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int v = 0; v < V; v++) store(out[r] + column + 16 * v, sums[r][v]);
}
template <int R, class Number, class Ahead>
inline void sum_rows(const Number* const* rows, int count, Factors factors, int first, int last, const float* const* start,
                     float* const* out, const Ahead& ahead) {
  constexpr int V = std::clamp(TILE_SUMS / R, 1, 8);
  int column = first;
  for (; column + 16 * V <= last; column += 16 * V) sum_tile<R, V>(rows, count, factors, column, start, out, ahead);
  for (; column < last; column += 16) sum_tile<R, 1>(rows, count, factors, column, start, out, ahead);
}
// The same for `many` sums, whose columns are `width`: some columns of all sums after others, so that these columns of
// all rows stay in the L1 cache. ahead() is called between rows.
template <class Number, class Ahead>
inline void weighted_sums(const Number* const* rows, int count, Factors factors, int many, int width,
                          const float* const* start, float* const* out, const Ahead& ahead) {
  constexpr int SOME = 64;
  auto from = [&](int r) { return start ? start + r : nullptr; };
  for (int first = 0, last; first < width; first = last) {
    last = many < 4 ? width : std::min(first + SOME, width);
    int r = 0;
    for (; r + 4 <= many; r += 4) sum_rows<4>(rows, count, factors.from(r), first, last, from(r), out + r, ahead);
    for (; r + 2 <= many; r += 2) sum_rows<2>(rows, count, factors.from(r), first, last, from(r), out + r, ahead);
    for (; r < many; r++) sum_rows<1>(rows, count, factors.from(r), first, last, from(r), out + r, ahead);
  }
}

template <class Number>
inline void weighted_sums(const Number* const* rows, int count, Factors factors, int many, int width,
                          const float* const* start, float* const* out) {
  weighted_sums(rows, count, factors, many, width, start, out, [] {});
}

// What a member needs for a head of keys, in one piece of memory.
struct StateWork {
  float* queries;  // [STATE_CHUNK, k_dim], of the new rows
  float *out, *u;  // [v_dim], of a row
  float *seen, *asked;  // [STATE_CHUNK, v_dim]: the state times k and q of the new rows
  float *keyed, *scores;  // [STATE_CHUNK, STATE_CHUNK]: keys times keys and times queries of the new rows
  float *shares, *factors;  // [STATE_CHUNK], [2, STATE_CHUNK]
  float* state;  // [heads of v of the head, k_dim, v_dim]
  float* before;  // [heads of v of the head, STATE_CHUNK]: sums of log decays of the open chunk
  float *keys, *written;  // [STATE_CHUNK, k_dim], [heads of v of the head, STATE_CHUNK, v_dim]: rows that are widened
  uint16_t* short_keys;  // [FEW_STATE_ROWS, k_dim]: entries that another part writes
  static size_t size(const StateShape& c) {
    StateWork w;
    return size_t(w.lay_out(nullptr, c) - (float*)nullptr);
  }
  static StateWork in(float* at, const StateShape& c) {
    StateWork w;
    w.lay_out(at, c);
    return w;
  }

 private:
  float* lay_out(float* at, const StateShape& c) {
    const size_t group = c.together();
    auto take = [&](float*& place, size_t count) { place = at, at += count; };
    take(queries, STATE_CHUNK * c.k_dim), take(keys, STATE_CHUNK * c.k_dim);
    take(out, c.v_dim), take(u, c.v_dim), take(seen, STATE_CHUNK * c.v_dim), take(asked, STATE_CHUNK * c.v_dim);
    take(keyed, STATE_CHUNK * STATE_CHUNK), take(scores, STATE_CHUNK * STATE_CHUNK);
    take(shares, STATE_CHUNK), take(factors, 2 * STATE_CHUNK);
    take(state, group * c.k_dim * c.v_dim), take(before, group * STATE_CHUNK);
    take(written, group * STATE_CHUNK * c.v_dim);
    short_keys = (uint16_t*)at, at += FEW_STATE_ROWS * c.k_dim / 2;
    return at;
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

  // Rows of a chunk: keys, and what heads of v have written, [heads of v of the part, STATE_CHUNK].
  template <class Number>
  struct ChunkRows {
    const Number** written;
    const Number* keys[STATE_CHUNK];
    const uint16_t* entries[STATE_CHUNK];  // those of the open chunk
  };

  // A head of keys of a sequence. A few new rows read those before them in their pages; for many these are widened.
  void run(int sequence, const Part& part, Model::Private& own) const {
    const bool few = batch.row_starts[sequence + 1] - batch.row_starts[sequence] <= FEW_STATE_ROWS;
    few ? run_as<uint16_t>(sequence, part, own) : run_as<float>(sequence, part, own);
  }
  template <class Number>
  void run_as(int sequence, const Part& part, Model::Private& own) const {
    const int first = batch.row_starts[sequence], count = batch.row_starts[sequence + 1] - first;
    const StateWork w = StateWork::in(own.states.get<float>(StateWork::size(c)), c);
    const Snapshot from = source(sequence);
    std::vector<const float*>& rows = own.state_rows;
    rows.assign(size_t(part.count) * c.k_dim + ROWS_AHEAD, m.zeros.data());
    for (int g = 0; g < part.count && from.pages; g++)
      from.rows(part.v_head(c, g) * c.k_dim, c.k_dim, rows.data() + size_t(g) * c.k_dim);
    if (from.pages) from.rows(after(part).v_head(c, 0) * c.k_dim, ROWS_AHEAD, rows.data() + size_t(part.count) * c.k_dim);
    own.state_written.resize(size_t(part.count) * STATE_CHUNK);
    ChunkRows<Number> known{(const Number**)own.state_written.data(), {}, {}};
    int open = batch.state_counts[sequence];
    load_open(sequence, part, open, w, known);
    const Inputs inputs(*this, sequence);
    int target = batch.target_starts[sequence];
    for (int start = 0; start < count;) {
      const int64_t position = batch.positions[first + start];
      const int some = std::min(count - start, STATE_CHUNK - int(position % STATE_CHUNK));
      chunk(inputs, part, start, some, open, w, known, rows.data());
      open += some, start += some;
      if ((position + some) % STATE_CHUNK) continue;
      close(open, part, w, known, rows.data());
      open = 0;
      if (target < batch.target_starts[sequence + 1] && batch.target_rows[target] == start) keep(target++, part, w);
    }
  }

  // The part that a member is likely to compute next.
  Part after(const Part& part) const {
    const bool same = part.first + part.count < c.v_heads / c.k_heads;
    if (same) return {part.key, part.first + part.count, part.count};
    return {part.key + 1 < c.k_heads ? part.key + 1 : part.key, 0, part.count};
  }
  // An entry, widened, or where it is.
  static void take(const float*& place, const uint16_t* entry, int size, float* wide) {
    widen(entry, size, wide), place = wide;
  }
  static void take(const uint16_t*& place, const uint16_t* entry, int, float*) { place = entry; }
  static void widen(const float*, int, float*) {}  // it is there
  static void widen(const uint16_t* from, int size, float* to) {
    for (int d = 0; d < size; d += 16) store(to + d, load_bf16(from + d));
  }
  float* wide_key(const StateWork& w, int place) const { return w.keys + size_t(place) * c.k_dim; }
  float* wide_written(const StateWork& w, int g, int place) const {
    return w.written + (size_t(g) * STATE_CHUNK + place) * c.v_dim;
  }

  // The rows of the open chunk, from their pages.
  template <class Number>
  void load_open(int sequence, const Part& part, int open, const StateWork& w, ChunkRows<Number>& known) const {
    const uint16_t** const entries = known.entries;
    last_entries(sequence, c.rows_group, c.rows_place, open, c.row_size(), entries);
    for (int i = 0; i < open; i++) {
      take(known.keys[i], entries[i] + c.key_column(part.key), c.k_dim, wide_key(w, i));
      const float* sums = (const float*)(entries[i] + c.k_size() + c.v_size());
      for (int g = 0; g < part.count; g++) {
        const int own = part.v_head(c, g);
        std::memcpy(w.before + g * STATE_CHUNK + i, sums + own, 4);
        const uint16_t* entry = entries[i] + c.written_column(own);
        take(known.written[g * STATE_CHUNK + i], entry, c.v_dim, wide_written(w, g, i));
      }
    }
  }

  // A new row, as the others are: widened, or as an entry.
  template <class Number>
  static const Number* of(const float* wide, const uint16_t* entry) {
    if constexpr (std::is_same_v<Number, float>)
      return wide;
    else
      return entry;
  }
  uint16_t* new_row(const Inputs& inputs, int row) const { return at.new_rows + size_t(inputs.first + row) * c.row_size(); }

  // New rows [start, start + some) of a sequence, behind `open` rows of their chunk.
  template <class Number>
  void chunk(const Inputs& inputs, const Part& part, int start, int some, int open, const StateWork& w,
             ChunkRows<Number>& known, const float* const* rows) const {
    for (int i = 0; i < some; i++) {
      float *q = w.queries + i * c.k_dim, *k = wide_key(w, open + i);
      convolve(inputs, start + i, part.key * c.k_dim, c.k_dim, q);
      convolve(inputs, start + i, c.k_size() + part.key * c.k_dim, c.k_dim, k);
      if (corrects()) normalize(q, c.k_dim, 1.0f / std::sqrt(float(c.k_dim))), normalize(k, c.k_dim, 1.0f);
      round_to_bf16(k, c.k_dim);
      // The first part of a head of k writes its entry.
      uint16_t* entry = part.first ? w.short_keys + (start + i) % FEW_STATE_ROWS * c.k_dim
                                   : new_row(inputs, start + i) + c.key_column(part.key);
      for (int d = 0; d < c.k_dim; d += 16) store_bf16(entry + d, load(k + d));
      known.keys[open + i] = of<Number>(k, entry);
    }
    corrects() ? multiply_keys<true>(some, open, w, known) : multiply_keys<false>(some, open, w, known);
    const float* x[2 * STATE_CHUNK];
    float* products[2 * STATE_CHUNK];
    int many = 0;
    for (int i = 0; i < some; i++) {
      if (corrects()) x[many] = wide_key(w, open + i), products[many++] = w.seen + i * c.v_dim;
      x[many] = w.queries + i * c.k_dim, products[many++] = w.asked + i * c.v_dim;
    }
    // Rows of an open chunk are far apart, so the processor does not foresee those of the next part: they are asked for
    // in even steps. Pieces of a row: its key, and what each head of v has written.
    const Part next = after(part);
    const int pieces = 1 + next.count, each = ceil_div(start ? 0 : open * pieces, part.count * c.k_dim);
    int row = 0, piece = 0;
    // Rows of a state that do not fit in registers at once are passed several times.
    const float *const *coming = rows + ROWS_AHEAD, *const *const end = coming + size_t(part.count) * c.k_dim;
    auto ahead = [&] {
      if (coming < end) fetch_bytes(*coming++, sizeof(float) * c.v_dim);
      for (int i = 0; i < each && row < open; i++) {
        const uint16_t* entry = known.entries[row];
        piece ? fetch_bytes(entry + c.written_column(next.v_head(c, piece - 1)), 2 * size_t(c.v_dim))
              : fetch_bytes(entry + c.key_column(next.key), 2 * size_t(c.k_dim));
        if (++piece == pieces) row++, piece = 0;
      }
    };
    for (int g = 0; g < part.count; g++) {
      if (std::is_same_v<Number, float> || many > 2)
        weighted_sums(rows + g * c.k_dim, c.k_dim, {x}, many, c.v_dim, nullptr, products);
      else
        weighted_sums(rows + g * c.k_dim, c.k_dim, {x}, many, c.v_dim, nullptr, products, ahead);
      for (int i = 0; i < some; i++) {
        const int head = part.v_head(c, g);
        advance(inputs, head, g, start + i, i, open + i, w, known);
        const uint16_t* entry = new_row(inputs, start + i) + c.written_column(head);
        known.written[g * STATE_CHUNK + open + i] = of<Number>(wide_written(w, g, open + i), entry);
      }
    }
  }

  // Products of the new rows' queries, and of keys if those are wanted, with all keys up to their own.
  template <bool Keys, class Number>
  void multiply_keys(int some, int open, const StateWork& w, const ChunkRows<Number>& known) const {
    for (int i = 0; i < some; i++) {
      const float *k = wide_key(w, open + i), *q = w.queries + i * c.k_dim;
      for (int s = 0; s <= open + i; s += 16) {
        F with_key[16], with_query[16];
        for (int j = 0; j < 16; j++) {
          const Number* other = known.keys[std::min(s + j, open + i)];
          F key = zero(), query = zero();
          for (int d = 0; d < c.k_dim; d += 16) {
            const F x = load_number(other + d);
            if constexpr (Keys) key = fma(x, load(k + d), key);
            query = fma(x, load(q + d), query);
          }
          with_key[j] = key, with_query[j] = query;
        }
        if constexpr (Keys) store(w.keyed + i * STATE_CHUNK + s, sums(with_key));
        store(w.scores + i * STATE_CHUNK + s, sums(with_query));
      }
    }
  }

  // u and the output of a row of a head of values: row `i` of the new ones, `place` of the chunk.
  template <class Number>
  void advance(const Inputs& inputs, int head, int g, int row, int i, int place, const StateWork& w,
               const ChunkRows<Number>& known) const {
    const int at_row = inputs.first + row;
    const float* made = at.projected + size_t(at_row) * block.qkv.width;
    const float* z = made + c.z_column() + head * c.v_dim;
    const double x = double(made[c.a_column() + head]) + c.dt_bias[head];
    const double softplus = x > 30 ? x : std::log1p(std::exp(x));
    float* sums = w.before + g * STATE_CHUNK;
    sums[place] = (place ? sums[place - 1] : 0.0f) + float(-double(c.decay[head]) * softplus);
    const float whole = exp_of(sums[place]);
    for (int s = 0; s <= place; s += 16) store(w.shares + s, exp16(min(sub(set1(sums[place]), load(sums + s)), zero())));
    float* const u = wide_written(w, g, place);
    convolve(inputs, row, 2 * c.k_size() + head * c.v_dim, c.v_dim, u);  // v
    for (int d = 0; d < c.v_dim; d += 16) store(w.out + d, mul(set1(whole), load(w.asked + i * c.v_dim + d)));
    // Rows before it go to the output and, if it is corrected, to u, in one pass over them.
    const float *scores = w.scores + i * STATE_CHUNK, *keyed = w.keyed + i * STATE_CHUNK;
    float *by_score = w.factors, *by_key = w.factors + STATE_CHUNK;
    for (int s = 0; s <= place; s += 16) store(by_score + s, mul(load(w.shares + s), load(scores + s)));
    if (corrects()) {
      const float strength = float(1.0 / (1.0 + std::exp(-double(made[c.b_column() + head]))));
      for (int d = 0; d < c.v_dim; d += 16)
        store(u + d, mul(set1(strength), fnma(set1(whole), load(w.seen + i * c.v_dim + d), load(u + d))));
      for (int s = 0; s < place; s += 16) store(by_key + s, mul(mul(set1(-strength), load(w.shares + s)), load(keyed + s)));
    } else {
      for (int d = 0; d < c.v_dim; d += 16) {
        const F v = load(u + d);
        store(w.out + d, fma(set1(c.skip[head]), v, load(w.out + d))), store(u + d, mul(set1(float(softplus)), v));
      }
    }
    const float* factors[] = {by_score, by_key};
    float* both[] = {w.out, u};
    weighted_sums(known.written + g * STATE_CHUNK, place, {factors}, corrects() ? 2 : 1, c.v_dim, both, both);
    round_to_bf16(u, c.v_dim);
    for (int d = 0; d < c.v_dim; d += 16) store(w.out + d, fma(set1(by_score[place]), load(u + d), load(w.out + d)));
    if (corrects()) rms_norm(w.out, c.norm, c.v_dim, m.config.eps, w.out);
    // Only what is final: a piece may be computed twice, and another member may read it meanwhile.
    float* out = at.mixed + size_t(at_row) * c.v_size() + head * c.v_dim;
    for (int d = 0; d < c.v_dim; d += 16) store(out + d, mul(load(w.out + d), silu16(load(z + d))));
    uint16_t* row_out = new_row(inputs, row);
    for (int d = 0; d < c.v_dim; d += 16) store_bf16(row_out + c.written_column(head) + d, load(u + d));
    std::memcpy(row_out + c.k_size() + c.v_size() + 2 * head, sums + place, 4);
  }

  // The state at the end of a chunk of `count` rows, which takes the place of the one before.
  template <class Number>
  void close(int count, const Part& part, const StateWork& w, const ChunkRows<Number>& known, const float** rows) const {
    constexpr int TOGETHER = 4;
    for (int s = 0; s < count; s++) widen(known.keys[s], c.k_dim, wide_key(w, s));
    const float* shared[STATE_CHUNK];  // what is written by its decay to the chunk's end, in memory of `seen`
    for (int g = 0; g < part.count; g++) {
      const float *sums = w.before + g * STATE_CHUNK, last = sums[count - 1];
      const F whole = set1(exp_of(last));
      for (int s = 0; s < count; s++) {
        const Number* from = known.written[g * STATE_CHUNK + s];
        const F share = set1(exp_of(last - sums[s]));
        float* to = w.seen + size_t(s) * c.v_dim;
        for (int d = 0; d < c.v_dim; d += 16) store(to + d, mul(share, load_number(from + d)));
        shared[s] = to;
      }
      float* state = w.state + size_t(g) * c.k_dim * c.v_dim;
      for (int j = 0; j < c.k_dim; j += TOGETHER) {
        const float* x[TOGETHER];
        float* out[TOGETHER];
        for (int r = 0; r < TOGETHER; r++) {
          const float*& before = rows[g * c.k_dim + j + r];
          x[r] = w.keys + j + r, out[r] = state + (j + r) * c.v_dim;
          for (int d = 0; d < c.v_dim; d += 16) store(out[r] + d, mul(whole, load(before + d)));
          before = out[r];
        }
        weighted_sums(shared, count, {x, c.k_dim}, TOGETHER, c.v_dim, out, out);
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
    if (c.kind == MAMBA2 && c.norm) {
      const int size = c.v_size() / c.k_heads;
      float* normed = own.row.get<float>(c.v_size());
      for (int group = 0; group < c.v_size(); group += size)
        rms_norm(mixed + group, c.norm + group, size, m.config.eps, normed + group);
      mixed = normed;
    }
    prepare_row(mixed, b.o, out, i);
  });
}
