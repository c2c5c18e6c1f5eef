// The instructions of AMX, and nothing else: tests/software has the same in software, for processors without AMX.
#pragma once
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

// Requests permission for the tiles' state from Linux. False if it is denied.
inline bool request_tiles() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

struct [[gnu::packed]] TileConfig {
  uint8_t palette = 1, start = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
inline void tile_configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void tile_release() { asm volatile("tilerelease"); }

template <int T>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void tile_load(const void* p, long stride = 64) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// The same, bypassing the L1 cache, which is left to data that is used again.
template <int T>
inline void tile_stream(const void* p, long stride = 64) {
  asm volatile("tileloaddt1 (%1,%2,1), %%tmm%c0" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
template <int T>
inline void tile_store(void* p, long stride = 64) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" ::"i"(T), "r"(p), "r"(stride) : "memory");
}
// Adds the product of pairs of bfloat16. Within an instruction even and odd places have separate float32 sums, and each
// row has its own, so a row's bits do not depend on the others.
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}
// The same of fours of signed bytes, in int32.
template <int SUMS, int ROWS, int COLUMNS>
inline void tile_dot_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(ROWS), "i"(COLUMNS));
}
