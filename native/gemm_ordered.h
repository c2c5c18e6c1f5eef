// Products of many rows with a hand-written instruction order. All multiplications on Zen 4 share one port, which stays
// busy only if some rows are multiplied while the sums of others are scaled and added. Compilers do one after the
// other. The operations on a sum, and so its bits, are those of add_rows in gemm.h.
#pragma once
#include "int8_dots.h"
#include "rows.h"

#ifdef BY_HAND
// clang-format off
#define MULTIPLY(SUM, ROW, J) "vpdpbusd 32*(" ROW ")+4*" #J "(%[q])%{1to16%}, %[w" #J "], %%zmm" #SUM "\n\t"
#define BEGIN(SUM, ROW) "vpbroadcastd 4*(" ROW ")(%[zeros]), %%zmm" #SUM "\n\t"
#define SCALE(SCALE, ROW) \
  "movl 4*(" ROW ")(%[step]), %k[entry]\n\t" \
  "vgetexpps 4*(" ROW ")(%[step])%{1to16%}, %%zmm12\n\t" \
  "shrl %[shift], %k[entry]\n\t" \
  "andl %[mask], %k[entry]\n\t" \
  "vmovaps (%[table],%[entry]), %%zmm" #SCALE "\n\t" \
  "vscalefps %%zmm12, %%zmm" #SCALE ", %%zmm" #SCALE "\n\t"
#define FLOAT(SUM) "vcvtdq2ps %%zmm" #SUM ", %%zmm" #SUM "\n\t"
#define ADD(SUM, SCALE, ROW) "vfmadd213ps 64*(" ROW ")(%[acc]), %%zmm" #SCALE ", %%zmm" #SUM "\n\t"
#define MINIMUM(SUM, ROW) \
  ".if %c[has_minima]\n\tvdpbf16ps 4*(" ROW ")(%[of])%{1to16%}, %[minima], %%zmm" #SUM "\n\t.endif\n\t"
#define STORE(SUM, ROW) "vmovaps %%zmm" #SUM ", 64*(" ROW ")(%[acc])\n\t"

// Four columns of four rows, from `ROW` on, with other work to insert after the first half and at the end.
#define CHUNK(A, B, C, D, ROW, J, HALF, ALL) \
  MULTIPLY(A, ROW "+0", J) MULTIPLY(B, ROW "+1", J) HALF MULTIPLY(C, ROW "+2", J) MULTIPLY(D, ROW "+3", J) ALL
#define BEGIN_FOUR(A, B, C, D, ROW) BEGIN(A, ROW "+0") BEGIN(B, ROW "+1") BEGIN(C, ROW "+2") BEGIN(D, ROW "+3")
// The sums of four rows, and the remaining work on the previous four sums, which are in W to Z.
#define FOUR(A, B, C, D, ROW, W, X, Y, Z, LAST) \
  BEGIN_FOUR(A, B, C, D, ROW) \
  CHUNK(A, B, C, D, ROW, 0, SCALE(8, LAST "+0") FLOAT(W), SCALE(9, LAST "+1") FLOAT(X)) \
  CHUNK(A, B, C, D, ROW, 1, SCALE(10, LAST "+2") FLOAT(Y), SCALE(11, LAST "+3") FLOAT(Z)) \
  CHUNK(A, B, C, D, ROW, 2, , ADD(W, 8, LAST "+0")) \
  CHUNK(A, B, C, D, ROW, 3, ADD(X, 9, LAST "+1"), ADD(Y, 10, LAST "+2")) \
  CHUNK(A, B, C, D, ROW, 4, ADD(Z, 11, LAST "+3"), MINIMUM(W, LAST "+0")) \
  CHUNK(A, B, C, D, ROW, 5, MINIMUM(X, LAST "+1"), MINIMUM(Y, LAST "+2")) \
  CHUNK(A, B, C, D, ROW, 6, MINIMUM(Z, LAST "+3"), STORE(W, LAST "+0") STORE(X, LAST "+1")) \
  CHUNK(A, B, C, D, ROW, 7, , STORE(Y, LAST "+2") STORE(Z, LAST "+3"))
#define FIRST_FOUR \
  BEGIN_FOUR(0, 1, 2, 3, "0") CHUNK(0, 1, 2, 3, "0", 0, , ) CHUNK(0, 1, 2, 3, "0", 1, , ) CHUNK(0, 1, 2, 3, "0", 2, , ) \
  CHUNK(0, 1, 2, 3, "0", 3, , ) CHUNK(0, 1, 2, 3, "0", 4, , ) CHUNK(0, 1, 2, 3, "0", 5, , ) \
  CHUNK(0, 1, 2, 3, "0", 6, , ) CHUNK(0, 1, 2, 3, "0", 7, , )
#define REST(SUM, ROW) SCALE(8, ROW) FLOAT(SUM) ADD(SUM, 8, ROW) MINIMUM(SUM, ROW) STORE(SUM, ROW)

// The same for two rows whose first and last columns have separate scales (Q6_K): sums in A and C, and in B and D.
#define BEGIN_LAST(SUM, ROW) "vpbroadcastd 4*(" ROW ")(%[zeros],%[apart]), %%zmm" #SUM "\n\t"
#define SCALE_LAST(SCALE) \
  "vmovaps %c[table_bytes](%[table],%[entry]), %%zmm" #SCALE "\n\t" \
  "vscalefps %%zmm12, %%zmm" #SCALE ", %%zmm" #SCALE "\n\t"
