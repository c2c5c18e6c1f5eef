// The quants of a group: 32 columns of 16 rows.
//
// A group is 8 chunks of 4 columns. A chunk is 64 bytes, 4 columns of row 0, 4 of row 1, ...: one VNNI instruction
// multiplies it with 4 activations. Nibbles of chunks j and j + 4 share a byte. The fifth bits of all chunks are one
// more line, with those of chunk j in bit j. Fifth and sixth bits are two lines, with those of chunks j and 4 + j in
// bits 2 j and 2 j + 1. For AMX 5 and 6 bits have another layout (`quant_words.h`). A bfloat16 group is 16 chunks of 2
// columns.
#pragma once
#include "memory.h"
#include "simd.h"
#include "quant_words.h"

constexpr int PANEL = 16, GROUP = 32;

// What codes of E2M1 stand for (MXFP4): twice the number, above a zero of 16.
alignas(16) constexpr uint8_t E2M1[] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

constexpr int group_bytes(int bits) { return bits * LINE; }

// Packs the results of quant(row, column).
template <class Quant>
inline void pack_group(const Quant& quant, int bits, uint8_t* out) {
  if (in_words(bits)) return pack_words(quant, bits, out);
  auto in_chunk = [&](int chunk, int byte) { return quant(byte / 4, 4 * chunk + byte % 4); };
  for (int byte = 0; byte < LINE; byte++) {
    if (bits == 8) {
      for (int chunk = 0; chunk < 8; chunk++) out[LINE * chunk + byte] = in_chunk(chunk, byte);
      continue;
    }
    for (int chunk = 0; chunk < 4; chunk++)
      out[LINE * chunk + byte] = (in_chunk(chunk, byte) & 15) | (in_chunk(chunk + 4, byte) & 15) << 4;
    const int planes = bits - 4;
    for (int plane = 0; plane < planes; plane++) out[LINE * (4 + plane) + byte] = 0;
    for (int chunk = 0; planes && chunk < 8; chunk++)  // (other lines may belong to another member)
      out[LINE * (4 + chunk * planes / 8) + byte] |= in_chunk(chunk, byte) >> 4 << chunk * planes % 8;
  }
}

// Reads a single packed quant.
inline int quant_at(const uint8_t* group, int bits, int row, int column) {
  if (in_words(bits)) return quant_in_words(group, bits, row, column);
  const int chunk = column / 4, byte = 4 * row + column % 4, planes = bits - 4;
  if (bits == 8) return group[LINE * chunk + byte];
  const int low = group[LINE * (chunk % 4) + byte] >> chunk / 4 * 4 & 15;
  if (!planes) return low;
  const int high = group[LINE * (4 + chunk * planes / 8) + byte] >> chunk * planes % 8;
  return low | (high & ((1 << planes) - 1)) << 4;
}

// The 8 chunks of a group as unsigned bytes; with FLOATS they are codes of E2M1.
template <int BITS, bool FLOATS = false>
[[gnu::always_inline]] inline void load_group(const uint8_t* p, I* w) {
  static_assert(!in_words(BITS));
  if constexpr (BITS == 8) {
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) w[j] = load_bytes(p + LINE * j);
    return;
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const I x = load_bytes(p + LINE * j);
    w[j] = low_nibbles(x), w[j + 4] = high_nibbles(x);
    if (FLOATS) w[j] = look_up(E2M1, w[j]), w[j + 4] = look_up(E2M1, w[j + 4]);
  }
  if constexpr (BITS == 5) {
    const I v = load_bytes(p + LINE * 4);
    w[0] = add_planes<16, 4>(w[0], v), w[1] = add_planes<16, 3>(w[1], v);
    w[2] = add_planes<16, 2>(w[2], v), w[3] = add_planes<16, 1>(w[3], v);
    w[4] = add_planes<16, 0>(w[4], v), w[5] = add_planes<16, -1>(w[5], v);
    w[6] = add_planes<16, -2>(w[6], v), w[7] = add_planes<16, -3>(w[7], v);
  }
  if constexpr (BITS == 6)
    for (int half = 0; half < 2; half++) {
      const I v = load_bytes(p + LINE * (4 + half));
      I* four = w + 4 * half;
      four[0] = add_planes<48, 4>(four[0], v), four[1] = add_planes<48, 2>(four[1], v);
      four[2] = add_planes<48, 0>(four[2], v), four[3] = add_planes<48, -2>(four[3], v);
    }
}
