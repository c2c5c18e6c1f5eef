// AMX: eight tiles of up to 16 rows of 64 bytes, and the product of two of them added to a third. Here 0 to 3 collect
// sums of 16 columns, 4 and 5 hold rows, 6 and 7 columns: two tiles of rows meet two of columns, which keeps the tile
// unit busy while the next ones are loaded.
#pragma once
#include <algorithm>
#include <utility>

#include "memory.h"
#include "simd.h"
#include "tile_instructions.h"

constexpr int TILE = 16;

// The tiles' shapes. Tiles lose what they hold when these change.
class TileShapes {
 public:
  // So many rows, up to 2 TILE in all, times two tiles of columns.
  void for_products(int rows) {
    if (!change(rows)) return;
    const int first = std::min(TILE, rows), second = std::max(1, rows - TILE);
    set({first, first, second, second, first, second, TILE, TILE}, LINE);
  }
  // So many rows, up to TILE in each tile of sums and of 4, times 6; or of 5, half as long, times 7, half as high.
  void for_attention(int rows) {
    if (change(ATTENTION + rows)) set({rows, rows, rows, rows, rows, rows, TILE, TILE / 2}, LINE / 2);
  }
  // Between passes the processor's state is anybody's: others in this process use tiles too.
  void release() {
    tile_release();
    now_ = 0;
  }

 private:
  static constexpr int ATTENTION = 1000;
  bool change(int to) { return std::exchange(now_, to) != to; }
  static void set(const int (&rows)[8], int fifth_bytes) {
    TileConfig config;
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = LINE, config.rows[tile] = uint8_t(rows[tile]);
    config.row_bytes[5] = fifth_bytes;
    tile_configure(config);
  }
  int now_ = 0;
};

// This thread's.
inline TileShapes& tile_shapes() {
  static thread_local TileShapes shapes;
  return shapes;
}
