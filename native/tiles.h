// AMX: eight tiles of up to 16 rows of 64 bytes, and the product of two of them added to a third. Here 0 to 3 collect
// sums of 16 columns, 4 and 5 hold rows, 6 and 7 columns: two tiles of rows meet two of columns, which keeps the tile
// unit busy while the next ones are loaded.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "memory.h"
#include "simd.h"

constexpr int TILE = 16;

// Linux grants the tiles' state to a process that asks. False where it does not.
inline bool request_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

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
    asm volatile("tilerelease");
    now_ = 0;
  }

 private:
  static constexpr int ATTENTION = 1000;
  bool change(int to) { return std::exchange(now_, to) != to; }
  static void set(const int (&rows)[8], int fifth_bytes) {
    struct [[gnu::packed]] {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = LINE, config.rows[tile] = uint8_t(rows[tile]);
    config.row_bytes[5] = fifth_bytes;
    asm volatile("ldtilecfg %0" ::"m"(config));
  }
  int now_ = 0;
};

// This thread's.
inline TileShapes& tile_shapes() {
  static thread_local TileShapes shapes;
  return shapes;
}

template <int T>
inline void tile_zero() { asm volatile("tilezero %%tmm%c0" ::"i"(T)); }
template <int T>
inline void tile_load(const void* p, long stride = 64) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// The same, leaving the first-level cache to what is used again.
template <int T>
inline void tile_stream(const void* p, long stride = 64) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T>
inline void tile_store(void* p, long stride = 64) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// Adds the product of pairs of bfloat16: within an instruction even and odd places have a float32 sum each, and each
// row its own, so a row's bits do not depend on the others.
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot() { asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS)); }
