// Products of attention with codes of 8 bits, in vector registers. Sums of integers are exact, so their order does not
// matter.
#pragma once
#include <algorithm>

#include "attention_vectors.h"

// Rows of integers of 16 bits: [rows, width]. Each four of them have the order in which codes become words (simd_avx512.h).
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

// Sums of 16 C columns of R rows: `fours` times four words of each row, with the four codes of each column at code(i, c).
// Loops over rows are unrolled, or the sums would begin and end in memory.
template <int R, int C, class Code, class Put>
void sum_codes(int fours, const int16_t* words, int width, Code code, Put put) {
  I acc[R][C];
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) acc[r][c] = int_zero();
  for (int i = 0; i < fours; i++) {
    I even[C], odd[C];
    for (int c = 0; c < C; c++) {
      const I codes = load_bytes(code(i, c));
      even[c] = even_codes(codes), odd[c] = odd_codes(codes);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const int16_t* four = words + r * width + 4 * i;
      for (int c = 0; c < C; c++) acc[r][c] = dot_words(acc[r][c], even[c], four);
      for (int c = 0; c < C; c++) acc[r][c] = dot_words(acc[r][c], odd[c], four + 2);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int c = 0; c < C; c++) put(r, c, acc[r][c]);
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
    for (int i = 0; i < count; i += 2) {
      fetching.ask(2);
      in_row_tiles(rows, 0, [&]<int R>(int row) {
        constexpr int P = std::min(2, SUMS<R>);
        for (int page = i; page < std::min(i + 2, count); page += P) {
          const uint8_t *one = keys[page], *other = keys[std::min(page + 1, count - 1)];  // the last one may come twice
          int32_t* to = sums.sums + size_t(row) * KEYS + PAGE_SIZE * page;
          auto code = [=](int d, int p) { return (p ? other : one) + 4 * PAGE_SIZE * d; };
          auto put = [=](int r, int p, I sum) { store(to + r * KEYS + PAGE_SIZE * p, sum); };
          sum_codes<R, P>(dim / 4, queries.words + size_t(row) * dim, dim, code, put);
        }
      });
    }
  }
  // sums [rows, dim] of values with shares [rows, KEYS].
  void sum(const Words& shares, int rows, const uint8_t* const* values, const uint8_t* columns, int count,
           const WordSums& sums, Fetching& fetching) const {
    constexpr int FOURS = PAGE_SIZE / 4;
    const uint8_t* pages[SPLIT];
    for (int i = 0; i < count; i++) pages[i] = columns ? columns + size_t(i) * PAGE_SIZE * dim : values[i];
    in_row_tiles(rows, 0, [&]<int R>(int row) {
      constexpr int C = std::min(2, SUMS<R>);
      for (int d = 0; d < dim; d += 16 * C) {
        fetching.ask(C * count / 2);
        int32_t* to = sums.sums + size_t(row) * dim + d;
        auto code = [=, at = pages, width = dim](int i, int c) {
          return at[i / FOURS] + 4 * (i % FOURS * width + d + 16 * c);
        };
        auto put = [=, width = dim](int r, int c, I sum) { store(to + r * width + 16 * c, sum); };
        sum_codes<R, C>(FOURS * count, shares.words + size_t(row) * KEYS, KEYS, code, put);
      }
    });
  }
};
