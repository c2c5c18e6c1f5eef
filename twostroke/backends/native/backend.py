"""The native CPU backend (native/*): a whole forward pass in one call, over weights in GGUF's own bits.

Activations are quantized to int8 per token and group of 32 and multiplied by 4- to 8-bit weights with VNNI, or
rounded to bfloat16 where weights are, and everywhere with AMX. KV is bfloat16, in the pairs that attention multiplies.
A row's result is the same bit for bit in any batch, chunk and thread count (`exact` is True).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from twostroke.backends.native import library
from twostroke.backends.native.compiled import NativePass
from twostroke.backends.native.statistics import NativeStatistics
from twostroke.backends.native.weights import FORMATS, PANEL, NativeWeight, Table
from twostroke.formats.tensor import RawTensor

if TYPE_CHECKING:
    from twostroke.backends.reference.decoder import Decoder

PAGE_SIZE = 16
VOCABULARY = ("embed", "head")  # matrices with a row for each token, however many there are


def unsupported(tensors: Mapping[str, RawTensor], head_dim: int, page_size: int) -> str | None:
    """Why a model of these matrices cannot run on the native backend; None where it can."""
    if page_size != PAGE_SIZE:
        return f"it wants pages of {PAGE_SIZE} entries, not {page_size}"
    if head_dim % 32:
        return f"it wants heads of a multiple of 32, not {head_dim}"
    for name, tensor in tensors.items():
        if tensor.format not in FORMATS:
            wanted = "open the model with weights bf16, int8 or int4"
            return f"it has no kernels for {tensor.format} weights ({tensor.name}): {wanted}"
        if tensor.shape[1] % 32 or (tensor.shape[0] % PANEL and name not in VOCABULARY):
            return f"it wants multiples of {PANEL} rows and 32 columns, not {tensor.shape} ({tensor.name})"
    return None


class NativeKernels(NativeStatistics):
    name = "native"
    exact = True
    kv_in_pairs = True

    def __init__(self, threads: int, variant: str | None = None) -> None:
        """`variant` is one of `library.variants()`, the quickest unless said."""
        self.device, self.dtype, self.kv_dtype = "cpu", "float32", "bfloat16"
        self.variant, self.threads = variant or library.variants()[0], threads
        self.label = f"native-{self.variant}"
        self.arithmetic = f"{self.label} {library.digest(self.variant)}"
        super().__init__(library.Team(self.variant, threads))

    def pack(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> NativeWeight:
        return NativeWeight.of(self.team, parts, bias)

    def table(self, rows: RawTensor) -> Table:
        return Table(self.team, rows)

    def whole_pass(self, decoder: Decoder) -> NativePass:
        return NativePass(self, decoder)
