// The rows of a step, and what of their attention is to be computed.
#pragma once
#include <utility>

#include "attention.h"
#include "decoder.h"

constexpr int FEW_ROWS = 2;  // so few rows are prepared by every member for itself, which saves a phase

// Rows of a step; see RaggedBatch in kernels/interface.py.
struct Batch {
  int32_t num_rows, num_sequences;
  const int64_t *tokens, *pages, *slots;
  const int64_t* positions;
  const int32_t* row_starts;      // [sequences + 1]
  const int32_t* span_starts;     // [sequences + 1]
  const Span* spans;              // of all sequences
  const float *cos, *sin;         // [ropes, turns, dim / 2], by position
  int64_t turns;
  int64_t num_queries;            // rows whose queries are handed out,
  const int64_t* query_rows;      // these,
  float* queries;                 // to [blocks, num_queries, heads * dim]
  const float* dropout;           // [blocks, rows, hidden], of the inputs of MLPs; null for none
};

// Rows of one sequence that attend together: all splits of a head by one member, or each by any.
struct Piece {
  int sequence, first, count;  // rows
  std::vector<Split> splits;
};

// Pieces of few rows, whose splits may go to several members, get room for the results of each.
struct Attention {
  std::vector<Piece> pieces;
  struct Unit {
    int piece, head, split;  // split -1: all of them
    size_t partial;          // first of `count * repeat`
  };
  std::vector<Unit> units, shared;  // shared: those to be merged, split counts how many
  size_t num_partials = 0;
};

inline Query query_of(const Batch& batch, int sequence, int row, int entries) {
  return {entries - (batch.row_starts[sequence + 1] - row), int(batch.positions[row])};
}

inline int entries_of(const Batch& batch, int s) {
  int entries = 0;
  for (int i = batch.span_starts[s]; i < batch.span_starts[s + 1]; i++) entries += batch.spans[i].stop - batch.spans[i].start;
  return entries;
}

// Long units come first, and each member's range gets the same share of those of a length: so ranges are as long as each
// other, and what is left to share at the end is short. Neighbours stay together: their keys lie side by side.
inline void deal(Attention& plan, int members) {
  using Unit = Attention::Unit;
  auto length = [&](const Unit& unit) {
    const Piece& piece = plan.pieces[unit.piece];
    return unit.split < 0 ? piece.count * int(piece.splits.size()) : piece.count;
  };
  std::vector<Unit>& units = plan.units;
  std::stable_sort(units.begin(), units.end(), [&](const Unit& a, const Unit& b) { return length(a) > length(b); });
  std::vector<std::vector<Unit>> ranges(members);
  for (auto first = units.begin(), last = first; first != units.end(); first = last) {
    last = std::find_if(first, units.end(), [&](const Unit& unit) { return length(unit) < length(*first); });
    for (int i = 0; i < members; i++)
      ranges[i].insert(ranges[i].end(), first + (last - first) * i / members, first + (last - first) * (i + 1) / members);
  }
  units.clear();
  for (const auto& range : ranges) units.insert(units.end(), range.begin(), range.end());
}

// What is to be computed, of a layer with this window, by so many members.
inline Attention plan_attention(const Config& c, const Batch& batch, int window, int members) {
  Attention plan;
  const int repeat = c.heads / c.kv_heads;
  for (int s = 0; s < batch.num_sequences; s++) {
    const int entries = entries_of(batch, s), num_spans = batch.span_starts[s + 1] - batch.span_starts[s];
    for (int row = batch.row_starts[s]; row < batch.row_starts[s + 1]; row += QUERY_ROWS) {
      Piece piece{s, row, std::min(QUERY_ROWS, batch.row_starts[s + 1] - row), {}};
      find_splits(batch.spans + batch.span_starts[s], num_spans, window, query_of(batch, s, row, entries),
                  query_of(batch, s, row + piece.count - 1, entries), piece.splits);
      const int index = int(plan.pieces.size()), splits = int(piece.splits.size()), queries = piece.count * repeat;
      const bool apart = piece.count <= FEW_ROWS && splits > 1;
      for (int split = 0; split < (apart ? splits : 1); split++)
        for (int head = 0; head < c.kv_heads; head++)
          plan.units.push_back({index, head, apart ? split : -1, plan.num_partials + size_t(head * splits + split) * queries});
      for (int head = 0; apart && head < c.kv_heads; head++, plan.num_partials += size_t(splits) * queries)
        plan.shared.push_back({index, head, splits, plan.num_partials});
      plan.pieces.push_back(std::move(piece));
    }
  }
  deal(plan, members);
  return plan;
}
