"""The native CPU backend (native/*): a whole forward pass in one call, over weights in their GGUF formats.

Activations are quantized to int8 per token and group of 32, and multiplied by 4- to 8-bit weights with VNNI. For
bfloat16 weights, and always with AMX, they are rounded to bfloat16. KV is bfloat16 or int8 in the "pairs" layout. A
row's result has the same bits for any batch, chunk and thread count.
"""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from twostroke.backends.hidden_inputs import ONE_PROCESS, HiddenJoin
from twostroke.backends.interface import NO_CODES, NO_RANKS, ONE_RANK, CompiledModel, Weights
from twostroke.backends.native import library
from twostroke.backends.native.model import KV_DTYPES, NativeModel
from twostroke.backends.native.shared_memory_ranks import SharedMemoryRanks
from twostroke.backends.native.statistics import NativeStatistics
from twostroke.backends.native.streamed import StreamedModel
from twostroke.backends.native.weight_sources import WholeWeights
from twostroke.backends.native.weights import FORMATS, PAGE_SIZE, PANEL
from twostroke.backends.page_memory import HostMemory, PageMemory, host_kv_room
from twostroke.backends.ranks.processes import under_torchrun
from twostroke.errors import RankLost
from twostroke.models.config import Experts, ModelConfig
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.formats.transcode import SUBSTITUTES
from twostroke.models.kv_formats import kv_format
from twostroke.models.layer_groups import PageShape
from twostroke.models.recurrent import RecurrentMixer, ShortConvolution

if TYPE_CHECKING:
    from twostroke.backends.native.distributed_ranks import DistributedRanks

CHUNK = 64  # native/states.h
MAX_TOKEN_INPUTS = 1024  # as in native/decoder.h
MAX_CODED_HEAD = 512  # native/rotation.h
# Matrices with any number of rows: for tokens, or for heads.
PADDED = ("embed", "head", "inputs.embed", ".state_b", ".state_a")


class NativeBackend:
    """Implements `Backend`, in one process or in several ranks."""

    name = "native"
    exact = True
    asynchronous = False
    takes_bias = True
    formats: Collection[str] | None = FORMATS

    def __init__(self, threads: int, variant: str | None = None, tp: int = 1, kv_dtype: str = KV_DTYPES[0]) -> None:
        """Start threads, and other processes if there are to be several ranks.

        Args:
            threads: of each rank.
            variant: one of `library.variants()`; None is the one with the fastest prefill.
            tp: number of ranks.
            kv_dtype: one of `KV_DTYPES`.
        """
        self.device, self.dtype, self.kv_dtype = "cpu", "float32", kv_dtype
        self.variant, self.threads, self.tp = variant or library.variants()[0], threads, tp
        self.label = f"native-{self.variant}" + (f" in {tp} ranks" if tp > 1 else "")
        self.ranks = _ranks(self.variant, threads, tp) if tp > 1 else None
        self.team = library.ThreadTeam(self.variant, threads) if self.ranks is None else self.ranks.team
        self.statistics = NativeStatistics(self.team)

    @property
    def failure(self) -> RankLost | None:
        return None if self.ranks is None else self.ranks.failure

    @property
    def arithmetic(self) -> str:
        """Variants round differently, and so may builds of one, and approximate instructions of other vendors."""
        variant = library.same_bits(self.variant)
        return f"native-{variant}-{library.digest(variant)}-{library.vendor()}"

    def unsupported(self, config: ModelConfig, matrices: Mapping[str, RawTensor], page_size: int) -> str | None:
        return unsupported(config, matrices, page_size, self.tp, self.kv_dtype)

    def weight_bytes(self, tensor: RawTensor) -> int:
        return tensor.nbytes

    def kv_room(self, weights: int) -> int:
        return host_kv_room()

    def memory(self, num_pages: int, shape: PageShape) -> PageMemory:
        if self.ranks is None:
            return HostMemory(num_pages, shape, "pairs")
        return self.ranks.memory(num_pages, shape)

    def stream(self, config: ModelConfig, weights: Weights) -> NativeModel:
        """A model whose layers are read in every pass: their inputs and outputs are hidden states and entries alone."""
        source = WholeWeights(config, weights)
        return StreamedModel(self.team, self.statistics, config, self.kv_dtype, source, resident=False)

    def compile(self, config: ModelConfig, weights: Weights, beside: CompiledModel | None = None) -> NativeModel:
        if self.ranks is None:
            join = HiddenJoin.of(weights, config.norm_eps) if config.takes_hidden else None
            head = beside.head if isinstance(beside, NativeModel) else None
            source = WholeWeights(config, weights)
            return NativeModel(self.team, self.statistics, config, self.kv_dtype, source, join=join, head=head)
        with self.ranks.compiling(config, self.kv_dtype, weights) as parts:
            return NativeModel(self.team, self.statistics, config, self.kv_dtype, parts, self.ranks.call)