#define ADD_TO(SUM, SCALE, OTHER) "vfmadd213ps %%zmm" #OTHER ", %%zmm" #SCALE ", %%zmm" #SUM "\n\t"
#define HALVES(A, B, C, D, ROW, J, K, HALF, ALL) \
  MULTIPLY(A, ROW "+0", J) MULTIPLY(B, ROW "+0", K) HALF MULTIPLY(C, ROW "+1", J) MULTIPLY(D, ROW "+1", K) ALL
#define BEGIN_TWO(A, B, C, D, ROW) BEGIN(A, ROW "+0") BEGIN_LAST(B, ROW "+0") BEGIN(C, ROW "+1") BEGIN_LAST(D, ROW "+1")
#define TWO(A, B, C, D, ROW, W, X, Y, Z, LAST) \
  BEGIN_TWO(A, B, C, D, ROW) \
  HALVES(A, B, C, D, ROW, 0, 4, SCALE(8, LAST "+0") SCALE_LAST(9), SCALE(10, LAST "+1") SCALE_LAST(11)) \
  HALVES(A, B, C, D, ROW, 1, 5, FLOAT(W) FLOAT(X), FLOAT(Y) FLOAT(Z)) \
  HALVES(A, B, C, D, ROW, 2, 6, ADD(W, 8, LAST "+0"), ADD(Y, 10, LAST "+1")) \
  HALVES(A, B, C, D, ROW, 3, 7, ADD_TO(X, 9, W) STORE(X, LAST "+0"), ADD_TO(Z, 11, Y) STORE(Z, LAST "+1"))
#define FIRST_TWO \
  BEGIN_TWO(0, 1, 2, 3, "0") HALVES(0, 1, 2, 3, "0", 0, 4, , ) HALVES(0, 1, 2, 3, "0", 1, 5, , ) \
  HALVES(0, 1, 2, 3, "0", 2, 6, , ) HALVES(0, 1, 2, 3, "0", 3, 7, , )
#define REST_OF(SUM, NEXT, ROW) \
  SCALE(8, ROW) SCALE_LAST(9) FLOAT(SUM) FLOAT(NEXT) ADD(SUM, 8, ROW) ADD_TO(NEXT, 9, SUM) STORE(NEXT, ROW)
// clang-format on

// Adds a group's part of the sums of M rows, a multiple of eight, which begin at `at`.
template <Format T, bool MINIMA, int M>
[[gnu::always_inline]] inline void add_rows_in_order(F* acc, const QuantsOf<T, M>& w, const ManyScales* scales, Minima minima,
                                                     const Rows& rows, size_t at, const Sum* of) {
  static_assert(M % 8 == 0 && GROUP == 32 && sizeof(Sum) * TOGETHER == 4);
  const int32_t* zeros = rows.zeros + zero_at(zero_of(T)) * rows.all + at;
  const int8_t* q = rows.q + at * GROUP;
  const float* step = rows.step + at;
  size_t left = M, entry;
#define OPERANDS \
  : [q] "+r"(q), [zeros] "+r"(zeros), [step] "+r"(step), [acc] "+r"(acc), [of] "+r"(of), [left] "+r"(left), \
    [entry] "=&r"(entry) \
  : [w0] "v"(w[0]), [w1] "v"(w[1]), [w2] "v"(w[2]), [w3] "v"(w[3]), [w4] "v"(w[4]), [w5] "v"(w[5]), [w6] "v"(w[6]), \
    [w7] "v"(w[7]), [table] "r"(scales), [table_bytes] "i"(sizeof(ManyScales)), [minima] "v"(minima), \
    [has_minima] "i"(MINIMA), [shift] "i"(ManyScales::SHIFT), [mask] "i"(ManyScales::MASK), \
    [apart] "r"(rows.all * sizeof(*zeros)) \
  : "zmm0", "zmm1", "zmm2", "zmm3", "zmm4", "zmm5", "zmm6", "zmm7", "zmm8", "zmm9", "zmm10", "zmm11", "zmm12", "memory", "cc"
  // clang-format off
  if constexpr (T == Q6_K)
    asm volatile(
        FIRST_TWO
        "1:\n\t" TWO(4, 5, 6, 7, "2", 0, 1, 2, 3, "0")
        "sub $4, %[left]\n\tjz 2f\n\t" TWO(0, 1, 2, 3, "4", 4, 5, 6, 7, "2")
        "add $4*32, %[q]\n\tadd $4*4, %[zeros]\n\tadd $4*4, %[step]\n\tadd $4*64, %[acc]\n\tjmp 1b\n"
        "2:\n\t" REST_OF(4, 5, "2") REST_OF(6, 7, "3") OPERANDS);
  else
    asm volatile(
        FIRST_FOUR
        "1:\n\t" FOUR(4, 5, 6, 7, "4", 0, 1, 2, 3, "0")
        "sub $8, %[left]\n\tjz 2f\n\t" FOUR(0, 1, 2, 3, "8", 4, 5, 6, 7, "4")
        "add $8*32, %[q]\n\tadd $8*4, %[zeros]\n\tadd $8*4, %[step]\n\tadd $8*64, %[acc]\n\tadd $8*4, %[of]\n\tjmp 1b\n"
        "2:\n\t" REST(4, "4") REST(5, "5") REST(6, "6") REST(7, "7") OPERANDS);
  // clang-format on
}

#undef MULTIPLY
#undef BEGIN
#undef SCALE
#undef FLOAT
#undef ADD
#undef MINIMUM
#undef STORE
#undef CHUNK
#undef BEGIN_FOUR
#undef FOUR
#undef FIRST_FOUR
#undef REST
#undef BEGIN_LAST
#undef SCALE_LAST
#undef ADD_TO
#undef HALVES
#undef BEGIN_TWO
#undef TWO
#undef FIRST_TWO
#undef REST_OF
#undef OPERANDS
#endif
