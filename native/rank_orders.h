// What rank 0 asks of the other ranks: the arguments of a call, whose arrays lie in shared memory.
#pragma once
#include "model.h"

struct Order {
  enum Kind : int32_t { LISTEN, FORWARD, LOGITS, SEARCH } kind;  // LISTEN: return, there is a message
  int32_t model, count, pool;  // pool, and kv: the offset in it
  int64_t kv;
  const int64_t* strides;      // [groups, 3]
  Batch batch;                 // angles are by row
  const float* x;              // [count, columns of the head]
  const Noise* noises;         // [count]
  bool by_sketch;
};

// Memory of an order's arrays. In an order that is given, a pointer is an offset from its beginning, or null.
class Shelf {
 public:
  explicit Shelf(const Ranks& ranks) : base_(ranks.region(BATCH)), at_(base_ + LINE), end_(base_ + ranks.region_bytes()) {}

  template <class T>
  T* take(size_t count) {
    T* place = (T*)at_;
    at_ += round_up(count * sizeof(T), LINE);
    if (at_ > end_) throw std::bad_alloc();
    return place;
  }
  // Copies an array, if there is one, to the shelf.
  template <class T>
  void put(const T*& array, size_t count) {
    if (!array) return;
    T* place = take<T>(count);
    std::copy_n(array, count, place);
    array = place;
  }
  std::span<const uint8_t> used() const { return {base_, size_t(at_ - base_)}; }
  Order packed(Order order) const {
    each(order, [&](auto*& pointer) { as_number(pointer) -= pointer ? int64_t(base_) : 0; });
    return order;
  }
  Order unpacked(Order order) const {
    each(order, [&](auto*& pointer) { as_number(pointer) += pointer ? int64_t(base_) : 0; });
    return order;
  }

 private:
  template <class Action>
  static void each(Order& order, const Action& action) {
    Batch& b = order.batch;
    action(b.tokens), action(b.pages), action(b.slots), action(b.positions), action(b.row_starts), action(b.span_starts);
    action(b.spans), action(b.cos), action(b.sin), action(b.query_rows), action(b.queries), action(b.dropout);
    action(b.embeddings), action(b.wanted), action(b.state_rows), action(b.states), action(order.x), action(order.noises);
    action(order.strides), action(b.token_inputs), action(b.state_counts), action(b.state_sources);
    action(b.target_starts), action(b.target_sequences), action(b.target_rows), action(b.target_pages);
    action(b.biases), action(b.bias_lengths), action(b.bias_base);
  }
  template <class T>
  static int64_t& as_number(T*& pointer) {
    return *(int64_t*)&pointer;
  }

  uint8_t *const base_, *at_, *const end_;
};

// Puts the biases of scores on the shelf.
inline void put_biases(const Model& m, Shelf& shelf, Batch& batch) {
  const int sequences = batch.num_sequences;
  const uint8_t* const base = shelf.take<uint8_t>(LINE);  // so that none is 0 from it
  int64_t* places = shelf.take<int64_t>(sequences);
  for (int s = 0; s < sequences; s++) {
    places[s] = 0;
    if (!batch.biases[s]) continue;
    const auto* values = (const float*)batch.biases[s];
    shelf.put(values, m.bias_rows() * batch.bias_lengths[s]);
    places[s] = (const uint8_t*)values - base;
  }
  shelf.put(batch.bias_lengths, sequences), batch.biases = places, batch.bias_base = base;
}

// Puts a batch's arrays on the shelf, with the angles of its rows, and room for its queries and states.
inline Batch shelved(const Model& m, Shelf& shelf, Batch batch) {
  const size_t rows = batch.num_rows, sequences = batch.num_sequences, half = m.config.half_dim, ropes = m.config.num_ropes;
  float *cos = shelf.take<float>(ropes * rows * half), *sin = shelf.take<float>(ropes * rows * half);
  for (size_t rope = 0, to = 0; rope < ropes; rope++)
    for (size_t row = 0; row < rows; row++, to += half) {
      const size_t at = (rope * batch.turns + batch.positions[row]) * half;
      std::copy_n(batch.cos + at, half, cos + to), std::copy_n(batch.sin + at, half, sin + to);
    }
  batch.cos = cos, batch.sin = sin, batch.turns = rows;
  shelf.put(batch.tokens, rows), shelf.put(batch.pages, m.groups() * rows), shelf.put(batch.slots, rows);
  shelf.put(batch.positions, rows), shelf.put(batch.wanted, batch.num_wanted);
  const size_t spans = m.groups() * batch.span_starts[sequences];
  shelf.put(batch.spans, spans), shelf.put(batch.row_starts, sequences + 1), shelf.put(batch.span_starts, sequences + 1);
  shelf.put(batch.query_rows, batch.num_queries);
  if (batch.num_queries) batch.queries = shelf.take<float>(m.blocks.size() * batch.num_queries * m.config.q_width);
  shelf.put(batch.state_rows, batch.num_states);
  if (batch.num_states) batch.states = shelf.take<float>((m.blocks.size() + 1) * batch.num_states * m.config.hidden);
  shelf.put(batch.dropout, m.blocks.size() * rows * m.config.hidden);
  if (!m.embed) shelf.put(batch.embeddings, rows * m.config.embedding_bytes());
  if (m.inputs) shelf.put(batch.token_inputs, rows * m.inputs->row_bytes());
  if (const size_t pages = batch.state_pages, targets = batch.targets(); pages) {
    shelf.put(batch.state_counts, sequences), shelf.put(batch.state_sources, sequences * pages);
    shelf.put(batch.target_starts, sequences + 1), shelf.put(batch.target_sequences, targets);
    shelf.put(batch.target_rows, targets), shelf.put(batch.target_pages, targets * pages);
  }
  if (batch.biases) put_biases(m, shelf, batch);
  return batch;
}
