// Rows in the layout of GGUF files: converted to panels, or read one by one.
#pragma once
#include "weights.h"

// A row's block in a GGUF file: quants converted to unsigned, scales unchanged.
struct RawBlock {
  uint8_t q[256];
  uint16_t d, m;
  uint8_t scales[16], mins[8];
};

inline void read_block(Format format, const uint8_t* p, RawBlock& out) {
  const int bits = LAYOUTS[format].bits;
  switch (format) {
    case Q4_0:
    case Q4_1:
    case Q5_0:
    case Q5_1: {
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
    case Q4_K:
    case Q5_K: {
      std::memcpy(&out.d, p, 2), std::memcpy(&out.m, p + 2, 2);
      const uint8_t *s = p + 4, *high = p + 16, *low = bits == 5 ? p + 48 : p + 16;
      for (int g = 0; g < 8; g++) {  // 6-bit scales and minima; the bits of the last four are in two places
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
    case BF16: return;
    case MXFP4:
      out.scales[0] = p[0];
      for (int i = 0; i < 16; i++) out.q[i] = p[1 + i] & 15, out.q[i + 16] = p[1 + i] >> 4;
      return;
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

constexpr int E8M0_MOST = 217;  // weights of 2^90: AMX could not scale back products with larger ones

// A bound of the magnitude of the block's weights.
inline float bound(Format format, const RawBlock& block) {
  if (format == MXFP4) return block.scales[0] > E8M0_MOST ? INFINITY : std::ldexp(16.0f, block.scales[0] - E8M0_HALF);
  const float scale = std::abs(from_half(block.d)), quant = float(1 << LAYOUTS[format].bits);
  const float minimum = LAYOUTS[format].zero == 0 ? std::abs(from_half(block.m)) : 0.0f;
  const bool nested = LAYOUTS[format].block == 256;  // scales of groups are below 64, Q6_K's below 129
  return scale * quant * (format == Q6_K ? 128.0f : nested ? 64.0f : 1.0f) + minimum * (nested ? 64.0f : 1.0f);
}

// One panel from 16 raw rows with stride row_bytes. Returns a bound of the magnitude of its weights: infinity if one of
// them is not finite.
inline float pack_panel(const Matrix& matrix, const uint8_t* raw, size_t row_bytes, uint8_t* scales) {
  const Layout& l = matrix.layout();
  uint8_t* out = scales + matrix.scale_bytes();
  if (matrix.format == BF16) {
    for (int column = 0; column < matrix.cols; column += 2, out += LINE)
      for (int r = 0; r < PANEL; r++) std::memcpy(out + 4 * r, raw + r * row_bytes + 2 * column, 4);
    return 0;
  }
  RawBlock rows[PANEL];
  float highest = 0;
  for (int block = 0; block < matrix.cols / l.block; block++, scales += l.scale_bytes) {
    for (int r = 0; r < PANEL; r++) read_block(matrix.format, raw + r * row_bytes + size_t(block) * l.raw_bytes, rows[r]);
    uint16_t* halves = (uint16_t*)scales;
    for (int r = 0; r < PANEL; r++) {
      if (l.floats)
        scales[r] = rows[r].scales[0];
      else
        halves[r] = rows[r].d;
      const float size = bound(matrix.format, rows[r]);
      highest = std::isfinite(size) ? std::max(highest, size) : INFINITY;  // of a NaN max takes the other
      if (l.zero == 0) halves[PANEL + r] = rows[r].m;
      if (matrix.format == Q6_K)
        for (int g = 0; g < 16; g++) scales[32 + PANEL * g + r] = rows[r].scales[g];
      if (matrix.format == Q4_K || matrix.format == Q5_K)
        for (int g = 0; g < 8; g++) {
          scales[64 + PANEL * 2 * g + r] = rows[r].scales[g];
          scales[64 + PANEL * (2 * g + 1) + r] = rows[r].mins[g];
        }
    }
    for (int g = 0; g < l.block / GROUP; g++, out += group_bytes(l.bits))
      pack_group([&](int row, int column) { return rows[row].q[g * GROUP + column]; }, l.bits, out);
  }
  return highest;
}

// The scales of both halves of a block's group g, and the number added to each of its weights: see load_scales.
struct RawScales {
  float first, second, minimum;
};

inline RawScales raw_scales(Format format, const RawBlock& block, int g) {
  if (format == MXFP4) {
    const float scale = std::ldexp(1.0f, block.scales[0] - E8M0_HALF);
    return {scale, scale, 0};
  }
  const float d = from_half(block.d), m = from_half(block.m);
  if (format == Q6_K) return {d * int8_t(block.scales[2 * g]), d * int8_t(block.scales[2 * g + 1]), 0};
  const bool nested = LAYOUTS[format].block == 256;
  const float scale = nested ? d * block.scales[g] : d;
  return {scale, scale, !has_minima(format) ? 0 : nested ? 0 - m * block.mins[g] : m};
}

inline size_t raw_row_bytes(Format format, int cols) {
  return size_t(cols) / LAYOUTS[format].block * LAYOUTS[format].raw_bytes;
}

// One row in float32, the same values as unpack_row's.
inline void read_row(Format format, const uint8_t* raw, int cols, float* out) {
  const Layout& l = LAYOUTS[format];
  RawBlock block;
  for (const float* end = out + cols; out < end; raw += l.raw_bytes) {
    if (format == BF16) {
      for (int c = 0; c < GROUP; c++) {
        uint16_t b;
        std::memcpy(&b, raw + 2 * c, 2);
        *out++ = from_bf16(b);
      }
      continue;
    }
    read_block(format, raw, block);
    for (int g = 0; g < l.block / GROUP; g++) {
      const RawScales scales = raw_scales(format, block, g);
      for (int c = 0; c < GROUP; c++)
        *out++ = (c < GROUP / 2 ? scales.first : scales.second) * float(l.number(block.q[g * GROUP + c])) + scales.minimum;
    }
  }
}
