// Products of attention with codes of 8 bits, on AMX. Integers of 16 bits are two rows of digits of 8 bits, each of which
// is multiplied by itself. Sums of integers are exact, so their order does not matter.
#pragma once
#include <algorithm>

#include "attention_pages.h"
#include "tiles.h"

// Rows of integers of 16 bits, 256 times a row of high digits plus a row of low ones: [rows, 2, width].
struct Words {
  int8_t* digits;
  int width;

  static size_t bytes(size_t rows, int width) { return 2 * rows * width; }
  static Words at(uint8_t* memory, int width) { return {(int8_t*)memory, width}; }
  void put(int row, size_t at, I words) const {
    int8_t* low = digits + size_t(2 * row) * width + at;
    const __m256i both = bytes_0_and_1(add(words, int_set1(128)));
    _mm_storeu_si128((__m128i*)low, _mm_xor_si128(_mm256_castsi256_si128(both), _mm_set1_epi8(-128)));
    _mm_storeu_si128((__m128i*)(low + width), _mm256_extracti128_si256(both, 1));
  }
  Words from(int row) const { return {digits + size_t(2 * row) * width, width}; }

 private:
  // The lowest byte of each lane, then the one above it.
  static __m256i bytes_0_and_1(I v) {
    alignas(64) static constexpr auto PLACES = [] {
      std::array<uint8_t, 64> places{};
      for (int i = 0; i < 32; i++) places[i] = uint8_t(4 * (i % 16) + i / 16);
      return places;
    }();
    return _mm512_castsi512_si256(_mm512_permutexvar_epi8(load_bytes(PLACES.data()), v));
  }
};

// Their sums of products: [rows, 2, width].
struct WordSums {
  int32_t* sums;
  int width;

  static WordSums in(Buffer& memory, size_t rows, int width) { return {memory.get<int32_t>(2 * rows * width), width}; }
  F at(int row, size_t at) const {
    const auto low = (const uint8_t*)(sums + size_t(2 * row) * width + at);
    return to_float(add(left<8>(load_bytes(low + width * sizeof(int32_t))), load_bytes(low)));
  }
};

struct CodeProducts {
  const int dim;
  const bool halves;   // values have 4 bits
  const bool gathers;  // values from their pages, so that an instruction takes 64 slots: for many rows, or to unpack them
  const bool pads;     // shares with 0, for as many slots

  static constexpr int FOUR_PAGES = LINE / PAGE_SIZE;
  CodeProducts(int dim, int rows, bool halves) : dim(dim), halves(halves), gathers(rows > TILE || halves), pads(gathers) {}

