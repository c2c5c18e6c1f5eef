"""The GPU backend (Triton): bfloat16 activations and KV, float32 sums, weights in their GGUF formats or bfloat16.

A row's result has the same bits for any batch, chunk, page and split: what is summed in which order is fixed by the
shapes of the weights and by the row's place in its sequence. Without a GPU it runs in Triton's interpreter, for tests:
set TRITON_INTERPRET=1 before anything imports Triton.
"""

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path

import torch
import triton

from twostroke.backends.interface import ONE_RANK, CompiledModel, Weights
from twostroke.backends.page_memory import PageMemory
from twostroke.backends.ranks import collectives
from twostroke.backends.ranks.collectives import Collectives, device_of
from twostroke.backends.reference.memory import DeviceMemory, device_kv_room
from twostroke.backends.torch_follower import FollowerParts
from twostroke.backends.torch_ranks import TorchRanks
from twostroke.backends.triton.kernels.numbers import INTERPRET
from twostroke.backends.triton.model import TritonModel
from twostroke.backends.triton.packed import PACKED_FORMATS
from twostroke.backends.triton.pass_plan import tall_of
from twostroke.backends.triton.recurrent import lacking
from twostroke.backends.triton.sharded import ShardedTritonModel
from twostroke.errors import OutOfPages, RankLost
from twostroke.models.config import Experts, Layer, ModelConfig
from twostroke.models.feed_forward import UNGATED
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.kv_formats import CODED
from twostroke.models.layer_groups import PageShape

CAPABILITY = (9, 0)  # CUDA's number of the GPUs that the backend was tried on
KV_DTYPES = ("bfloat16", *CODED)
WIDEST_HEAD, NARROWEST_CODED = 512, 16
COPIED = 8  # columns that the bulk copy engine takes at least: 16 bytes
MAX_SLOTS = 1 << 31  # of a pool: kernels count them in 32 bits


class TritonBackend:
    """Implements `Backend`."""

    name = "triton"
    threads = 1
    dtype = "bfloat16"
    formats: Collection[str] | None = (*PACKED_FORMATS, "BF16", "MXFP4")  # the last as bfloat16, exactly

    def __init__(self, device: str = "cuda", tp: int = 1, kv_dtype: str = "bfloat16") -> None:
        """Start other processes if there are to be several ranks, `tp`. Raises RuntimeError if it cannot be used.

        `device`: "cuda", "cuda:1"; with ranks "cuda", a GPU for each; "cpu" in the interpreter. `kv_dtype`:
        one of `KV_DTYPES`.
        """
        if reason := unavailable(device, tp):
            raise RuntimeError(reason)
        self.ranks = TorchRanks("triton", tp, device, DeviceMemory, (kv_dtype,)) if tp > 1 else None
        self.device = device = device if self.ranks is None else self.ranks.links.device
        self.label = self.name + (f" in {tp} ranks" if tp > 1 else "")
        self.kv_dtype, self.takes_bias = kv_dtype, tp == 1
        # The interpreter multiplies by numpy, whose sums depend on shapes.
        self.exact = self.asynchronous = device.startswith("cuda")
        kind = torch.cuda.get_device_name(device) if device.startswith("cuda") else "interpreter"
        self.arithmetic = f"triton {triton.__version__} {kind} {_digest()}"

    @property
    def failure(self) -> RankLost | None:
        return None if self.ranks is None else self.ranks.group.failure

    def unsupported(self, config: ModelConfig, matrices: Mapping[str, RawTensor], page_size: int) -> str | None:
        if self.ranks is not None and config.state_layers:
            return ONE_RANK
        if self.ranks is not None and (lacking := _without_ranks(config)):
            return f"its ranks have no {lacking}: leave out tp"
        return unsupported(config, matrices, self.kv_dtype)

    def weight_bytes(self, tensor: RawTensor) -> int:
        return tensor.nbytes if tensor.format in PACKED_FORMATS else 2 * tensor.num_elements

    def kv_room(self, weights: int) -> int:
        return device_kv_room(self.device, weights) if self.ranks is None else self.ranks.kv_room(weights)

    def memory(self, num_pages: int, shape: PageShape) -> PageMemory:
        if num_pages * shape.page_size >= MAX_SLOTS:
            raise OutOfPages(f"a pool on a GPU has at most {MAX_SLOTS:,} slots: give it less (kv_bytes)")
        if self.ranks is not None:
            return self.ranks.memory(num_pages, shape)
        return DeviceMemory(num_pages, shape, self.device)

    def compile(self, config: ModelConfig, weights: Weights, beside: CompiledModel | None = None) -> TritonModel:
        if self.ranks is None:
            return TritonModel(config, self.device, weights, self.kv_dtype)
        with self.ranks.compiling(config, weights) as (number, parts):
            return ShardedTritonModel(config, self.ranks.links, parts, self.kv_dtype, (self.ranks, number))


