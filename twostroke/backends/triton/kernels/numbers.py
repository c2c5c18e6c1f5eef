"""Rounding, products and exact powers of two: the arithmetic that all kernels share.

A formula that is in two kernels must give the same bits in both, so it is here once. Triton's interpreter (version 3.6)
truncates float32 to bfloat16, and multiplies bfloat16 as raw bits. There the helpers compute in another way, to the
same effect.
"""

import os

import triton
import triton.language as tl

INTERPRET: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")


@triton.jit
def narrow(x):
    """Float32 to bfloat16, to nearest even."""
    if INTERPRET:
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        quiet = (bits >> 16) | 0x40  # a NaN stays one
        return tl.where(x == x, rounded, quiet).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(tl.bfloat16)


@triton.jit
def dot(a, b, acc):
    """acc + a b: bfloat16 [M, K] and [K, N], float32 [M, N]."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    return tl.dot(a, b, acc)


@triton.jit
def power_of_two(exponent):
    """2**exponent of integers in float32, exactly; 0 for exponents below -126, and for -inf."""
    whole = tl.maximum(exponent, -127.0).to(tl.int32)
    return ((whole + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def activate(gate, up, ACTIVATION: tl.constexpr):
    """activation(gate) * up, of float32; the activation by its place in `ACTIVATIONS`."""
    if ACTIVATION == 2:
        # Not by minimum and maximum, which hide what is NaN.
        gate = tl.where(gate > 7.0, 7.0, gate)
        up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        return gate / (1.0 + tl.exp(-1.702 * gate)) * (up + 1.0)
    if ACTIVATION == 1:  # GELU in its tanh form
        # 1 + tanh(y) = 2 sigmoid(2 y)
        y = gate * 1.5957691216057308 * tl.fma(0.044715 * gate, gate, tl.zeros_like(gate) + 1.0)
        return gate / (1.0 + tl.exp(-y)) * up
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def rms(squares, count, eps):
    """1 / sqrt(mean square + eps), of a sum of squares."""
    return 1.0 / tl.sqrt(squares / count + eps)


@triton.jit
def sigmoid(x):
    """Of float32."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def tanh(x):
    """Of float32; fused on purpose, as where a compiler does so depends on what is around it."""
    return tl.fma(sigmoid(2.0 * x), tl.zeros_like(x) + 2.0, tl.zeros_like(x) - 1.0)
