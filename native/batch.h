// The rows of a step, and the units of work of their attention.
#pragma once
#include <span>
#include <utility>

#include "attention.h"
#include "decoder.h"

constexpr int EVEN = 4;      // units per member that are enough for an even distribution
constexpr int FEW_ROWS = 2;  // up to this many rows are prepared by every member for itself, which saves a phase

// Rows of a step; see RaggedBatch in backends/interface.py.
struct Batch {
  int32_t num_rows, num_sequences;
  const int64_t *tokens, *pages, *slots;  // pages: [groups, rows], those to write to
  const int64_t* positions;
  const int32_t* row_starts;      // [sequences + 1]
  const int32_t* span_starts;     // [sequences + 1]
  const Span* spans;              // [groups, spans of all sequences]: a span lies in a page of each group of layers
  const float *cos, *sin;         // [ropes, turns, half_dim], by position
  int64_t turns;
  int64_t num_queries;            // number of rows whose queries are returned
  const int64_t* query_rows;      // [num_queries]
  float* queries;                 // [blocks, num_queries, q_width]
  const float* dropout;           // [blocks, rows, hidden], for the inputs of MLPs; null for none
  const uint8_t* embeddings;      // [rows] in the file's format, if the model has no embedding matrix; else null
  const uint8_t* token_inputs;    // [rows] of the table of `TokenInputs`, in its format, if the model has one
  int64_t num_wanted;             // number of rows that the last block returns
  const int64_t* wanted;          // [num_wanted], ascending
  int64_t num_states;             // number of rows whose hidden states are returned
  const int64_t* state_rows;      // [num_states]
  float* states;                  // [blocks + 1, num_states, hidden]: the input of each block, the output of the last
  // Of recurrent layers, whose snapshots have `state_pages` pages each. A first page of -1 stands for zeros.
  int64_t state_pages;              // 0 without such layers
  const int32_t* state_counts;      // [sequences]: entries before the step since the snapshot
  const int32_t* state_sources;     // [sequences, state_pages]
  const int32_t* target_starts;     // [sequences + 1]: the snapshots to write
  const int32_t* target_sequences;  // [targets]
  const int32_t* target_rows;       // [targets]: number of the sequence's rows before each
  const int32_t* target_pages;      // [targets, state_pages]
  // What is added to scores of each sequence's first entries: where [blocks, KV heads, length] floats are, in bytes from
  // `bias_base` on (null for addresses), or 0; null for none.
  const int64_t* biases;        // [sequences]
  const int32_t* bias_lengths;  // [sequences]
  const uint8_t* bias_base;
  const float* hidden;  // [rows, hidden]: what the first block reads in place of embeddings; null for these

  int targets() const { return state_pages ? target_starts[num_sequences] : 0; }
};

// What a KV head of a layer, the `place`-th, adds to scores of a sequence's entries.
inline EntryBias bias_of(const Batch& batch, int sequence, int place, int kv_heads, int head) {
  if (!batch.biases || !batch.biases[sequence]) return {};
  const int count = batch.bias_lengths[sequence];
  const auto* all = (const float*)(uintptr_t(batch.bias_base) + batch.biases[sequence]);
  return {all + (size_t(place) * kv_heads + head) * count, count};
}

// The spans of a group of layers.
inline const Span* spans_of(const Batch& batch, int group) {
  return batch.spans + size_t(group) * batch.span_starts[batch.num_sequences];
}

// Rows of one sequence that attend together. One member computes all splits of a head, or any member each split.
struct Piece {
  int sequence, first, count;  // rows
  int to;                      // index of the first among the rows that attend
  std::vector<Split> splits;
};

// The work of attention. Pieces of few rows have room for the results of each split, as several members may share them.
struct Attention {
  std::vector<Piece> pieces;
  struct Unit {
    int piece, head, split;  // split -1: all of them
    size_t partial;          // first of `count * repeat`
  };
  std::vector<Unit> units, shared;  // shared: units to merge, where `split` is the number of splits
  size_t num_partials = 0;          // of all ranks; 0 if there is nothing to merge
};

// `order` is that of the last entry that the row attends to. With attention in both directions all entries are the step's.
inline Query query_of(const AttentionShape& c, const Batch& batch, int sequence, int row, int entries) {
  const int own = entries - (batch.row_starts[sequence + 1] - row), last = entries - 1;
  const int order = !c.both_ways ? own : c.window > 0 ? std::min(last, own + c.window - 1) : last;
  return {order, int(batch.positions[row])};
}

inline int entries_of(const Batch& batch, int s) {
  int entries = 0;
  for (int i = batch.span_starts[s]; i < batch.span_starts[s + 1]; i++) entries += batch.spans[i].stop - batch.spans[i].start;
  return entries;
}

// The work of a piece for each head, in rows times splits.
inline int length_of(const Piece& piece) { return piece.count * int(piece.splits.size()); }

// The splits that a unit computes.
inline std::span<const Split> splits_of(const Attention& plan, const Attention::Unit& unit) {
  const std::span<const Split> all = plan.pieces[unit.piece].splits;
  return unit.split < 0 ? all : all.subspan(unit.split, 1);
}

