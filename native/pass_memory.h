// The memory of a pass.
#pragma once
#include "batch.h"
#include "norms.h"

// Bytes of the packed inputs of one head's matrix.
inline size_t head_rows_bytes(size_t rows, int cols) { return round_up(Rows::bytes(rows, cols), LINE); }

constexpr size_t APART = 16 << 20;  // most bytes with which blocks have separate memory

// In a small pass every block has separate memory: nothing is overwritten during the pass, so its pieces are pure. In a
// large pass all blocks use the same memory, and so do all large passes: no member is still in one when it is over.
class PassMemory {
 public:
  struct Places {
    float *x, *after, *attention_out, *mlp_out, *partials;  // after: input of the MLP
    float *squares, *mlp_squares;                           // of inputs: see norms.h
    float* projected;                                 // q, k and v before norms over all heads
    Half* queries;
    uint16_t* entries;                                // keys and values
    uint8_t *inputs, *attended, *mlp_inputs, *gated;  // packed rows; gated: see gated_of
    float* logits;                                    // of routers, [rows, stride]
    Choice* choices;                                  // [rows, chosen], of each block: see experts.h
    uint8_t* shared_gated;                            // of the shared expert
    float *shares, *with_shared;                      // its weight in each row; the input of the MLP plus its output
    uint8_t* expert_inputs;                           // packed rows of experts with norms of their own
    float *expert_squares, *experts_out;              // of these; their output before the norm
    uint8_t *gate_inputs, *token_gated;               // packed rows of BlockInputs
    float *gate_squares, *middle, *token_out;         // of these; x before them; their output before the norm
    uint8_t *query_rows, *plain_rows, *seen_rows;     // packed rows of Latent: of q_up; of all heads' k_up and v_up
    float* wide_queries;                              // what q_up makes
    float* gates;                                     // of what attention makes: [rows, q_width]
    uint16_t *state_inputs, *new_rows;                // entries of recurrent layers
    float *mixed, *new_states;                        // their outputs, and the states for snapshots
  };

  PassMemory() = default;
  // Memory of `blocks` blocks, and of an x after the last. `choices` is of this process alone: indices from memory that a
  // lost rank left incomplete would lead anywhere.
  PassMemory(const Decoder& model, size_t blocks, Buffer& memory, Buffer& common, Buffer& choices, size_t rows,
             size_t partials, size_t targets)
      : config_(&model.config), rows_(rows), partials_(partials) {
    gated_ = Rows::bytes(rows, config_->intermediate);
    token_inputs_ = model.inputs ? model.inputs->size : 0;
    for (const Block& b : model.blocks) {
      norms_after_ |= b.attn_post_norm || b.mlp_post_norm;
      if (b.attention.whole_norm || b.state) projected_ = std::max(projected_, rows * b.qkv.width);
      if (const auto& latent = b.latent) {
        const size_t heads = b.attention.heads;
        projected_ = std::max(projected_, rows * b.qkv.width);
        plain_ = std::max(plain_, heads * head_rows_bytes(rows, latent->shape.plain));
        seen_ = std::max(seen_, heads * head_rows_bytes(rows, latent->shape.rank));
        if (latent->q_up) {
          query_rows_ = std::max(query_rows_, Rows::bytes(rows, latent->q_up->cols));
          wide_ = std::max(wide_, rows * latent->q_up->width);
        }
      }
      if (b.gated) gates_ = rows * config_->q_width;
      if (const auto& state = b.state) {
        inputs_ = std::max(inputs_, rows * state->conv_size()), new_rows_ = std::max(new_rows_, rows * state->row_size());
        mixed_ = std::max(mixed_, rows * state->v_size()), states_ = std::max(states_, targets * state->state_size());
        ready_ = std::max(ready_, state->v_size());
      }
      norms_of_experts_ |= b.expert_norms.has_value();
      if (b.shared) shared_gated_ = std::max(shared_gated_, Rows::bytes(rows, b.shared->mlp.down.cols));
      if (!b.mixed()) continue;
      const size_t most = rows * b.router.chosen + Rows::MAX_IDLE * b.router.experts;
      gated_ = std::max(gated_, Rows::tiled_bytes(most, b.intermediate()) + LINE * (1 + b.router.experts));
      logits_ = std::max(logits_, rows * b.router.stride());
      choices_ = std::max(choices_, rows * b.router.chosen);
    }
    const size_t count = blocks + 1;
    apart_ = true, size_ = measure();
    apart_ = size_ * count <= APART;
    if (!apart_) size_ = measure();
    const size_t size = apart_ ? size_ * count : size_;
    memory_ = (apart_ ? memory : common).get<uint8_t>(size);
    all_choices_ = choices.get<Choice>(choices_ * blocks);
  }
  bool apart() const { return apart_; }
  // The memory of a block and of the next one's inputs.
  std::span<uint8_t> bytes(size_t block) const {
    return apart_ ? std::span(memory_ + block * size_, 2 * size_) : std::span(memory_, size_);
  }