def _ranks(variant: str, threads: int, tp: int) -> "SharedMemoryRanks | DistributedRanks":
    """Other ranks on this host, or those that `torchrun` has started. Raises InvalidRequest, RankLost."""
    if not under_torchrun():
        return SharedMemoryRanks(variant, threads, tp)
    from twostroke.backends.native.distributed_ranks import DistributedRanks  # imports PyTorch

    return DistributedRanks(variant, threads, tp)


def unsupported(
    config: ModelConfig, matrices: Mapping[str, RawTensor], page_size: int, tp: int = 1, kv_dtype: str = KV_DTYPES[0]
) -> str | None:
    """Say why no variant can run a model with these matrices in `tp` ranks; None if they can."""
    if page_size != PAGE_SIZE:
        return f"it needs pages of {PAGE_SIZE} entries, not {page_size}"
    if tp > 1 and config.takes_hidden:
        return ONE_PROCESS
    if tp > 1 and config.latent:
        return NO_RANKS
    if config.latent and kv_format(kv_dtype).codes:
        return NO_CODES
    latents = [one.latent for one in config.attentions if one.latent is not None]
    if any(size % 32 for one in latents for size in (one.rank, one.rotated, one.plain, one.value)):
        return f"it wants parts of latent attention of a multiple of 32, not {latents[0]}"
    if tp > 1 and config.state_layers and under_torchrun():
        return ONE_RANK
    if (dim := next((one.head_dim for one in config.attentions if one.head_dim % 32), None)) is not None:
        return f"it wants heads of a multiple of 32, not {dim}"
    largest = max((one.head_dim for one in config.attentions), default=0)
    if kv_format(kv_dtype).codes and largest > MAX_CODED_HEAD:
        return f"it stores K and V in {kv_dtype} for heads of at most {MAX_CODED_HEAD} numbers, not {largest}"
    if (sizes := next((size for one in config.state_layers.values() if (size := _odd_size(one))), None)) is not None:
        return f"it wants heads and channels of states of a multiple of 32, not {sizes}"
    if any(one.output_gate and (one.bias or one.whole_norm) for one in config.attentions):
        return "it has no gate of attention beside biases, or norms over all heads"
    if tp > 1 and any(layer.beside for layer in config.layers):
        return "it computes attention and states beside each other in one process: leave out tp"
    if len({layer.feed_forward.activation for layer in config.layers}) > 1:
        return "it wants one activation for all layers"
    mixed = ((layer.post_norms, layer.feed_forward) for layer in config.layers)
    if any(isinstance(one, Experts) and normed != one.own_norms for normed, one in mixed):
        return "it has norms behind experts where these have their own"
    if any(layer.scaled and not layer.post_norms for layer in config.layers):
        return "it scales no layers without norms behind their parts"
    if any(one.value_norm and (one.whole_norm or not one.qk_norm) for one in config.attentions):
        return "it norms values where it norms each head of queries and keys"
    if config.token_inputs > MAX_TOKEN_INPUTS or config.token_inputs % 32:
        return f"it wants multiples of 32 numbers of a token for each layer, at most {MAX_TOKEN_INPUTS}"
    for name, tensor in matrices.items():
        if tensor.format not in FORMATS and tensor.format not in SUBSTITUTES:
            return f"it has no kernels for {tensor.format} weights ({tensor.name})"
        if tensor.shape[1] % 32 or (tensor.shape[0] % PANEL and not name.endswith(PADDED)):
            return f"it needs multiples of {PANEL} rows and 32 columns, not {tensor.shape} ({tensor.name})"
    return None


def _odd_size(state: RecurrentMixer) -> int | None:
    """A size of heads that kernels do not have; None if they have both."""
    assert state.chunk == CHUNK, "the kernels' own"
    sizes = (state.conv_size,) if isinstance(state, ShortConvolution) else (state.k_dim, state.v_dim)
    return next((size for size in sizes if size % 32), None)
