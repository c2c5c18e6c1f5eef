"""Opens checkpoints as models that are ready to run: one alone, or with its companions.

A *student* shares the model's KV geometry and its pool: each can continue the other's KV. A *draft* only guesses
tokens; if its geometry differs, it has a separate pool.
"""

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter

import numpy as np

from twostroke.backends.choose import streaming
from twostroke.backends.interface import Backend, Weights
from twostroke.engine.memory_budget import MemoryBudget
from twostroke.engine.model import Model
from twostroke.engine.options import FIRST_LAYERS, GUESSER, OWN_DRAFTS, companion_parts
from twostroke.errors import GeometryMismatch, InvalidRequest
from twostroke.kv.backing_stores import BackingStores
from twostroke.kv.geometry import Geometry
from twostroke.kv.host_budget import HostBudget
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.tiers.tiers import Tiers
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.progress import Progress
from twostroke.models.checkpoints.quantize import changes, fitted, quantize
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.models.checkpoints.verify import verify
from twostroke.models.cost import CostModel
from twostroke.models.formats.encode import ENCODING
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.kv_formats import kv_format
from twostroke.models.rope import frequencies

log = logging.getLogger(__name__)

MIN_PAGES = 8  # of a pool whose size is chosen here: fewer hold no useful prompt


