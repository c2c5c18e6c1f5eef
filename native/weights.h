// Quantized matrices in panels of 16 output rows, streamed from front to back. GGUF's bits are kept, only reordered.
//
// A panel is a row of blocks, each of 32 columns (or 256 for the K formats): first its scales for all 16 rows, then
// the quants of each group of 32 columns. A group is 8 chunks of 4 columns; a chunk is 64 bytes, 4 columns of row 0,
// 4 of row 1, ...: what one VNNI instruction multiplies with 4 activations. Nibbles of chunks j and j + 4 share a
// byte; the fifth and sixth bits follow as one 64-bit mask per chunk.
#pragma once
#include <cstdlib>
#include <stdexcept>

#include "simd.h"

constexpr int PANEL = 16, GROUP = 32;

enum Format { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K };

struct Layout {
  int block;      // columns
  int raw_bytes;  // of one row's block in a GGUF file
  int bits;
  int zero;         // what a quant of weight 0 reads, where there is no minimum
  int scale_bytes;  // of a panel's block
};

constexpr Layout LAYOUTS[] = {
    {32, 18, 4, 8, 32},     // Q4_0: scale
    {32, 20, 4, 0, 64},     // Q4_1: scale, minimum
    {32, 22, 5, 16, 32},    // Q5_0
    {32, 24, 5, 0, 64},     // Q5_1
    {32, 34, 8, 128, 32},   // Q8_0
    {256, 144, 4, 0, 320},  // Q4_K: scale and minimum of the block, 8 of each for its groups
    {256, 176, 5, 0, 320},  // Q5_K
    {256, 210, 6, 32, 288}  // Q6_K: scale of the block, 16 for its groups of 16
};

constexpr int group_bytes(int bits) { return bits == 8 ? 512 : 256 + 64 * (bits - 4); }

constexpr size_t block_bytes(const Layout& l) { return l.scale_bytes + (l.block / GROUP) * group_bytes(l.bits); }

struct Matrix {
  Format format;
  int rows, cols;
  size_t panel_bytes;
  uint8_t* data;
  size_t bytes() const { return panel_bytes * (rows / PANEL); }
  const uint8_t* panel(int p) const { return data + panel_bytes * p; }
};

// A row's block as a GGUF file has it: quants made unsigned, scales as they are.
struct RawBlock {
  uint8_t q[256];
  uint16_t d, m;
  uint8_t scales[16], mins[8];
};

inline void read_block(Format format, const uint8_t* p, RawBlock& out) {
  const int bits = LAYOUTS[format].bits;
  switch (format) {
    case Q4_0: case Q4_1: case Q5_0: case Q5_1: {
      std::memcpy(&out.d, p, 2), p += 2;
      if (format == Q4_1 || format == Q5_1) std::memcpy(&out.m, p, 2), p += 2;
      uint32_t high = 0;
      if (bits == 5) std::memcpy(&high, p, 4), p += 4;
      for (int i = 0; i < 16; i++) {
        out.q[i] = (p[i] & 15) | ((high >> i & 1) << 4);
        out.q[i + 16] = (p[i] >> 4) | ((high >> (i + 16) & 1) << 4);
      }
      return;
    }
    case Q8_0:
      std::memcpy(&out.d, p, 2);
      for (int i = 0; i < 32; i++) out.q[i] = p[2 + i] ^ 128;  // signed to offset by 128
      return;
    case Q4_K: case Q5_K: {
      std::memcpy(&out.d, p, 2), std::memcpy(&out.m, p + 2, 2);
      const uint8_t *s = p + 4, *high = p + 16, *low = bits == 5 ? p + 48 : p + 16;
      for (int g = 0; g < 8; g++) {  // 6-bit scales and minima, the last four of each split over two places
        out.scales[g] = g < 4 ? s[g] & 63 : (s[g + 4] & 15) | (s[g - 4] >> 6 << 4);
        out.mins[g] = g < 4 ? s[g + 4] & 63 : (s[g + 4] >> 4) | (s[g] >> 6 << 4);
        for (int i = 0; i < 32; i++) {
          uint8_t v = low[g / 2 * 32 + i];
          v = g % 2 ? v >> 4 : v & 15;
          out.q[g * 32 + i] = bits == 5 ? v | ((high[i] >> g & 1) << 4) : v;
        }
      }
      return;
    }
    case Q6_K:
      for (int half = 0; half < 2; half++) {
        const uint8_t *low = p + 64 * half, *high = p + 128 + 32 * half;
        for (int i = 0; i < 32; i++)
          for (int part = 0; part < 4; part++) {
            const uint8_t v = low[i + 32 * (part % 2)];
            out.q[128 * half + 32 * part + i] = (part < 2 ? v & 15 : v >> 4) | ((high[i] >> (2 * part) & 3) << 4);
          }
      }
      std::memcpy(out.scales, p + 192, 16), std::memcpy(&out.d, p + 208, 2);
      return;
  }
}

