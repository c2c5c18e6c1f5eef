// AMX: eight tiles of up to 16 rows of 64 bytes, and the product of two of them added to a third. Here 0 to 3 collect
// sums of 16 columns, 4 and 5 hold rows, 6 and 7 columns: two tiles of rows meet two of columns, which keeps the tile
// unit busy while the next ones are loaded.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "simd.h"

constexpr int TILE = 16;

// Linux grants the tiles' state to a process that asks. False where it does not.
inline bool request_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Sets how many rows the tiles of rows have, up to 2 TILE in all. Tiles lose what they hold if that changes.
class TileRows {
 public:
  void set(int rows) {
    if (rows == rows_) return;
    struct [[gnu::packed]] {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const int first = std::min(TILE, rows), second = std::max(1, rows - TILE);
    const int counts[] = {first, first, second, second, first, second, TILE, TILE};
    for (int tile = 0; tile < 8; tile++) config.row_bytes[tile] = 64, config.rows[tile] = uint8_t(counts[tile]);
    asm volatile("ldtilecfg %0" ::"m"(config));
    rows_ = rows;
  }
  // Between passes the processor's state is anybody's: others in this process use tiles too.
  void release() {
    asm volatile("tilerelease");
    rows_ = 0;
  }

 private:
  int rows_ = 0;
};

// This thread's.
inline TileRows& tile_rows() {
  static thread_local TileRows rows;
  return rows;
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
