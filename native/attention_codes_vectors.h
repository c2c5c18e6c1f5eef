// Products of attention with codes of 8 bits, in vector registers. Sums of integers are exact, so their order does not
// matter.
#pragma once
#include <algorithm>

#include "attention_vectors.h"

// Rows of integers of 16 bits: [rows, width].
struct Words {
  int16_t* words;
  int width;

  static size_t bytes(size_t rows, int width) { return sizeof(int16_t) * rows * width; }
  static Words at(uint8_t* memory, int width) { return {(int16_t*)memory, width}; }
  void put(int row, int at, I some) const { store_words(words + size_t(row) * width + at, some); }
  Words from(int row) const { return {words + size_t(row) * width, width}; }
};

// Their sums of products: [rows, width].
struct WordSums {
  int32_t* sums;
  int width;

  static WordSums in(Buffer& memory, size_t rows, int width) { return {memory.get<int32_t>(rows * width), width}; }
  F at(int row, size_t at) const { return to_float(load_bytes((const uint8_t*)(sums + size_t(row) * width + at))); }
};

constexpr int CODE_ROWS = TILE_SUMS / 2;  // rows that share one pass over codes

// Sums of 16 columns of R rows: `fours` times four codes of each column, at code(i), with words(row, i).
template <int R, class Code, class Word>
void sum_codes(int fours, const Code& code, const Word& words, const auto& put) {
  I low[R], high[R];
  for (int r = 0; r < R; r++) low[r] = high[r] = int_zero();
  for (int i = 0; i < fours; i++) {
    const uint8_t* codes = code(i);
    const I a = widen_codes(codes), b = widen_codes(codes + 32);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const I four = four_words(words(r, i));
      low[r] = dot_words(low[r], a, four), high[r] = dot_words(high[r], b, four);
    }
  }
  for (int r = 0; r < R; r++) put(r, sums_of_two(low[r], high[r]));
}

struct CodeProducts {
  const int dim;
  const bool gathers;  // values that have 4 bits, to unpack them
  static constexpr bool pads = false;

  CodeProducts(int dim, int, bool halves) : dim(dim), gathers(halves) {}

  // Unpacks values of pages from `first` to `count`: [SPLIT, PAGE_SIZE / 4, dim, 4].
  void gather(const uint8_t* const* values, int first, int count, uint8_t* columns) const {
    const int half = dim / 2;
    for (int i = first; i < count; i++)
      for (int four = 0; four < PAGE_SIZE / 4; four++)
        for (int d = 0; d < half; d += 16) {
          const I codes = load_bytes(values[i] + four * 4 * half + 4 * d);
          uint8_t* to = columns + size_t(i) * PAGE_SIZE * dim + four * 4 * dim + 4 * d;
          store_bytes(to, low_codes(codes)), store_bytes(to + 4 * half, high_codes(codes));
        }
  }

  // sums [rows, KEYS] of queries [rows, dim].
  void score(const Words& queries, int rows, const uint8_t* const* keys, int count, const WordSums& sums,
             Fetching& fetching) const {
    for (int i = 0; i < count; i++) {
      fetching.ask(1);
      in_row_tiles<CODE_ROWS>(rows, 0, [&]<int R>(int row) {
        sum_codes<R>(dim / 4, [&](int d) { return keys[i] + 4 * PAGE_SIZE * d; }, [&](int r, int d) {
          return queries.words + size_t(row + r) * dim + 4 * d;
        }, [&](int r, I sum) { store(sums.sums + size_t(row + r) * KEYS + PAGE_SIZE * i, sum); });
      });
    }
  }
  // sums [rows, dim] of values with shares [rows, KEYS].
  void sum(const Words& shares, int rows, const uint8_t* const* values, const uint8_t* columns, int count,
           const WordSums& sums, Fetching& fetching) const {
    constexpr int FOURS = PAGE_SIZE / 4;
    auto page = [&](int i) { return columns ? columns + size_t(i) * PAGE_SIZE * dim : values[i]; };
    in_row_tiles<CODE_ROWS>(rows, 0, [&]<int R>(int row) {
      for (int d = 0; d < dim; d += 16) {
        fetching.ask(count / 2);
        sum_codes<R>(FOURS * count, [&](int i) { return page(i / FOURS) + i % FOURS * 4 * dim + 4 * d; }, [&](int r, int i) {
          return shares.words + size_t(row + r) * KEYS + 4 * i;
        }, [&](int r, I sum) { store(sums.sums + size_t(row + r) * dim + d, sum); });
      }
    });
  }
};
