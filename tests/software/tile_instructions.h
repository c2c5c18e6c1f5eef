// The instructions of AMX in software, as Intel documents them, instead of native/tile_instructions.h: the same bits,
// about thirty times slower. Errors on a processor (no configuration, shapes that do not match) end the process.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

inline bool request_tiles() { return true; }

struct [[gnu::packed]] TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

struct alignas(64) Tile {
  uint8_t bytes[16][64];
};
struct TileUnit {
  TileConfig config;
  Tile tiles[8];
  TileUnit() { config.palette = 0; }
  int rows(int tile) const { return config.rows[tile]; }
  int row_bytes(int tile) const { return config.row_bytes[tile]; }
};
inline thread_local TileUnit tile_unit;

inline void demand(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "AMX in software: %s\n", what);
  std::abort();
}

inline void tile_configure(const TileConfig& config) {
  demand(config.palette == 1 && config.start == 0, "a palette that is not there");
  for (int t = 0; t < 8; t++)
    demand(config.rows[t] >= 1 && config.rows[t] <= 16 && config.row_bytes[t] >= 4 && config.row_bytes[t] <= 64, "a tile's shape");
  tile_unit.config = config;
  std::memset(tile_unit.tiles, 0, sizeof tile_unit.tiles);
}
inline void tile_release() { tile_unit = TileUnit(); }

template <int T>
inline Tile& configured() {
  demand(tile_unit.config.palette == 1, "tiles without a configuration");
  return tile_unit.tiles[T];
}

template <int T>
inline void tile_zero() { std::memset(&configured<T>(), 0, sizeof(Tile)); }
template <int T>
inline void tile_load(const void* p, long stride = 64) {
  tile_zero<T>();
  for (int row = 0; row < tile_unit.rows(T); row++)
    std::memcpy(tile_unit.tiles[T].bytes[row], (const uint8_t*)p + row * stride, tile_unit.row_bytes(T));
}
template <int T>
inline void tile_stream(const void* p, long stride = 64) { tile_load<T>(p, stride); }
template <int T>
inline void tile_store(void* p, long stride = 64) {
  const Tile& tile = configured<T>();
  for (int row = 0; row < tile_unit.rows(T); row++)
    std::memcpy((uint8_t*)p + row * stride, tile.bytes[row], tile_unit.row_bytes(T));
}

// The first and the second of pairs of bfloat16.
inline __m512 first_of(__m512i pairs) { return (__m512)_mm512_slli_epi32(pairs, 16); }
inline __m512 second_of(__m512i pairs) { return (__m512)_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff0000)); }

[[gnu::noinline]] inline void add_products(Tile& sums, const Tile& rows, const Tile& columns, int count, int pairs) {
  __m512 first[16], second[16];
  for (int k = 0; k < pairs; k++) {
    const __m512i both = _mm512_load_si512(columns.bytes[k]);
    first[k] = first_of(both), second[k] = second_of(both);
  }
  for (int m = 0; m < count; m++) {
    __m512 even = _mm512_setzero_ps(), odd = even;
    for (int k = 0; k < pairs; k++) {
      int32_t pair;
      std::memcpy(&pair, rows.bytes[m] + 4 * k, 4);
      const __m512i both = _mm512_set1_epi32(pair);
      even = _mm512_fmadd_ps(first_of(both), first[k], even);
      odd = _mm512_fmadd_ps(second_of(both), second[k], odd);
    }
    float* sum = (float*)sums.bytes[m];
    _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), _mm512_add_ps(even, odd)));
  }
}

// Demands that the product of two tiles can be added to a third. Returns the number of fours of bytes of a row.
inline int fours_of(int sums, int rows, int columns) {
  const int fours = tile_unit.row_bytes(rows) / 4;
  demand(tile_unit.rows(rows) == tile_unit.rows(sums) && tile_unit.rows(columns) == fours &&
             tile_unit.row_bytes(columns) == tile_unit.row_bytes(sums),
         "a product of tiles that do not fit");
  return fours;
}

// Subnormal inputs and results are 0.
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot() {
  Tile &sums = configured<SUMS>(), &rows = configured<ROWS>(), &columns = configured<COLUMNS>();
  const int count = tile_unit.rows(SUMS), pairs = fours_of(SUMS, ROWS, COLUMNS);
  const unsigned before = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // a processor's default, with flush to zero and denormals as zero
  add_products(sums, rows, columns, count, pairs);
  _mm_setcsr(before);
}

// Of fours of signed bytes.
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot_bytes() {
  Tile &sums = configured<SUMS>(), &rows = configured<ROWS>(), &columns = configured<COLUMNS>();
  const int fours = fours_of(SUMS, ROWS, COLUMNS);
  for (int m = 0; m < tile_unit.rows(SUMS); m++)
    for (int n = 0; n < tile_unit.row_bytes(SUMS) / 4; n++) {
      int32_t sum;
      std::memcpy(&sum, sums.bytes[m] + 4 * n, 4);
      for (int k = 0; k < 4 * fours; k++)
        sum += int32_t((int8_t)rows.bytes[m][k]) * int32_t((int8_t)columns.bytes[k / 4][4 * n + k % 4]);
      std::memcpy(sums.bytes[m] + 4 * n, &sum, 4);
    }
}