inline void pack_group(const RawBlock* rows, int column, int bits, uint8_t* out) {
  auto quant = [&](int chunk, int byte) { return rows[byte / 4].q[column + 4 * chunk + byte % 4]; };
  if (bits == 8) {
    for (int chunk = 0; chunk < 8; chunk++)
      for (int byte = 0; byte < 64; byte++) out[64 * chunk + byte] = quant(chunk, byte);
    return;
  }
  for (int chunk = 0; chunk < 4; chunk++)
    for (int byte = 0; byte < 64; byte++)
      out[64 * chunk + byte] = (quant(chunk, byte) & 15) | (quant(chunk + 4, byte) & 15) << 4;
  for (int bit = 4; bit < bits; bit++)
    for (int chunk = 0; chunk < 8; chunk++) {
      uint64_t mask = 0;
      for (int byte = 0; byte < 64; byte++) mask |= uint64_t(quant(chunk, byte) >> bit & 1) << byte;
      std::memcpy(out + 256 + 64 * (bit - 4) + 8 * chunk, &mask, 8);
    }
}

// One panel from 16 raw rows that lie row_bytes apart.
inline void pack_panel(const Matrix& matrix, const uint8_t* raw, size_t row_bytes, uint8_t* out) {
  const Layout& l = LAYOUTS[matrix.format];
  RawBlock rows[PANEL];
  for (int block = 0; block < matrix.cols / l.block; block++) {
    for (int r = 0; r < PANEL; r++) read_block(matrix.format, raw + r * row_bytes + size_t(block) * l.raw_bytes, rows[r]);
    uint16_t* halves = (uint16_t*)out;
    for (int r = 0; r < PANEL; r++) {
      halves[r] = rows[r].d;
      if (matrix.format != Q6_K && l.zero == 0) halves[PANEL + r] = rows[r].m;
      if (matrix.format == Q6_K)
        for (int g = 0; g < 16; g++) out[32 + PANEL * g + r] = rows[r].scales[g];
      if (matrix.format == Q4_K || matrix.format == Q5_K)
        for (int g = 0; g < 8; g++) {
          out[64 + PANEL * g + r] = rows[r].scales[g];
          out[192 + PANEL * g + r] = rows[r].mins[g];
        }
    }
    out += l.scale_bytes;
    for (int g = 0; g < l.block / GROUP; g++, out += group_bytes(l.bits)) pack_group(rows, g * GROUP, l.bits, out);
  }
}

// Scales and minima of group g of a block for 16 rows. Q6_K has two scales a group, one for each half.
template <Format F>
inline void load_scales(const uint8_t* block, int g, __m512& scale, __m512& second) {
  const __m512 d = load_half((const uint16_t*)block);
  if constexpr (F == Q4_K || F == Q5_K) {
    auto bytes = [&](int at) {
      return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)(block + at + PANEL * g))));
    };
    scale = _mm512_mul_ps(d, bytes(64));
    second = _mm512_sub_ps(_mm512_setzero_ps(), _mm512_mul_ps(load_half((const uint16_t*)block + PANEL), bytes(192)));
  } else if constexpr (F == Q6_K) {
    auto bytes = [&](int half) {
      return _mm512_cvtepi32_ps(
          _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(block + 32 + PANEL * (2 * g + half)))));
    };
    scale = _mm512_mul_ps(d, bytes(0)), second = _mm512_mul_ps(d, bytes(1));
  } else {
    scale = d;
    second = LAYOUTS[F].zero ? _mm512_setzero_ps() : load_half((const uint16_t*)block + PANEL);
  }
}

// The 8 chunks of a group as unsigned bytes.
template <int BITS>
inline void load_group(const uint8_t* p, __m512i* w) {
  if constexpr (BITS == 8) {
    for (int j = 0; j < 8; j++) w[j] = _mm512_loadu_si512(p + 64 * j);
  } else {
    const __m512i nibble = _mm512_set1_epi8(15);
    for (int j = 0; j < 4; j++) {
      const __m512i x = _mm512_loadu_si512(p + 64 * j);
      w[j] = _mm512_and_si512(x, nibble);
      w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble);
    }
    for (int bit = 4; bit < BITS; bit++)
      for (int j = 0; j < 8; j++) {
        uint64_t mask;
        std::memcpy(&mask, p + 256 + 64 * (bit - 4) + 8 * j, 8);
        w[j] = _mm512_mask_add_epi8(w[j], mask, w[j], _mm512_set1_epi8(1 << bit));
      }
  }
}
