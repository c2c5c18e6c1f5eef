// The data of a pass. It copies all arguments of its caller: a member that lost its core may still be in a pass that is
// over.
#pragma once
#include <numeric>

#include "noise.h"
#include "ranks.h"
#include "pass_memory.h"
#include "summary.h"

// A single product. Small results are first stored here and then copied, so that its pieces are pure; so are those of
// several ranks, each of which computes a part.
struct Product {
  const float* x;
  uint8_t* inputs;  // packed rows
  float* out;
  Summary *chunks, *summaries;  // [rows, chunks], [rows]
  std::span<uint8_t> made;      // all of these, if several ranks make them
  bool pure, copied;

  void begin(const Linear& layer, const float* lent, int count, float* result) {
    constexpr size_t QUICKLY_COPIED = 1 << 20;
    const size_t values = size_t(count) * layer.cols, x_size = round_up(sizeof(float) * values, LINE);
    const size_t ready = round_up(Rows::bytes(count, layer.cols), LINE), out_size = sizeof(float) * count * layer.width;
    const size_t parts = size_t(count) * chunks_of(layer.width), summed = round_up(sizeof(Summary) * (parts + count), LINE);
    pure = !shared_ && out_size <= QUICKLY_COPIED, copied = shared_ || pure;
    uint8_t* at = memory_.get<uint8_t>(x_size + ready);
    std::copy_n(lent, values, (float*)at);
    x = (float*)at, inputs = at + x_size;
    chunks = (Summary*)made_.get<uint8_t>(summed + (copied ? out_size : 0)), summaries = chunks + parts;
    out = copied ? (float*)((uint8_t*)chunks + summed) : result;
    made = {(uint8_t*)chunks, summed + (copied ? out_size : 0)};
  }
  void share(const Ranks& ranks) { made_.lend(ranks.region(PRODUCT), ranks.region_bytes()), shared_ = true; }

 private:
  Buffer memory_, made_;
  bool shared_ = false;
};

// An argmax of each row's products with noise, in separate memory, so that its pieces are pure, unless several ranks
// compute them.
struct Search {
  const float* x;
  Noise* noises;            // [rows]
  uint8_t* inputs;          // packed rows
  bool sketched;            // whether the sketch is used; then:
  float *likely, *highest;  // [rows, panels]: estimate and upper bound of a panel's largest product
  float* floors;            // [rows]: the value of some product, a lower bound of the largest
  Best* found;              // [rows, chunks]
  std::span<uint8_t> made;  // these four

  void begin(const Linear& layer, const float* lent, const Noise* lent_noises, int count, bool by_sketch) {
    sketched = by_sketch;
    const size_t values = size_t(count) * layer.cols, panels = sketched ? layer.width / PANEL : 0;
    const size_t ready = round_up(Rows::bytes(count, layer.cols), LINE);
    const size_t bests = size_t(count) * chunks_of(layer.width);
    inputs = memory_.get<uint8_t>(ready + sizeof(float) * values + sizeof(Noise) * count);
    x = (float*)(inputs + ready), noises = (Noise*)(x + values);
    const size_t found_size = sizeof(float) * count * (2 * panels + 1) + sizeof(Best) * bests;
    made = {found_.get<uint8_t>(found_size), found_size};
    likely = (float*)made.data();
    highest = likely + count * panels, floors = highest + count * panels, found = (Best*)(floors + count);
    std::copy_n(lent, values, (float*)x), std::copy_n(lent_noises, count, noises);
  }
  void share(const Ranks& ranks) { found_.lend(ranks.region(PRODUCT), ranks.region_bytes()); }

 private:
  Buffer memory_, found_;
};

constexpr int DECODE_ROWS = 32;  // with more rows, prefetched data is evicted before its use