  // sums [rows, KEYS] of queries [rows, dim].
  void score(const Words& queries, int rows, const uint8_t* const* keys, int count, const WordSums& sums,
             Fetching& fetching) const {
    const int step = k_bytes();
    in_tiles(2 * rows, [&](int row, bool two) {
      const int8_t* q = queries.digits + size_t(row) * dim;
      for (int i = 0; i < count; i += 2) {
        const int second = std::min(i + 1, count - 1);  // with an odd count the last page is scored twice
        fetching.ask(2);
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int d = 0; d < dim; d += step) {
          const uint8_t *k = keys[i] + d * PAGE_SIZE, *l = keys[second] + d * PAGE_SIZE;
          if (two && squares()) {
            if (i == 0 || dim > step) tile_load<4>(q + d, dim), tile_load<5>(q + TILE * dim + d, dim);
            tile_load<6>(k), tile_dot_bytes<0, 4, 6>(), tile_dot_bytes<2, 5, 6>();
            tile_load<7>(l), tile_dot_bytes<1, 4, 7>(), tile_dot_bytes<3, 5, 7>();
            continue;
          }
          tile_load<4>(q + d, dim), tile_load<6>(k), tile_dot_bytes<0, 4, 6>(), tile_load<6>(l), tile_dot_bytes<1, 4, 6>();
          if (!two) continue;
          tile_load<4>(q + TILE * dim + d, dim), tile_dot_bytes<3, 4, 6>(), tile_load<6>(k), tile_dot_bytes<2, 4, 6>();
        }
        int32_t *s = sums.sums + row * KEYS + PAGE_SIZE * i, *t = sums.sums + row * KEYS + PAGE_SIZE * second;
        constexpr int STRIDE = KEYS * sizeof(int32_t);
        tile_store<0>(s, STRIDE), tile_store<1>(t, STRIDE);
        if (two) tile_store<2>(s + TILE * KEYS, STRIDE), tile_store<3>(t + TILE * KEYS, STRIDE);
      }
    });
  }

  // Values of pages from `first` to `count`, with 64 slots to a tile: [dim / 16, SPLIT / 4, LINE / 4, LINE].
  void gather(const uint8_t* const* values, int first, int count, uint8_t* columns) const {
    auto place = [&](int i, int d, int four) { return columns + size_t(d / 16 * SPLIT + i) * 4 * LINE + four * LINE; };
    const int width = halves ? dim / 2 : dim;
    for (int i = first; i < count; i++)
      for (int d = 0; d < width; d += 16)
        for (int four = 0; four < PAGE_SIZE / 4; four++) {
          const I codes = load_bytes(values[i] + four * 4 * width + 4 * d);
          if (!halves) {
            store_bytes(place(i, d, four), codes);
            continue;
          }
          store_bytes(place(i, d, four), low_codes(codes));
          store_bytes(place(i, width + d, four), high_codes(codes));
        }
  }

  // sums [rows, dim] of values with shares [rows, KEYS], which are 0 behind the pages. `columns`: gathered, if so.
  void sum(const Words& shares, int rows, const uint8_t* const* values, const uint8_t* columns, int count,
           const WordSums& sums, Fetching& fetching) const {
    const int pages = gathers ? FOUR_PAGES : 1;
    const long stride = gathers ? long(LINE) : 4L * dim, next = gathers ? SPLIT * 4 * LINE : LINE,
               width = dim * sizeof(int32_t);
    in_tiles(2 * rows, [&](int row, bool two) {
      const int8_t* share = shares.digits + size_t(row) * KEYS;
      for (int d = 0; d < dim; d += 32) {
        tile_zero<0>(), tile_zero<1>(), tile_zero<2>(), tile_zero<3>();
        for (int i = 0; i < count; i += pages) {
          fetching.ask(1);
          const uint8_t* v = gathers ? columns + size_t(d / 16 * SPLIT + i) * 4 * LINE : values[i] + 4 * d;
          if (two && squares()) {
            tile_load<4>(share + PAGE_SIZE * i, KEYS), tile_load<6>(v), tile_dot_bytes<0, 4, 6>();
            tile_load<7>(v + next), tile_dot_bytes<1, 4, 7>();
            tile_load<5>(share + TILE * KEYS + PAGE_SIZE * i, KEYS), tile_dot_bytes<2, 5, 6>(), tile_dot_bytes<3, 5, 7>();
            continue;
          }
          tile_load<5>(share + PAGE_SIZE * i, KEYS), tile_load<7>(v, stride), tile_dot_bytes<0, 5, 7>();
          tile_load<7>(v + next, stride), tile_dot_bytes<1, 5, 7>();
          if (!two) continue;
          tile_load<5>(share + TILE * KEYS + PAGE_SIZE * i, KEYS), tile_dot_bytes<3, 5, 7>();
          tile_load<7>(v, stride), tile_dot_bytes<2, 5, 7>();
        }
        int32_t* place = sums.sums + size_t(row) * dim + d;
        tile_store<0>(place, width), tile_store<1>(place + 16, width);
        if (two) place += TILE * dim, tile_store<2>(place, width), tile_store<3>(place + 16, width);
      }
    });
  }

 private:
  // Whether all tiles have 64 bytes in a row, so that each of two tiles of rows meets each of two tiles of columns.
  bool squares() const { return gathers && k_bytes() == int(LINE); }
  int k_bytes() const { return dim % int(LINE) ? int(LINE) / 2 : int(LINE); }
  // Calls step(row, whether two tiles of rows begin there).
  template <class Step>
  void in_tiles(int rows, const Step& step) const {
    for (int row = 0; row < rows;) {
      const bool two = rows - row >= 2 * TILE;
      tile_shapes().for_codes(std::min(TILE, rows - row), k_bytes(), gathers ? int(LINE) : PAGE_SIZE);
      step(row, two);
      row += two ? 2 * TILE : TILE;
    }
  }
};
