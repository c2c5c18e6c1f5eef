"""Rounding, products and exact powers of two: the arithmetic that all kernels share.

A formula that is in two kernels must give the same bits in both, so it is here once. Triton's interpreter (version 3.6)
truncates float32 to bfloat16, and multiplies bfloat16 as raw bits. There the helpers compute in another way, to the
same effect.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

INTERPRET: tl.constexpr = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
# Whether a kernel may start before the one before it has ended (programmatic dependent launch, from Hopper on).
EARLY = not INTERPRET.value and torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9
_EARLY: tl.constexpr = tl.constexpr(EARLY)


@triton.jit
def announce():
    """Let the next kernel's programs start where there is room for them: first thing in each kernel."""
    if _EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def wait():
    """Wait until the results of the kernels before are there: before anything that they write is read."""
    if _EARLY:
        cuda.gdc_wait()


@triton.jit
def begin():
    """Both: so the next kernel's programs are in place when this one's end."""
    announce()
    wait()


@triton.jit
def fetch(rows, first, last, COLUMNS: tl.constexpr):
    """Have columns [first, first + COLUMNS) of bfloat16 rows, pointers [F], brought to the cache, up to `last`.

    Called before `wait`: weights come while the kernels before are still at work, which read little.
    """
    if _EARLY:
        lines = first + 64 * tl.arange(0, COLUMNS // 64)  # of 128 bytes
        places = (rows[:, None] + tl.minimum(lines, last - 1)[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1
        )


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
def activate(gate, GELU: tl.constexpr):
    """SiLU, or GELU in its tanh form, of float32."""
    if GELU:
        # 1 + tanh(y) = 2 sigmoid(2 y)
        y = gate * 1.5957691216057308 * (1.0 + 0.044715 * gate * gate)
        return gate / (1.0 + tl.exp(-y))
    return gate / (1.0 + tl.exp(-gate))


@triton.jit
def rms(squares, count, eps):
    """1 / sqrt(mean square + eps), of a sum of squares."""
    return 1.0 / tl.sqrt(squares / count + eps)
