// What a pass works on. It keeps all of it by itself, and not what its caller lends: a member that lost its core may
// still be in a pass that is over.
#pragma once
#include "noise.h"
#include "room.h"
#include "summary.h"

// A product by itself. Results that are quickly copied have a place of their own, so that its pieces are pure.
struct Product {
  const float* x;
  uint8_t* inputs;  // ready to be multiplied
  float* out;
  Summary *chunks, *summaries;  // [rows, chunks], [rows]
  bool pure;

  void begin(const Linear& layer, const float* lent, int count, float* result) {
    constexpr size_t QUICKLY_COPIED = 1 << 20;
    const size_t values = size_t(count) * layer.cols, x_size = round_up(sizeof(float) * values, LINE);
    const size_t ready = round_up(Rows::bytes(count, layer.cols), LINE), out_size = sizeof(float) * count * layer.width;
    const size_t parts = size_t(count) * chunks_of(layer.width), summed = round_up(sizeof(Summary) * (parts + count), LINE);
    pure = out_size <= QUICKLY_COPIED;
    uint8_t* at = memory_.get<uint8_t>(x_size + ready + summed + (pure ? out_size : 0));
    std::copy_n(lent, values, (float*)at);
    x = (float*)at, inputs = at + x_size;
    chunks = (Summary*)(inputs + ready), summaries = chunks + parts;
    out = pure ? (float*)(inputs + ready + summed) : result;
  }

 private:
  Buffer memory_;
};

// A search for the largest product of each row with its noise, in memory of its own, so that its pieces are pure.
struct Search {
  const float* x;
  Noise* noises;            // [rows]
  uint8_t* inputs;          // ready to be multiplied
  float *likely, *highest;  // [rows, panels]: what a panel's largest product may be, and what none is above
  float* floors;            // [rows]: what some product is
  Best* found;              // [rows, chunks]

  void begin(const Linear& layer, const float* lent, const Noise* lent_noises, int count) {
    const size_t values = size_t(count) * layer.cols, panels = layer.jobs.size(), floats = values + count * (2 * panels + 1);
    const size_t ready = round_up(Rows::bytes(count, layer.cols), LINE);
    const size_t bests = size_t(count) * chunks_of(layer.width);
    inputs = memory_.get<uint8_t>(ready + sizeof(float) * floats + sizeof(Best) * bests + sizeof(Noise) * count);
    float* at = (float*)(inputs + ready);
    x = at, likely = at + values, highest = likely + count * panels, floors = highest + count * panels;
    found = (Best*)(floors + count), noises = (Noise*)(found + bests);
    std::copy_n(lent, values, at), std::copy_n(lent_noises, count, noises);
  }

 private:
  Buffer memory_;
};

constexpr int DECODE_ROWS = 32;  // more take so long to multiply that what was asked for meanwhile is gone again

class Pass {
 public:
  Batch batch{};  // in our own memory; angles by row, not by position
  Room room;

  // `common` is memory of all passes of the model.
  void begin(const Decoder& model, const Batch& lent, uint16_t* kv, const int64_t* strides, int members, Buffer& common) {
    batch = lent, kv_ = kv, config_ = &model.config;
    std::copy_n(strides, 3, strides_);
    const size_t rows = lent.num_rows, sequences = lent.num_sequences, half = config_->dim / 2;
    if (!model.embed) keep(embeddings_, batch.embeddings, rows * config_->embedding_bytes());
    keep(tokens_, batch.tokens, rows), keep(pages_, batch.pages, rows), keep(slots_, batch.slots, rows);
    keep(positions_, batch.positions, rows);
    keep(spans_, batch.spans, lent.span_starts[sequences]);
    keep(row_starts_, batch.row_starts, sequences + 1), keep(span_starts_, batch.span_starts, sequences + 1);
    cos_.clear(), sin_.clear();
    for (int rope = 0; rope < config_->num_ropes; rope++)
      for (size_t row = 0; row < rows; row++) {
        const size_t at = (size_t(rope) * lent.turns + lent.positions[row]) * half;
        cos_.insert(cos_.end(), lent.cos + at, lent.cos + at + half);
        sin_.insert(sin_.end(), lent.sin + at, lent.sin + at + half);
      }
    batch.cos = cos_.data(), batch.sin = sin_.data(), batch.turns = rows;
    places_.assign(batch.num_queries ? rows : 0, -1);
    for (int i = 0; i < batch.num_queries; i++) places_[batch.query_rows[i]] = i;
    plans_.clear();
    size_t partials = 0;
    for (const Block& b : model.blocks) {
      if (find(b.window)) continue;
      Plan& plan = plans_.emplace_back(b.window, plan_attention(*config_, batch, b.window, members));
      partials = std::max(partials, plan.attention.num_partials);
      for (int i = 0; i < members && rows <= DECODE_ROWS; i++)
        plan.reads.push_back(first_reads(plan.attention, batch, layer(0), i, members, ahead_bytes()));
    }
    room = Room(model, memory_, common, rows, partials * (config_->dim + 16));
  }

  // Whether its pieces may be computed twice, and be late: see threads.h.
  bool pure() const { return room.apart() && !batch.dropout && !batch.num_queries; }

  // The place of each row among those whose queries are handed out, -1 for none; null if there are none.
  const int32_t* query_places() const { return places_.empty() ? nullptr : places_.data(); }
  const Attention& attention(int window) const { return find(window)->attention; }
  // Let a member ask for what it reads first of a block's keys and values, which are wanted when these matrices have been
  // multiplied.
  void begin_reads(Ahead& ahead, const Block& b, size_t index, int member,
                   std::initializer_list<const Linear*> before) const {
    const auto& reads = find(b.window)->reads;
    if (reads.empty()) return;
    size_t groups = 0;
    for (const Linear* linear : before) groups += linear->jobs.size() * (linear->cols / GROUP) / reads.size();
    const Layer kv = layer(index);
    ahead.begin((const uint8_t*)kv.data, reads[member % reads.size()], kv.piece_bytes(), int(groups * 9 / 10));
  }
  Layer layer(size_t block) const {
    return {kv_ + block * strides_[0], strides_[1], strides_[2], config_->kv_heads, config_->dim};
  }

 private:
  template <class T>
  static void keep(std::vector<T>& store, const T*& list, size_t count) {
    store.assign(list, list + count);
    list = store.data();
  }
  struct Plan {
    int window;
    Attention attention;
    std::vector<std::vector<size_t>> reads;  // [member], of few rows
  };
  const Plan* find(int window) const {
    for (auto& plan : plans_)
      if (plan.window == window) return &plan;
    return nullptr;
  }

  const Config* config_;
  uint16_t* kv_;
  int64_t strides_[3];
  std::vector<uint8_t> embeddings_;
  std::vector<int64_t> tokens_, pages_, slots_, positions_;
  std::vector<int32_t> row_starts_, span_starts_, places_;
  std::vector<Span> spans_;
  std::vector<float> cos_, sin_;
  std::vector<Plan> plans_;
  Buffer memory_;
};
