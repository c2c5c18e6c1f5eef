"""A stand-in for a model: an entry is a digest of the weights, of what the layers see before it, of its token and its
position: of all entries, of those in a window, or of a state and the rows since its snapshot.

A step reads every entry that its rows attend to. So a page with other bytes than its owner's gives other tokens, which
a comparison with an undisturbed run finds.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any, cast

import numpy as np

from tests.chaos.letters import VOCAB, Letters
from twostroke.api.llm import LLM
from twostroke.backends.interface import ForwardOutput, RaggedBatch
from twostroke.backends.lazy_logits import KnownTokens, StoredLogits, resolved
from twostroke.backends.page_memory import HostMemory, PageMemory
from twostroke.engine.clock import Clock
from twostroke.engine.engine import Engine
from twostroke.engine.model import Model
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv import spans
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.tiers.tiers import Tiers
from twostroke.methods import Method, Prompt
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.models.config import Attention, GatedMLP, Layer, ModelConfig
from twostroke.models.cost import CostModel
from twostroke.models.kv_formats import kv_format
from twostroke.models.recurrent import GatedDeltaNet, RecurrentMixer
from twostroke.models.rope import Rope
from twostroke.sampling.draw import Draw
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.sampler import sample
from twostroke.study.simulate.simulated_model import SimulatedBackend

# A digest has as many bytes as the vocabulary has tokens, and they are the logits.
LAYERS, HEADS, HEAD_DIM = 2, 2, 4
ATTENTION = Attention(HEADS, HEADS, HEAD_DIM, 1.0, Rope(10_000.0))
STATE = GatedDeltaNet(1, 1, 4, 4, conv_width=3, chunk=8)
MIXERS: Mapping[str, tuple[Attention | RecurrentMixer, ...]] = {
    "plain": (ATTENTION,) * LAYERS,
    "windowed": (ATTENTION, replace(ATTENTION, window=6)),
    "coded": (ATTENTION,) * LAYERS,
    "recurrent": (ATTENTION, STATE),
}
CONFIGS = {
    kind: ModelConfig("stand-in", VOCAB, VOCAB, 1024, 1e-6, tuple(Layer(one, GatedMLP(8)) for one in mixers), tied=True)
    for kind, mixers in MIXERS.items()
}
ONE_GROUP = ("plain", "coded")  # kinds whose entries may differ by head
DTYPES = {"coded": "int8"}  # of K and V; of other kinds float32
CODES = kv_format("int8")
SPREAD = 24.0  # bytes that make a difference of 1 between logits
TEACHER, STUDENT = "teacher", "student"  # names of weights
ROLES: Mapping[str, str] = {"main": TEACHER}
BOTH: Mapping[str, str] = {"main": TEACHER, "student": STUDENT}
STUDENT_ALONE: Mapping[str, str] = {"main": STUDENT}

Pause = Callable[[int, int], None]  # waits as long as a step takes with so many prompt tokens and decode rows


class StandIn:
    """Implements `CompiledModel`."""

    def __init__(self, weights: str, pause: Pause, kind: str) -> None:
        self._weights, self._pause = hashlib.blake2b(weights.encode(), digest_size=VOCAB), pause
        self.config, self._kind = CONFIGS[kind], kind

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        tokens, starts = resolved(batch).tolist(), batch.row_starts
        counts = [stop - start for start, stop in pairwise(starts)]
        self._pause(sum(count for count in counts if count > 1), counts.count(1))
        digests: list[bytes] = []
        positions = batch.positions.tolist()
        for s, (table, start, count) in enumerate(zip(batch.tables, starts, counts, strict=False)):
            so_far = self._weights.copy()
            so_far.update(_bias(batch, s))
            so_far.update(_entries(memory, table, 0, count, len(spans.places(table, 0)[0])))
            seen = self._layer(batch, memory, s)
            for row in range(start, start + count):
                one = so_far.copy()
                one.update(seen.before(row - start))
                one.update(struct.pack("<qq", tokens[row], positions[row]))
                digests.append(one.digest())
                so_far.update(_entry(digests[-1], 0, memory.storages[0]))
                seen.add(digests[-1])
            seen.keep(batch, memory)
        made = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, VOCAB)
        for group, storage in enumerate(memory.storages):
            kept = batch.pages[group] >= 0
            entries = [_entry(digest, group, storage) for digest in digests]
            shape = (-1, *storage.shape[:2], storage.shape[3], storage.shape[5])
            data = np.frombuffer(b"".join(entries), np.uint8).reshape(shape)
            storage[:, :, batch.pages[group][kept], :, batch.slots[kept]] = data[kept]
        return ForwardOutput(StoredLogits(made[batch.wanted].astype(np.float32) / np.float32(SPREAD)), None)

    def _layer(self, batch: RaggedBatch[np.ndarray], memory: PageMemory, sequence: int) -> Nothing:
        """What the second layer sees before each row of a sequence."""
        table, mixer = batch.tables[sequence], MIXERS[self._kind][1]
        new = batch.row_starts[sequence + 1] - batch.row_starts[sequence]
        if isinstance(mixer, RecurrentMixer):
            return State(batch, memory, sequence, mixer)
        return Window(memory, table, new, mixer.window) if mixer.window else Nothing()

    def sample(self, rows: Sequence[Any], draws: Sequence[Draw]) -> KnownTokens:
        return KnownTokens(sample(np.concatenate([row.read() for row in rows]), draws)) if rows else KnownTokens()

    def rows_of(self, states: np.ndarray) -> Any:
        raise NotImplementedError


def _entries(memory: PageMemory, table: np.ndarray, group: int, new: int, count: int) -> bytes:
    """The last `count` entries before the new ones, or all: [entries, layers, K and V, heads, head_dim] as bytes."""
    frames, slots = spans.places(table, group)
    some = slice(max(0, len(frames) - new - count), len(frames) - new)
    assert (frames[some] >= 0).all(), "an entry that was given back is read"
    found = memory.storages[group][:, :, frames[some], :, slots[some]]
    return found.astype(np.int32).astype(np.uint8).tobytes()  # K that was moved has floats of any sign


def _entry(digest: bytes, group: int, storage: np.ndarray) -> bytes:
    """A token's entry in a group, as it is stored."""
    if storage.dtype == np.uint8:
        depth, _, _, heads, *_ = storage.shape
        numbers = np.frombuffer(hashlib.shake_128(digest).digest(2 * depth * heads * HEAD_DIM), np.int8)
        return CODES.encode(numbers.reshape(depth, 2, 1, heads, HEAD_DIM)).tobytes()
    size = prod((*storage.shape[:2], storage.shape[3], storage.shape[5]))
    return digest if size == len(digest) else hashlib.shake_128(digest + bytes([group])).digest(size)