// A forward pass. After keys and values are stored, the last block continues with the wanted rows only.
class Pass {
 public:
  Batch batch{};  // copied; angles by row, not by position
  PassMemory room;
  // Packed embeddings, their products, and the numbers of each row for all blocks: see TokenInputs.
  struct TokenNumbers {
    uint8_t* rows;
    float *made, *numbers;
  } tokens{};

  // Lets its rows lie where all ranks have them.
  void share(const Ranks& ranks) {
    ranks_ = &ranks;
    memory_.lend(ranks.region(PASS), ranks.region_bytes());
    rest_memory_.lend(ranks.region(REST), ranks.region_bytes());
    numbers_.lend(ranks.region(TOKENS), ranks.region_bytes());
  }

  // `common` is memory of all passes of the model. The batch has angles by position, or `by_row`.
  void begin(const Decoder& model, const Batch& lent, uint8_t* kv, const int64_t* strides, int members, Buffer& common,
             bool by_row = false) {
    batch = lent, kv_ = kv, config_ = &model.config, blocks_ = &model.blocks;
    const size_t rows = lent.num_rows, sequences = lent.num_sequences, half = config_->half_dim, groups = model.groups();
    strides_.assign(strides, strides + 3 * groups);
    if (batch.hidden)
      keep(hidden_, batch.hidden, rows * config_->hidden);
    else if (!model.embed)
      keep(embeddings_, batch.embeddings, rows * config_->embedding_bytes());
    if (model.inputs) {
      keep(token_inputs_, batch.token_inputs, rows * model.inputs->row_bytes());
      const size_t packed = round_up(Rows::bytes(rows, config_->hidden), LINE), width = model.inputs->projection.width;
      const size_t size = packed + 2 * sizeof(float) * rows * width;
      tokens.rows = numbers_.get<uint8_t>(size), token_bytes_ = {tokens.rows, size};
      tokens.made = (float*)(tokens.rows + packed), tokens.numbers = tokens.made + rows * width;
    }
    keep(tokens_, batch.tokens, rows), keep(pages_, batch.pages, groups * rows), keep(slots_, batch.slots, rows);
    keep(positions_, batch.positions, rows), keep(wanted_, batch.wanted, batch.num_wanted);
    keep(state_rows_, batch.state_rows, batch.num_states);
    const size_t state_pages = size_t(lent.state_pages), targets = size_t(lent.targets());
    keep(state_counts_, batch.state_counts, state_pages ? sequences : 0);
    keep(state_sources_, batch.state_sources, sequences * state_pages);
    keep(target_starts_, batch.target_starts, state_pages ? sequences + 1 : 0);
    keep(target_sequences_, batch.target_sequences, targets), keep(target_rows_, batch.target_rows, targets);
    keep(target_pages_, batch.target_pages, targets * state_pages);
    if (lent.biases) keep(biases_, batch.biases, sequences), keep(bias_lengths_, batch.bias_lengths, sequences);
    keep(spans_, batch.spans, groups * lent.span_starts[sequences]);
    keep(row_starts_, batch.row_starts, sequences + 1), keep(span_starts_, batch.span_starts, sequences + 1);
    cos_.clear(), sin_.clear();
    for (int rope = 0; rope < config_->num_ropes; rope++)
      for (size_t row = 0; row < rows; row++) {
        const size_t at = (size_t(rope) * lent.turns + (by_row ? row : lent.positions[row])) * half;
        cos_.insert(cos_.end(), lent.cos + at, lent.cos + at + half);
        sin_.insert(sin_.end(), lent.sin + at, lent.sin + at + half);
      }
    batch.cos = cos_.data(), batch.sin = sin_.data(), batch.turns = rows;
    places_.assign(batch.num_queries ? rows : 0, -1);
    for (int i = 0; i < batch.num_queries; i++) places_[batch.query_rows[i]] = i;
    all_.resize(rows), std::iota(all_.begin(), all_.end(), 0);
    last_ = model.blocks.size() - 1, cut_ = wanted_.size() < rows && !batch.dropout && !batch.num_states;
    plans_.clear(), reads_.assign(groups, {});
    size_t partials = 0;
    for (size_t i = 0; i < model.blocks.size(); i++) {
      const AttentionShape& shape = model.blocks[i].attention;
      if (model.blocks[i].state) continue;
      if (!find(shape)) plans_.push_back({shape, plan(shape, all_, members)});
      const Attention& made = find(shape)->attention;
      if (reads_[shape.group].empty()) reads_[shape.group] = reads(made, i, members);
      partials = std::max(partials, partials_of(made, shape));
    }
    room = PassMemory(model, model.blocks.size(), memory_, common, choices_, rows, partials, targets);
    if (!cut_) return;
    if (model.blocks.back().state) {
      last_plan_ = {}, last_reads_.clear();
      rest_ = PassMemory(model, 1, rest_memory_, rest_memory_, rest_choices_, wanted_.size(), 0, 0);
      return;
    }
    last_plan_ = plan(model.blocks.back().attention, wanted_, members), last_reads_ = reads(last_plan_, last_, members);
    rest_ = PassMemory(model, 1, rest_memory_, rest_memory_, rest_choices_, wanted_.size(),
                       partials_of(last_plan_, model.blocks.back().attention), 0);
  }

