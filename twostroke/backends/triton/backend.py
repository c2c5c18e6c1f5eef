"""The GPU backend (Triton): bfloat16 activations and KV, float32 sums, weights in their GGUF formats or bfloat16.

A row's result has the same bits for any batch, chunk, page and split: what is summed in which order is fixed by the
shapes of the weights and by the row's place in its sequence. Without a GPU it runs in Triton's interpreter, for tests:
set TRITON_INTERPRET=1 before anything imports Triton.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import triton

from twostroke.backends.interface import Weights
from twostroke.backends.memory import Memory
from twostroke.backends.reference.memory import DeviceMemory, device_kv_room
from twostroke.backends.triton.compiled import TritonModel
from twostroke.backends.triton.kernels.numbers import INTERPRET
from twostroke.backends.triton.packed import FORMS
from twostroke.backends.triton.work import tall_of
from twostroke.formats.tensor import RawTensor
from twostroke.models.config import ModelConfig

WIDEST_HEAD = 256


class TritonBackend:
    """Implements `Backend`."""

    name = label = "triton"
    threads = 1
    dtype = kv_dtype = "bfloat16"
    formats: Collection[str] | None = (*FORMS, "BF16")

    def __init__(self, device: str = "cuda") -> None:
        """`device`: "cuda", "cuda:1"; "cpu" in the interpreter. Raises RuntimeError if it cannot be used."""
        if reason := unavailable(device):
            raise RuntimeError(reason)
        self.device = device
        # The interpreter multiplies by numpy, whose sums depend on shapes.
        self.exact = self.asynchronous = device.startswith("cuda")
        kind = torch.cuda.get_device_name(device) if device.startswith("cuda") else "interpreter"
        self.arithmetic = f"triton {triton.__version__} {kind} {_digest()}"

    def unsupported(self, config: ModelConfig, matrices: Mapping[str, RawTensor], page_size: int) -> str | None:
        return unsupported(config, matrices)

    def weight_bytes(self, tensor: RawTensor) -> int:
        return tensor.nbytes if tensor.format in FORMS else 2 * tensor.num_elements

    def kv_room(self, weights: int) -> int:
        return device_kv_room(self.device, weights)

    def memory(self, num_pages: int, num_layers: int, num_kv_heads: int, page_size: int, head_dim: int) -> Memory:
        return DeviceMemory((num_pages, num_layers, 2, num_kv_heads, page_size, head_dim), self.kv_dtype, self.device)

    def compile(self, config: ModelConfig, weights: Weights) -> TritonModel:
        try:
            return TritonModel(config, self.device, weights)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"the GPU has no room for the weights beside the KV pool: {_line(error)}") from None


def unavailable(device: str) -> str | None:
    """Why the backend cannot run on a device; None if it can."""
    if device.partition(":")[0] != "cuda":
        return None if INTERPRET.value else f"it computes on a GPU (--device cuda), not on {device}"
    if INTERPRET.value:
        return "TRITON_INTERPRET=1 makes Triton compute on the CPU: unset it"
    if not torch.cuda.is_available():
        return "PyTorch finds no CUDA device"
    return None


def unsupported(config: ModelConfig, matrices: Mapping[str, RawTensor]) -> str | None:
    """Why the backend cannot run a model with these matrices; None if it can."""
    if config.head_dim > WIDEST_HEAD or config.head_dim % 2:
        return f"it wants heads of an even width, at most {WIDEST_HEAD}, not {config.head_dim}"
    if config.num_heads // config.num_kv_heads > (most := tall_of(config.head_dim)):
        return f"it wants at most {most} query heads for a KV head"
    return None


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition(". GPU")[0]


def _digest() -> str:
    """A digest of the kernels and of the choices that bits depend on."""
    here = Path(__file__).parent
    choices = (here / f"{name}.py" for name in ("linear", "packed", "experts", "work", "decoder"))
    sources = [*sorted((here / "kernels").glob("*.py")), *choices]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