  // The gated rows of an expert, which begin at a new cache line.
  static Rows gated_of(uint8_t* gated, const Routes::Group& group, int cols) {
    const size_t before = Rows::tiled_bytes(group.first + Rows::MAX_IDLE * group.expert, cols);
    return Rows::in(gated + round_up(before, LINE) + LINE * group.expert, group.count, cols);
  }

  Places of(size_t block) const {
    Places places;
    lay_out(memory_ + (apart_ ? block * size_ : 0), places);
    places.choices = all_choices_ + block * choices_;
    return places;
  }

 private:
  size_t measure() const {
    Places places;
    return size_t(lay_out(nullptr, places));
  }

  uint8_t* lay_out(uint8_t* at, Places& to) const {
    const Config& c = *config_;
    const size_t q_size = size_t(c.q_width);
    auto take = [&](auto*& place, size_t count) {
      place = (std::remove_reference_t<decltype(place)>)at;
      at += round_up(count * sizeof(*place), LINE);
    };
    auto take_or_share = [&](auto*& place, size_t count, auto* other) { apart_ ? take(place, count) : void(place = other); };
    const size_t ready = Rows::bytes(rows_, std::max({c.hidden, int(q_size), ready_}));
    take(to.x, rows_ * c.hidden);
    take_or_share(to.after, rows_ * c.hidden, to.x);
    take(to.attention_out, norms_after_ ? rows_ * c.hidden : 0);
    take_or_share(to.mlp_out, norms_after_ ? rows_ * c.hidden : 0, to.attention_out);
    take(to.inputs, ready);
    take_or_share(to.mlp_inputs, ready, to.inputs);
    take(to.squares, Normed::squares_of(rows_, c.hidden));
    take_or_share(to.mlp_squares, Normed::squares_of(rows_, c.hidden), to.squares);
    uint8_t* const shared = at;  // the data of attention is no longer needed when gated rows are stored
    take(to.projected, projected_);
    take(to.queries, rows_ * q_size);
    take(to.entries, rows_ * 2 * c.kv_width);
    take(to.partials, partials_);
    take(to.query_rows, query_rows_), take(to.plain_rows, plain_), take(to.seen_rows, seen_), take(to.wide_queries, wide_);
    take(to.gates, gates_);
    take(to.state_inputs, inputs_), take(to.new_rows, new_rows_), take(to.mixed, mixed_), take(to.new_states, states_);
    take(to.attended, ready);
    uint8_t* const after_attention = apart_ ? at : std::exchange(at, shared);
    take(to.gated, gated_);
    take(to.logits, logits_);
    take(to.shared_gated, shared_gated_);
    take(to.shares, shared_gated_ ? rows_ * PANEL : 0);
    take(to.with_shared, shared_gated_ ? rows_ * c.hidden : 0);
    const size_t with_norms = norms_of_experts_ ? rows_ : 0;
    take(to.expert_inputs, Rows::bytes(with_norms, c.hidden));
    take(to.expert_squares, Normed::squares_of(with_norms, c.hidden));
    take(to.experts_out, with_norms * c.hidden);
    const size_t with_inputs = token_inputs_ ? rows_ : 0;
    take(to.gate_inputs, Rows::bytes(with_inputs, c.hidden));
    take(to.token_gated, Rows::bytes(with_inputs, token_inputs_));
    take(to.gate_squares, Normed::squares_of(with_inputs, c.hidden));
    take(to.middle, with_inputs * c.hidden);
    take(to.token_out, with_inputs * c.hidden);
    return std::max(at, after_attention);
  }

  const Config* config_ = nullptr;
  size_t rows_ = 0, partials_ = 0;
  size_t gated_ = 0, logits_ = 0, choices_ = 0, projected_ = 0, shared_gated_ = 0;  // the maxima over blocks
  int token_inputs_ = 0;
  size_t query_rows_ = 0, plain_ = 0, seen_ = 0, wide_ = 0;                 // the same
  size_t gates_ = 0, inputs_ = 0, new_rows_ = 0, mixed_ = 0, states_ = 0;  // the same
  int ready_ = 0;                                                           // the most inputs of an output projection
  bool norms_after_ = false, norms_of_experts_ = false, apart_ = false;
  size_t size_ = 0;
  uint8_t* memory_ = nullptr;
  Choice* all_choices_ = nullptr;
};