def unavailable(device: str, ranks: int = 1) -> str | None:
    """Say why the backend cannot run on a device, or on those of so many ranks of this host; None if it can."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return None if INTERPRET.value else f"it computes on a GPU (--device cuda), not on {device}"
    if INTERPRET.value:
        return "TRITON_INTERPRET=1 makes Triton compute on the CPU: unset it"
    if not torch.cuda.is_available() or torch.version.hip:
        return "PyTorch finds no CUDA device"
    if number and not (number.isdecimal() and int(number) < torch.cuda.device_count()):
        return f"there is no {device}: PyTorch finds {torch.cuda.device_count()}"
    for one in {device if ranks == 1 else device_of(rank, device, collectives.ONE_GPU) for rank in range(ranks)}:
        if (found := torch.cuda.get_device_capability(one)) != CAPABILITY:
            name, version = torch.cuda.get_device_name(one), ".".join(map(str, found))
            return f"its tiles and its bits are those of Hopper (H100, H200), and this is a {name} ({version})"
    return None


def rank_of(links: Collectives, kv_dtype: str) -> FollowerParts:
    """What a rank other than 0 makes."""
    return DeviceMemory, lambda config, parts: ShardedTritonModel(config, links, parts, kv_dtype)


def unsupported(config: ModelConfig, matrices: Mapping[str, RawTensor], kv_dtype: str = "bfloat16") -> str | None:
    """Say why the backend cannot run a model with these matrices; None if it can."""
    if config.latent:
        return "it has no kernel for latent entries (MLA)"
    if any(layer.beside for layer in config.layers):
        return "it has no kernel for attention and states beside each other"
    if any(layer.feed_forward.activation == UNGATED for layer in config.layers):
        return "it has no kernel for MLPs without a gate, or layers without an MLP"
    if any(isinstance(layer.feed_forward, Experts) and layer.feed_forward.groups > 1 for layer in config.layers):
        return "it has no kernel for groups of experts"
    for heads, (kv_heads, dim) in dict.fromkeys((one.num_heads, one.kv_shape) for one in config.attentions):
        if dim > WIDEST_HEAD or dim % 2:
            return f"it wants heads of an even width, at most {WIDEST_HEAD}, not {dim}"
        if kv_dtype in CODED and (dim < NARROWEST_CODED or dim & (dim - 1)):
            return f"it stores heads in {kv_dtype} whose width is a power of 2 from {NARROWEST_CODED}, not {dim}"
        if heads % kv_heads:
            return f"it wants as many query heads for each KV head, not {heads} for {kv_heads}"
        if heads // kv_heads > (most := tall_of(dim)):
            return f"it wants at most {most} query heads for a KV head"
    if part := lacking(list(config.state_layers.values())):
        return f"it has no kernel for {part}"
    if config.takes_hidden:
        return "it has no kernel for hidden states of another model"
    if config.both_ways:
        return "it has no kernel for attention in both directions"
    for name, tensor in matrices.items():
        if tensor.shape[1] % COPIED:
            return f"it wants multiples of {COPIED} columns, not {tensor.shape[1]} ({name})"
    return None


def has_shared_expert(layer: Layer) -> bool:
    """Whether every token passes an expert beside those that are chosen."""
    return isinstance(layer.feed_forward, Experts) and layer.feed_forward.shared_size > 0


def _without_ranks(config: ModelConfig) -> str | None:
    """A part of the model, in words, that only a single process computes; None if there is none."""
    if any(map(has_shared_expert, config.layers)):
        return "shared experts"
    if not config.uniform or config.sources or config.token_inputs:
        return "layers of several sizes, or with numbers of tokens"
    return None


def _digest() -> str:
    """A digest of the kernels and of the choices that bits depend on."""
    here = Path(__file__).parent
    used = ["linear", "packed", "experts", "pass_plan", "decoder", "layers", "recurrent", "state_plan"]
    choices = (here / f"{name}.py" for name in [*used, "attention", "token_inputs"])
    sources = [*sorted((here / "kernels").glob("*.py")), *choices]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
