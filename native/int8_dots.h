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

// Signed weights of 8 bits count from 128, and have no other zero point (`zero_of`).
template <int BITS, bool FLOATS = false>
class Quants {
 public:
  [[gnu::always_inline]] explicit Quants(const uint8_t* group) {  // not inlined, the weights would go through memory
    load_group<BITS, FLOATS>(group, w_);
    if constexpr (SIGNED_WEIGHTS && BITS == 8)
      for (I& w : w_) w = w ^ int_set1(int(0x80808080));
  }

  template <int FROM, int N, int M>
  void dot(const int8_t* q, I* sums) const {
    if constexpr (M > DOT_ROWS) {  // as many rows at a time as registers hold
      dot<FROM, N, DOT_ROWS>(q, sums);
      dot<FROM, N, M - DOT_ROWS>(q + DOT_ROWS * GROUP, sums + DOT_ROWS);
    } else {
#pragma GCC unroll 8
      for (int j = FROM; j < FROM + N; j += 4)
#pragma GCC unroll 4
        for (int m = 0; m < M; m++) sums[m] = dot16(sums[m], w_ + j, q + m * GROUP + 4 * j);
    }
  }

 private:
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

#ifdef __ARM_FEATURE_MATMUL_INT8
// The same for an even number of rows: an instruction multiplies eight columns of two outputs and two rows. The weights of
// two chunks are zipped for it, once for all rows.
template <int BITS, bool FLOATS>
class PairedQuants {
 public:
  [[gnu::always_inline]] explicit PairedQuants(const uint8_t* group) {
    load_group<BITS, FLOATS>(group, w_);
    for (int j = 0; j < 8; j += 2) zip(w_[j], w_[j + 1]);
  }

  template <int FROM, int N, int M>
  void dot(const int8_t* q, I* sums) const {
    static_assert(M <= DOT_ROWS && M % 2 == 0 && N % 4 == 0);
#pragma GCC unroll 2
    for (int m = 0; m < M; m += 2) zip(sums[m], sums[m + 1]);
#pragma GCC unroll 2
    for (int j = FROM; j < FROM + N; j += 4)
#pragma GCC unroll 2
      for (int m = 0; m < M; m += 2) dot_pair(sums + m, w_ + j, q + m * GROUP + 4 * j, q + (m + 1) * GROUP + 4 * j);
#pragma GCC unroll 2
    for (int m = 0; m < M; m += 2) unzip(sums[m], sums[m + 1]);
  }

 private:
  I w_[8];
};

// The quants of a format, for products of ROWS rows.
template <Format T, int ROWS>
using QuantsOf = std::conditional_t<(ROWS > 1), PairedQuants<LAYOUTS[T].bits, LAYOUTS[T].floats>,
                                    Quants<LAYOUTS[T].bits, LAYOUTS[T].floats>>;
#else
template <Format T, int>
using QuantsOf = Quants<LAYOUTS[T].bits, LAYOUTS[T].floats>;
#endif