  // Whether its pieces may be computed twice, and after the pass is over: see threads.h. Not in memory of several ranks,
  // where the next pass is.
  bool pure() const {
    const bool returns = batch.num_queries || batch.num_states;
    return !ranks_ && room.apart() && (!cut_ || rest_.apart()) && !batch.dropout && !batch.biases && !returns;
  }

  // Whether a block continues with only some rows after its keys and values; these rows, and their memory.
  bool cut(size_t block) const { return cut_ && block == last_; }
  std::span<const int64_t> rows(size_t block) const { return cut(block) ? wanted_ : all_; }
  PassMemory::Places rest(size_t block) const { return cut(block) ? rest_.of(0) : room.of(block); }
  float* result(size_t block) const { return cut(block) ? rest_.of(1).x : room.of(block + 1).x; }

  // Rows whose hidden states are returned, and where their inputs of a block go.
  std::span<const int64_t> state_rows() const { return state_rows_; }
  float* states(size_t block) const { return batch.states + block * state_rows_.size() * config_->hidden; }

  // Copies the wanted rows to the caller, at the end, and the last states.
  void hand_out(float* to) const {
    const float* from = result(last_);
    for (size_t i = 0; i < wanted_.size(); i++, to += config_->hidden)
      std::copy_n(from + (cut_ ? i : wanted_[i]) * config_->hidden, config_->hidden, to);
    for (size_t i = 0; i < state_rows_.size(); i++)
      std::copy_n(from + state_rows_[i] * config_->hidden, config_->hidden, states(last_ + 1) + i * config_->hidden);
  }

  // What ranks write and read around the meetings of a block, or where rows are embedded.
  Live live(size_t block, bool embeds = false) const {
    const size_t blocks = last_ + 1, queries = blocks * batch.num_queries * config_->q_width;
    const size_t states = batch.num_states ? (blocks + 1) * batch.num_states * config_->hidden : 0;
    auto bytes = [](float* data, size_t count) { return std::span((uint8_t*)data, count * sizeof(float)); };
    return {room.bytes(block), cut(block) ? rest_.bytes(0) : std::span<uint8_t>(), bytes(batch.queries, queries),
            bytes(batch.states, states), embeds ? token_bytes_ : std::span<uint8_t>()};
  }

