// AMX: eight tiles of up to 16 rows of 64 bytes; an instruction adds the product of two of them to a third. Here tiles
// 0 to 3 have sums of 16 columns, 4 and 5 rows, 6 and 7 columns: each of two tiles of rows is multiplied with each of
// two tiles of columns, which keeps the tile unit busy while the next ones are loaded.
#pragma once
#include <algorithm>
#include <utility>

#include "memory.h"
#include "simd.h"
#include "tile_instructions.h"

constexpr int TILE = 16;

// The tiles' shapes. Tiles lose their contents when shapes change.
class TileShapes {
 public:
  // For products of `rows` rows, at most 2 TILE, with two tiles of columns.
  void for_products(int rows) {
    if (!change(rows)) return;
    const int first = std::min(TILE, rows), second = std::max(1, rows - TILE);
    set({first, first, second, second, first, second, TILE, TILE}, LINE);
  }
  // For products of tile 4 with 6, or of tile 5, half as long, with 7, half as high. Tiles of sums and tiles 4 and 5
  // have `rows` rows, at most TILE.
  void for_attention(int rows) {
    if (change(ATTENTION + rows)) set({rows, rows, rows, rows, rows, rows, TILE, TILE / 2}, LINE / 2);
  }
  // For products of codes: of tile 4, `k_bytes` wide, with 6, and of tile 5, `v_bytes` wide, with 7.
  void for_codes(int rows, int k_bytes, int v_bytes) {
    if (!change(CODES + (rows * LINE + k_bytes - 1) * LINE + v_bytes - 1)) return;
    set({rows, rows, rows, rows, rows, rows, k_bytes / 4, v_bytes / 4}, v_bytes, k_bytes);
  }
  // Called after a pass, as other code in this process may use tiles too.
  void release() {
    tile_release();
    now_ = 0;
  }

 private:
  static constexpr int ATTENTION = 1000, CODES = 1 << 20;
  bool change(int to) { return std::exchange(now_, to) != to; }
  static void set(const int (&rows)[8], int fifth_bytes, int fourth_bytes = LINE) {
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = LINE, config.rows[tile] = uint8_t(rows[tile]);
    config.row_bytes[4] = fourth_bytes, config.row_bytes[5] = fifth_bytes;
    tile_configure(config);
  }
  int now_ = 0;
};

// The shapes of this thread.
inline TileShapes& tile_shapes() {
  static thread_local TileShapes shapes;
  return shapes;
}