@dataclass(frozen=True)
class ModelLoader:
    """Opens the models of one engine, on one backend."""

    backend: Backend  # computes them
    index: str  # whether they have prefix indexes: one of `options.PREFIX_INDEXES`
    tiers: Tiers = field(default_factory=Tiers)  # where their pages may be besides the pools
    # what the process may take; every model that is opened adds its part
    budget: MemoryBudget = field(default_factory=MemoryBudget.now)
    # called with ("encoding weights", bytes done, total bytes) while weights are encoded
    progress: Progress | None = None
    share: float = 1.0  # the part of weights and pools that the ranks of this host hold

    @cached_property
    def _host(self) -> HostBudget:
        """The budget of all their prefix indexes in ordinary memory."""
        return HostBudget(self.tiers.host_bytes, self.tiers.host_counters)

    def load_main(
        self,
        stored: Checkpoint,  # what to load
        page_size: int,  # entries per page
        kv_bytes: int | None,  # bytes for KV pages; None: as many as the backend has room for beside the weights
        # what will be loaded after it; a pool whose size is chosen here leaves room for their weights
        companions: Iterable[Checkpoint] = (),
        resident: bool = True,  # keep its layers in memory. Otherwise every pass reads them from the file.
    ) -> Model:
        """Load a model with a tokenizer and a pool of its own.

        Raises:
            InvalidRequest: not one page fits. CheckpointError: the tokenizer or the weights cannot be read.
        """

        def pool_for(geometry: Geometry) -> PagePool:
            room = kv_bytes
            if room is None:
                room = self.backend.kv_room(sum(weight_bytes(stored, self.backend).values()))
                if self._on_host:
                    block_bytes = len(geometry.groups) * geometry.page_bytes(page_size)
                    later = sum(sum(weight_bytes(one, self.backend).values()) for one in companions)
                    left = int(self.budget.left_bytes / self.share) - later
                    room = max(min(room, left), min(room, block_bytes * MIN_PAGES))
            pages = num_pages(geometry, page_size, room)
            self._count("KV pool", pages * geometry.page_bytes(page_size))
            self.budget.require("give the pool less with kv_bytes, or raise the limit")
            return new_pool(geometry, pages, page_size, self.backend)

        return self.load(stored, Tokenizer.from_source(stored.tokenizer_source), pool_for, resident=resident)

    def load(
        self,
        stored: Checkpoint,
        tokenizer: Tokenizer,
        pool_for: Callable[[Geometry], PagePool],
        beside: Model | None = None,
        resident: bool = True,
    ) -> Model:
        """Load a checkpoint's weights. Matrices without a kernel are re-encoded, with a line in the log.

        `pool_for` returns the pool for a geometry. `beside` is the model whose head it guesses with. Raises
        CheckpointError if the weights cannot be read.
        """
        backend = self.backend
        checkpoint, start = fitted(stored, backend.formats, backend.threads), perf_counter()
        geometry = Geometry.of(checkpoint.config, backend.kv_dtype, tokenizer.fingerprint)
        _trim()  # what the tokenizer took is not to become the pool's zeros, nor to be there beside the weights
        weights = weight_bytes(checkpoint, backend)
        shared = () if beside is None else ("embed", checkpoint.config.head_tensor)
        if not resident:
            shared = [name for name in weights if name.startswith("layers.")]  # one layer at a time is small
        self._count("weights", sum(size for name, size in weights.items() if name not in shared))
        self.budget.require("take a smaller model, fewer bits (weights=int4), or raise the limit")
        pool = pool_for(geometry)
        pool.max_position = min(pool.max_position, checkpoint.config.max_position)
        identity = model_identity(checkpoint, backend, pool.page_size)
        # Entries do not follow from the tokens before them if it takes hidden states, or attends to those behind too.
        apart = checkpoint.config.takes_hidden or checkpoint.config.both_ways
        indexed = self.index != "off" and not apart
        checkpoint.release()
        config, other = checkpoint.config, None if beside is None else beside.compiled
        if resident:
            compiled = backend.compile(config, _reported(checkpoint, self.progress), other)
        else:
            compiled = streaming(backend, config, checkpoint.name).stream(config, checkpoint.tensor)
        if checkpoint.encoders != stored.encoders:
            log.warning(
                "%s has weights without a kernel: %s, encoded in %.1f s; weights=int8, int4 or bf16 chooses another "
                "form, backend=reference computes with the stored values",
                checkpoint.name, changes(stored, checkpoint), perf_counter() - start,
            )  # fmt: skip
        _trim()
        pool.stores.update(self.tiers.by_name)  # a student shares the pool
        prefixes, lower = PrefixIndex(pool, identity) if indexed else None, None
        if prefixes is not None:
            prefixes.host = self._host
            if self.tiers.stores:
                lower = BackingStores(self.tiers, prefixes, checkpoint.name)
        cost = CostModel(checkpoint.config, weights, geometry.entry_bytes)
        plain = replace(checkpoint, encoders={}).tensor
        return Model(checkpoint.name, identity, backend, compiled, tokenizer, pool, prefixes, cost, lower, plain)

    @property
    def _on_host(self) -> bool:
        """Whether weights and pages lie in the memory that the budget is about."""
        return self.backend.device == "cpu"

    def _count(self, what: str, size: int) -> None:
        if self._on_host:
            self.budget.add(what, int(size * self.share))

    def load_companion(
        self, role: str, wanted: str | Checkpoint, main: Model, own: Checkpoint, threads: int, check: bool = False
    ) -> Model:
        """Load the student or the draft of `main`. Returns `main` itself if the weights are the same.

        Args:
            role: "student", "draft", or one of `OWN_DRAFTS`.
            wanted: a checkpoint, or "MODEL", "MODEL@WEIGHTS" or "WEIGHTS" (see `companion_checkpoint`).
            main: a model that this object has opened.
            own: main's checkpoint as stored.
            threads: CPU threads that encode its weights.
            check: whether to check its weights, unless they are main's.

        Raises:
            GeometryMismatch: the tokenizers differ, or a student's KV geometry differs; names the field.
            InvalidRequest: it has fewer positions than `main`, or the backend cannot run it.
            CheckpointError: as for any model.
        """
        checkpoint = wanted if isinstance(wanted, Checkpoint) else companion_checkpoint(wanted, own, threads)
        if check and checkpoint.files != own.files:
            verify(checkpoint).require()
        source, backend, shared = checkpoint.tokenizer_source, self.backend, main.pool
        tokenizer = main.tokenizer if source is own.tokenizer_source else Tokenizer.from_source(source)
        if tokenizer.fingerprint != main.tokenizer.fingerprint:
            raise GeometryMismatch(f"{checkpoint.name} cannot be the {role} of {main.name}: their tokenizers differ")
        fit = fitted(checkpoint, backend.formats, threads)
        if model_identity(fit, backend, shared.page_size) == main.id:
            return main
        if checkpoint.config.max_position < main.max_position:
            raise InvalidRequest(
                f"{checkpoint.name} cannot be the {role} of {main.name}: it has {checkpoint.config.max_position} "
                f"positions and {main.name} {main.max_position}"
            )
        if (reason := backend.unsupported(checkpoint.config, checkpoint.matrices(), shared.page_size)) is not None:
            raise InvalidRequest(f"the {backend.name} backend cannot run the {role}: {reason}")

        def pool_for(geometry: Geometry) -> PagePool:
            if role == "student":
                shared.geometry.require(geometry, f"{checkpoint.name} cannot be the student of {main.name}")
            if geometry == shared.geometry:
                return shared
            self._count("KV pool", shared.num_pages * geometry.page_bytes(shared.page_size))
            self.budget.require("give the pool less with kv_bytes, or raise the limit")
            return new_pool(geometry, shared.num_pages, shared.page_size, backend)

        return self.load(checkpoint, tokenizer, pool_for, main if role in OWN_DRAFTS else None)