  // The index of each row among those whose queries are returned, -1 for none; null if there are none.
  const int32_t* query_places() const { return places_.empty() ? nullptr : places_.data(); }
  const Attention& attention(size_t block) const { return cut(block) ? last_plan_ : find(shape_of(block))->attention; }
  // Lets a member prefetch the keys and values of a block that it reads first. They are used after the products of
  // the layers `before`, given as numbers of groups of weights.
  void begin_reads(Prefetcher& ahead, size_t index, int member, std::initializer_list<size_t> before) const {
    if ((*blocks_)[index].state) return;
    const MemberReads& reads = cut(index) ? last_reads_ : reads_[shape_of(index).group];
    if (reads.empty()) return;
    size_t groups = 0;
    for (size_t some : before) groups += some / reads.size();
    const Layer kv = layer(index);
    ahead.begin(kv.data, reads[member % reads.size()], kv.piece_bytes(), int(groups * 9 / 10));
  }
  // An entry of a recurrent layer, of `size` numbers.
  uint16_t* entry(int group, int place, int64_t page, int slot, int size) const {
    const int64_t* strides = &strides_[3 * group];
    return (uint16_t*)(kv_ + place * strides[0] + page * strides[2]) + int64_t(slot) * size;
  }
  // All frames as snapshots use them, and the numbers in each.
  float* state_base() const { return (float*)kv_; }
  size_t page_floats() const { return size_t(strides_[2]) / sizeof(float); }
  Layer layer(size_t block) const {
    const AttentionShape& shape = shape_of(block);
    const int64_t* strides = &strides_[3 * shape.group];
    return {
        kv_ + shape.place * strides[0],      strides[1], strides[2], shape.kv_heads, shape.dim, KvFormat(config_->kv_format),
        (*blocks_)[block].latent.has_value()};
  }

 private:
  template <class T>
  static void keep(std::vector<T>& store, const T*& list, size_t count) {
    store.assign(list, list + count);
    list = store.data();
  }
  using MemberReads = std::vector<std::vector<size_t>>;  // [member]; only with few rows
  struct Plan {
    AttentionShape shape;
    Attention attention;
  };
  const AttentionShape& shape_of(size_t block) const { return (*blocks_)[block].attention; }
  static size_t partials_of(const Attention& plan, const AttentionShape& shape) {
    return plan.num_partials * (shape.dim + 16);
  }
  Attention plan(const AttentionShape& shape, std::span<const int64_t> rows, int members) const {
    return plan_attention(shape, batch, rows, members, ranks_ ? ranks_->rank : 0, ranks_ ? ranks_->size : 1);
  }
  MemberReads reads(const Attention& plan, size_t block, int members) const {
    MemberReads made;
    for (int i = 0; i < members && batch.num_rows <= DECODE_ROWS; i++)
      made.push_back(first_reads(plan, batch, shape_of(block).group, layer(block), i, members, ahead_bytes()));
    return made;
  }
  const Plan* find(const AttentionShape& shape) const {
    for (auto& plan : plans_)
      if (plan.shape.divides_like(shape)) return &plan;
    return nullptr;
  }

  const Config* config_;
  uint8_t* kv_;
  const std::vector<Block>* blocks_;
  std::vector<int64_t> strides_;  // [groups, 3], in bytes
  std::vector<uint8_t> embeddings_, token_inputs_;
  std::vector<int64_t> tokens_, pages_, slots_, positions_, wanted_, state_rows_, all_;
  std::vector<int32_t> row_starts_, span_starts_, places_;
  std::vector<int32_t> state_counts_, state_sources_, target_starts_, target_sequences_, target_rows_, target_pages_,
      bias_lengths_;
  std::vector<int64_t> biases_;
  std::vector<Span> spans_;
  std::vector<float> cos_, sin_, hidden_;
  std::vector<Plan> plans_;
  std::vector<MemberReads> reads_;  // by group
  Attention last_plan_;
  MemberReads last_reads_;
  size_t last_ = 0;  // block
  bool cut_ = false;
  PassMemory rest_;
  Buffer memory_, rest_memory_, choices_, rest_choices_, numbers_;
  std::span<uint8_t> token_bytes_;
  const Ranks* ranks_ = nullptr;
};
