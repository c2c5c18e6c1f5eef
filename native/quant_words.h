// Quants of 5 and 6 bits as fields of words, for AMX: one mask makes a field the fraction of a float16.
//
// A line is 32 words, two columns of each row: a pair. The 16 pairs of a group are the rows of a tile. 5 bits: pairs 3
// j to 3 j + 2 fill line j except the highest bit of its words; pair 15 is in these bits. 6 bits: pairs 2 j and 2 j + 1
// fill line j except four bits. Pairs 12 to 15 have their lower bits there, in lines 0 to 3, and their two higher bits
// in lines 4 and 5.
#pragma once
#include <cstring>

#include "memory.h"

constexpr bool in_words(int bits) {
#ifdef __AMX_BF16__
  return bits == 5 || bits == 6;
#else
  return false;
#endif
}

// `count` bits of a quant, from bit `from` on, are in the words of a line, at bit `at`.
struct Field {
  int line, at, from, count;
};

// Calls action(field) for each field of a pair's quants.
template <class Action>
inline void with_fields(int bits, int pair, const Action& action) {
  if (bits == 5 && pair < 15) return action(Field{pair / 3, pair % 3 * 5, 0, 5});
  if (bits == 5)
    for (int j = 0; j < 5; j++) action(Field{j, 15, 4 - j, 1});
  else if (pair < 12)
    action(Field{pair / 2, 4 + pair % 2 * 6, 0, 6});
  else
    action(Field{pair - 12, 0, 0, 4}), action(Field{4 + (pair - 12) / 2, pair % 2 * 2, 4, 2});
}

// The first and the third of four columns are a pair, in the order of activations.
constexpr int pair_of(int column) { return column / 4 * 2 + column % 2; }
constexpr int column_of(int pair, int which) { return pair / 2 * 4 + pair % 2 + 2 * which; }

template <class Quant>
inline void pack_words(const Quant& quant, int bits, uint8_t* out) {
  uint16_t words[6][LINE / 2] = {};
  for (int pair = 0; pair < 16; pair++)
    with_fields(bits, pair, [&](Field f) {
      for (int w = 0; w < LINE / 2; w++)
        words[f.line][w] |= (quant(w / 2, column_of(pair, w % 2)) >> f.from & ((1 << f.count) - 1)) << f.at;
    });
  std::memcpy(out, words, size_t(bits) * LINE);
}

inline int quant_in_words(const uint8_t* group, int bits, int row, int column) {
  int quant = 0;
  with_fields(bits, pair_of(column), [&](Field f) {
    uint16_t word;
    std::memcpy(&word, group + f.line * LINE + 4 * row + column % 4 / 2 * 2, 2);
    quant |= (word >> f.at & ((1 << f.count) - 1)) << f.from;
  });
  return quant;
}