def own_draft(role: str, stored: Checkpoint, weights: str, threads: int | None) -> Checkpoint:
    """A model's own head of multi-token prediction or first layers, with weights encoded as the model's.

    Raises InvalidRequest if there is none, CheckpointError if it is damaged.
    """
    if role == FIRST_LAYERS:
        return quantize(stored.first_layers(2), weights, threads)
    if stored.guesser is None:
        raise InvalidRequest(
            f"{stored.name} has no head of multi-token prediction that fits: leave out draft={GUESSER}, or name a model"
        )
    return quantize(stored.guesser(), weights, threads)


def companion_checkpoint(wanted: str, own: Checkpoint, threads: int | None) -> Checkpoint:
    """The checkpoint that "int4" (the model's weights, re-encoded), "MODEL" or "MODEL@int4" names.

    Its name has the form "MODEL@int4", or "MODEL" for stored weights.
    """
    name, weights = companion_parts(wanted)
    checkpoint = open_checkpoint(name) if name else own
    called = checkpoint.name if weights == "stored" else f"{checkpoint.name}@{weights}"
    return replace(quantize(checkpoint, weights, threads), name=called)


def new_pool(geometry: Geometry, num_pages: int, page_size: int, backend: Backend) -> PagePool:
    """A pool over a backend's memory."""
    memory = backend.memory(num_pages, geometry.page_shape(page_size))
    return PagePool(geometry, memory, num_pages, page_size)


def num_pages(geometry: Geometry, page_size: int, kv_bytes: int) -> int:
    """Number of pages of `page_size` entries that fit into `kv_bytes`. Raises InvalidRequest if not even one fits."""
    if not isinstance(page_size, int) or page_size < 1:
        raise InvalidRequest(f"page_size must be at least 1, not {page_size!r}")
    page_bytes, groups = geometry.page_bytes(page_size), len(geometry.groups)
    if kv_bytes < groups * page_bytes:
        least = f"{groups} pages (one for each group of layers), each" if groups > 1 else "one page"
        raise InvalidRequest(f"kv_bytes must hold at least {least} of {page_bytes:,} bytes, not {kv_bytes:,}")
    return kv_bytes // page_bytes


def _reported(checkpoint: Checkpoint, progress: Progress | None) -> Weights:
    """`checkpoint.tensor`, which reports each matrix that it has encoded."""
    matrices, done = checkpoint.matrices(), 0
    total = sum(matrices[name].nbytes for name in checkpoint.encoders)

    def tensor(name: str) -> RawTensor:
        nonlocal done
        made = checkpoint.tensor(name)
        if progress is not None and name in checkpoint.encoders:
            done = min(done + made.nbytes, total)
            progress("encoding weights", done, total)
        return made

    return tensor


def weight_bytes(checkpoint: Checkpoint, backend: Backend) -> dict[str, int]:
    """Bytes of each weight matrix, by Twostroke name, in the form that the backend stores."""
    return {name: backend.weight_bytes(tensor) for name, tensor in checkpoint.matrices().items()}


def _trim() -> None:
    """Return freed memory to the system: tokenizers and encoders use much memory that the C library would keep."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc
        trim(0)


def model_identity(checkpoint: Checkpoint, backend: Backend, page_size: int) -> str:
    """Hex digest of everything that the bits of an entry depend on, beside the tokens before it."""
    turned = dict.fromkeys((one.rope, one.head_dim) for one in checkpoint.config.attentions)
    angles = [np.arange(64, dtype=np.float32)[:, None] * frequencies(rope, dim) for rope, dim in turned]
    # numpy makes angles and encodes weights, and not with the same last bits on every processor.
    turns = hashlib.blake2b(b"".join(np.cos(a).tobytes() + np.sin(a).tobytes() for a in angles)).hexdigest()
    stored = kv_format(backend.kv_dtype).identity
    parts = (checkpoint.weights_id, ENCODING, backend.arithmetic, turns, stored, page_size)
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
