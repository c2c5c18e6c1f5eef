// Products of a group's unsigned quants with int8 activations, a chunk at a time: four columns of 16 rows.
#pragma once
#include "weights.h"

#ifdef __AVX512VNNI__
constexpr int DOT_ROWS = 8;  // rows whose sums fit in registers beside the weights

template <int BITS, bool FLOATS = false>
class Quants {
 public:
  explicit Quants(const uint8_t* group) { load_group<BITS, FLOATS>(group, w_); }
  I operator[](int chunk) const { return w_[chunk]; }

  // Adds the products of N chunks from FROM on with M rows of activations, [M, GROUP] at q.
  template <int FROM, int N, int M>
  void dot(const int8_t* q, I* sums) const {
#pragma GCC unroll 8
    for (int j = FROM; j < FROM + N; j++)
#pragma GCC unroll 16
      for (int m = 0; m < M; m++) sums[m] = dot4(sums[m], w_[j], q + m * GROUP + 4 * j);
  }

 private:
  I w_[8];
};
#elif defined(__ARM_NEON)
constexpr int DOT_ROWS = 4;

// The instruction wants signed weights. So 128 is subtracted from those of 8 bits, and its products are added.
template <int BITS, bool FLOATS = false>
class Quants {
 public:
  explicit Quants(const uint8_t* group) {
    load_group<BITS, FLOATS>(group, w_);
    if constexpr (BITS == 8)
      for (I& w : w_) w = w ^ int_set1(int(0x80808080));
  }

  template <int FROM, int N, int M>
  void dot(const int8_t* q, I* sums) const {
    if constexpr (M > DOT_ROWS) {  // as many rows at a time as registers hold
      dot<FROM, N, DOT_ROWS>(q, sums);
      dot<FROM, N, M - DOT_ROWS>(q + DOT_ROWS * GROUP, sums + DOT_ROWS);
    } else {
#pragma GCC unroll 8
      for (int j = FROM; j < FROM + N; j++)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m] = dot4(sums[m], w_[j], q + m * GROUP + 4 * j);
      if constexpr (BITS == 8)
        for (int m = 0; m < M; m++) sums[m] = add(sums[m], int_set1(128 * total<4 * N>(q + m * GROUP + 4 * FROM)));
    }
  }

 private:
  template <int COUNT>
  static int32_t total(const int8_t* q) {
    int32_t total = 0;
    for (int i = 0; i < COUNT; i++) total += q[i];
    return total;
  }

  I w_[8];
};
#else
constexpr int DOT_ROWS = 4;

// Without VNNI an instruction adds the products of two columns, as 16-bit words. The words of several chunks are added
// before they are widened: of all eight chunks with 4 bits (15 * 127 * 2 * 8 < 2^15), of four with 5 or
// with E2M1 (28 * 127 * 2 * 4), of two with 6. Eight bits are multiplied as two nibbles.
//
// Empty asm statements keep the compiler from using more registers: from another order of additions, in which all
// products exist at once, and from keeping some of the weights. Two products and then two additions are the fastest
// order on Zen 3.
template <int BITS, bool FLOATS = false>
class Quants {
 public:
  [[gnu::always_inline]] explicit Quants(const uint8_t* group) {
    load_group<BITS, FLOATS>(group, w_);
    if constexpr (BITS == 8)
      for (int j = 0; j < 8; j++) w_[8 + j] = high_nibbles(w_[j]), w_[j] = low_nibbles(w_[j]);
  }

  template <int FROM, int N, int M>
  void dot(const int8_t* q, I* sums) const {
    if constexpr (M > DOT_ROWS) {  // as many rows at a time as registers hold
      dot<FROM, N, DOT_ROWS>(q, sums);
      dot<FROM, N, M - DOT_ROWS>(q + DOT_ROWS * GROUP, sums + DOT_ROWS);
    } else {
      constexpr int TOGETHER = std::min(N, BITS == 5 || FLOATS ? 4 : BITS == 6 ? 2 : 8);
#pragma GCC unroll 4
      for (int j = FROM; j < FROM + N; j += TOGETHER) add<TOGETHER, M, 1>(w_ + j, q + 4 * j, sums);
      if constexpr (BITS == 8) add<N, M, 16>(w_ + 8 + FROM, q + 4 * FROM, sums);
    }
  }

 private:
  template <int N, int M, int TIMES>
  static void add(const I* w, const int8_t* q, I* sums) {
    if constexpr (M > 1) asm("" : "+r"(w) : : "memory");
    I words[M];
#pragma GCC unroll 8
    for (int j = 0; j < N; j++) {
      I weights = w[j];
      if constexpr (M > 1) keep(weights);
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) {
        I products = times_bytes(weights, int_set1(word_at(q + m * GROUP + 4 * j)));
        keep(products);
        words[m] = j ? add_words(words[m], products) : products;
        keep(words[m]);
      }
    }
    for (int m = 0; m < M; m++) sums[m] = add_both<TIMES>(sums[m], words[m]);
  }
  static void keep(I& v) { asm("" : "+x"(v.a), "+x"(v.b)); }

  I w_[BITS == 8 ? 16 : 8];
};
#endif

// The quants of a format.
template <Format T>
using QuantsOf = Quants<LAYOUTS[T].bits, LAYOUTS[T].floats>;