// The pages of a group of layers that a unit reads of a split.
inline Reads reads_of(const Attention& plan, const Batch& batch, int group, const Attention::Unit& unit, const Split& split) {
  const Span* spans = spans_of(batch, group) + batch.span_starts[plan.pieces[unit.piece].sequence];
  return {spans + split.first, split.count, unit.head, split.before, {}};
}

// Orders units by length, longest first, and gives each member's range the same share of each length. So ranges have
// equal work, and the units left at the end are short. Neighbours stay together, as their keys are adjacent. Of `members`
// ranges, those from `first_range` to `last_range` are kept.
inline void deal(Attention& plan, int members, int first_range, int last_range) {
  using Unit = Attention::Unit;
  auto length = [&](const Unit& unit) { return plan.pieces[unit.piece].count * int(splits_of(plan, unit).size()); };
  std::vector<Unit>& units = plan.units;
  std::stable_sort(units.begin(), units.end(), [&](const Unit& a, const Unit& b) { return length(a) > length(b); });
  std::vector<std::vector<Unit>> ranges(members);
  for (auto first = units.begin(), last = first; first != units.end(); first = last) {
    last = std::find_if(first, units.end(), [&](const Unit& unit) { return length(unit) < length(*first); });
    const int count = int(last - first);
    for (int i = 0; i < members; i++)
      ranges[i].insert(ranges[i].end(), first + begin_of(count, i, members), first + begin_of(count, i + 1, members));
  }
  units.clear();
  for (int i = first_range; i < last_range; i++) units.insert(units.end(), ranges[i].begin(), ranges[i].end());
}

// The work of a layer for these rows (ascending), by `members` members of each of `ranks` ranks.
inline Attention plan_attention(const AttentionShape& c, const Batch& batch, std::span<const int64_t> rows, int members,
                                int rank, int ranks) {
  Attention plan;
  int64_t all = 0;
  for (int i = 0, s = 0, entries = entries_of(batch, 0); i < int(rows.size());) {
    const int row = int(rows[i]);
    while (row >= batch.row_starts[s + 1]) entries = entries_of(batch, ++s);
    const int most = std::min(
        {std::max(1, QUERY_ROWS * 8 / std::max(8, c.repeat())), batch.row_starts[s + 1] - row, int(rows.size()) - i});
    Piece piece{s, row, 1, i, {}};
    while (piece.count < most && rows[i + piece.count] == row + piece.count) piece.count++;
    find_splits(batch.spans + batch.span_starts[s], batch.span_starts[s + 1] - batch.span_starts[s], c.window,
                query_of(c, batch, s, row, entries), query_of(c, batch, s, row + piece.count - 1, entries), piece.splits);
    all += int64_t(c.kv_heads) * length_of(piece);
    i += piece.count;
    plan.pieces.push_back(std::move(piece));
  }
  const int first_head = c.any_head ? 0 : c.first_kv_head, last_head = c.any_head ? c.kv_heads : c.last_kv_head;
  for (int index = 0; index < int(plan.pieces.size()); index++) {
    const Piece& piece = plan.pieces[index];
    const int splits = int(piece.splits.size()), queries = piece.count * c.repeat();
    // A long unit is split if there are few others.
    const bool apart = piece.count <= FEW_ROWS && splits > 1 && int64_t(length_of(piece)) * members * ranks * EVEN > all;
    for (int split = 0; split < (apart ? splits : 1); split++)
      for (int head = first_head; head < last_head; head++)
        plan.units.push_back({index, head, apart ? split : -1, plan.num_partials + size_t(head * splits + split) * queries});
    if (!apart) continue;
    for (int head = first_head; head < last_head; head++)
      plan.shared.push_back({index, head, splits, plan.num_partials + size_t(head * splits) * queries});
    plan.num_partials += size_t(c.kv_heads * splits) * queries;
  }
  if (!c.any_head) {
    deal(plan, members, 0, members);
    return plan;
  }
  deal(plan, members * ranks, members * rank, members * (rank + 1));
  const int merged = int(plan.shared.size());
  plan.shared = {plan.shared.begin() + begin_of(merged, rank, ranks),
                 plan.shared.begin() + begin_of(merged, rank + 1, ranks)};
  return plan;
}

// The pages that a member reads first, limited in bytes, as byte offsets from the beginning of a layer.
inline std::vector<size_t> first_reads(const Attention& plan, const Batch& batch, int group, Layer kv, int member,
                                       int members, size_t bytes) {
  const int units = int(plan.units.size()), last = begin_of(units, member + 1, members);
  const size_t wanted = bytes / kv.piece_bytes();
  std::vector<size_t> places;
  for (int u = begin_of(units, member, members); u < last; u++)
    for (const Split& split : splits_of(plan, plan.units[u])) {
      const Reads reads = reads_of(plan, batch, group, plan.units[u], split);
      for (int side = 0; side < kv.pieces(); side++)
        for (int k = 0; k < reads.count; k++) {
          if (places.size() == wanted) return places;
          places.push_back(kv.page(side, reads.spans[k].page, reads.head) - kv.data);
        }
    }
  return places;
}