def _bias(batch: RaggedBatch[np.ndarray], sequence: int) -> bytes:
    """What a sequence's bias is, whatever follows the entries that have one."""
    bias = batch.biases[sequence] if batch.biases else None
    if bias is None:
        return b""
    return bias[..., : np.flatnonzero(bias.any((0, 1)))[-1] + 1].tobytes() if bias.any() else b""


class Nothing:
    """What the second layer sees in a plain model: no more than the first."""

    def before(self, row: int) -> bytes:
        return b""

    def add(self, digest: bytes) -> None: ...
    def keep(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> None: ...


class Window(Nothing):
    """The last entries of its group."""

    def __init__(self, memory: PageMemory, table: np.ndarray, new: int, window: int) -> None:
        self._storage, self._size = memory.storages[1], len(_entry(b"", 1, memory.storages[1])) * (window - 1)
        self._seen = _entries(memory, table, 1, new, window - 1)

    def before(self, row: int) -> bytes:
        return self._seen[-self._size :]

    def add(self, digest: bytes) -> None:
        self._seen += _entry(digest, 1, self._storage)


class State(Nothing):
    """A snapshot, the rows since then, and the last inputs of the convolution. A state is a digest of these."""

    def __init__(
        self, batch: RaggedBatch[np.ndarray], memory: PageMemory, sequence: int, state: RecurrentMixer
    ) -> None:
        table, self._step = batch.tables[sequence], batch.states[sequence]
        new = batch.row_starts[sequence + 1] - batch.row_starts[sequence]
        self._storage = memory.storages[1]
        source, size = self._step.source, 4 * state.snapshot_values
        self._size, self._targets = size, dict(self._step.targets)
        whole = memory.state_storage[source].reshape(-1).tobytes() if len(source) else bytes(size)
        self._state, self._done = whole[:size], dict[int, bytes]()
        rows = _entries(memory, table, 1, new, self._step.rows)
        each = len(_entry(b"", 1, self._storage))
        self._rows = [rows[at : at + each] for at in range(0, len(rows), each)]
        self._chunk, self._count = state.chunk, 0
        self._position = int(batch.positions[batch.row_starts[sequence]])

    def before(self, row: int) -> bytes:
        return self._state + b"".join(self._rows)

    def add(self, digest: bytes) -> None:
        self._rows.append(_entry(digest, 1, self._storage))
        self._count += 1
        if (self._position + self._count) % self._chunk == 0:
            numbers = np.frombuffer(hashlib.shake_128(self.before(0)).digest(self._size // 4), np.uint8)
            self._state, self._rows = numbers.astype(np.float32).tobytes(), []
            self._done[self._count] = self._state

    def keep(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> None:
        for count, frames in self._targets.items():
            data = np.frombuffer(self._done[count], np.float32)
            room = np.zeros((len(frames), memory.state_storage.shape[1]), np.float32)
            room.reshape(-1)[: len(data)] = data
            memory.state_storage[frames] = room


@dataclass(frozen=True)
class Sizes:
    """Of a worker. `in_flight`: as in `SchedulerConfig`. `kind`: of the model, as in `MIXERS`."""

    pages: int
    page_size: int
    index: str
    max_step_tokens: int
    max_running: int
    in_flight: bool
    kind: str = "plain"


class Pool(PagePool):
    max_elsewhere = 1 << 12  # the books of more take longer to clear than a run does


class Opened:
    """The part of `LLM` that a worker uses."""

    def __init__(
        self, sizes: Sizes, clock: Clock, pause: Pause, readers: Any = None, roles: Mapping[str, str] = ROLES
    ) -> None:
        """`readers`: what brings pages back from the host; None: threads. `roles`: the weights of each model."""
        self.tokenizer, self.config = cast(Tokenizer, Letters()), CONFIGS[sizes.kind]
        geometry = Geometry.of(self.config, DTYPES.get(sizes.kind, "float32"), Letters.fingerprint)
        memory = HostMemory(sizes.pages, geometry.page_shape(sizes.page_size))
        self.pool = Pool(geometry, memory, sizes.pages, sizes.page_size)
        models = {role: self._model(weights, sizes, pause) for role, weights in roles.items()}
        self.model = models["main"]
        tiers = Tiers()
        tiers.readers = readers or tiers.readers
        config = SchedulerConfig(sizes.max_step_tokens, sizes.max_running, in_flight=sizes.in_flight)
        self.engine = Engine(models, "main", config, tiers, clock=clock)
        self.engine.prefill_seconds = lambda model: lambda before, tokens: 1e-3 * tokens  # pyright: ignore

    def _model(self, weights: str, sizes: Sizes, pause: Pause) -> Model:
        index = None if sizes.index == "off" else PrefixIndex(self.pool, weights)
        backend, compiled = cast(Any, SimulatedBackend(asynchronous=False)), StandIn(weights, pause, sizes.kind)
        cost = CostModel(self.config, {}, self.pool.entry_bytes)
        return Model(weights, weights, backend, compiled, self.tokenizer, self.pool, index, cost)

    def request(self, prompt: Sequence[int], params: SamplingParams, method: Method) -> Request:
        asked = Prompt(prompt, self.tokenizer)
        return Request(lambda: method.program(asked), params, self.tokenizer, len(prompt))

    def require_method(self, method: Method) -> None: ...

    @property
    def as_llm(self) -> LLM:
        return cast(LLM, self)
