"""A stand-in for a model: K and V of an entry are a digest of the weights, of all entries before it, of its token and
its position.

A step reads every entry that its rows attend to. So a page with other bytes than its owner's gives other tokens, which
a comparison with an undisturbed run finds.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
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
from twostroke.engine.model_loader import INDEXES
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv import spans
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.kv.tiers.tiers import Tiers
from twostroke.methods import Method, Prompt
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.models.config import Attention, GatedMLP, Layer, ModelConfig
from twostroke.models.cost import CostModel
from twostroke.models.rope import Rope
from twostroke.sampling.draw import Draw
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.sampler import sample
from twostroke.study.simulate.simulated_model import SimulatedBackend

# A digest has as many bytes as the vocabulary has tokens, and they are the logits.
LAYERS, HEADS, HEAD_DIM = 2, 2, 4
ENTRY = (LAYERS, 2, HEADS, HEAD_DIM)
LAYER = Layer(Attention(HEADS, HEADS, HEAD_DIM, 1.0, Rope(10_000.0)), GatedMLP(8))
CONFIG = ModelConfig("stand-in", VOCAB, VOCAB, 1024, 1e-6, (LAYER,) * LAYERS, tied=True)
GEOMETRY = Geometry.of(CONFIG, "float32", Letters.fingerprint)
SPREAD = 24.0  # bytes that make a difference of 1 between logits
TEACHER, STUDENT = "teacher", "student"  # names of weights
ROLES: Mapping[str, str] = {"main": TEACHER}
BOTH: Mapping[str, str] = {"main": TEACHER, "student": STUDENT}
STUDENT_ALONE: Mapping[str, str] = {"main": STUDENT}

Pause = Callable[[int, int], None]  # waits as long as a step takes with so many prompt tokens and decode rows


class StandIn:
    """Implements `CompiledModel`."""

    config = CONFIG

    def __init__(self, weights: str, pause: Pause) -> None:
        self._weights, self._pause = hashlib.blake2b(weights.encode(), digest_size=VOCAB), pause

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        tokens, starts = resolved(batch).tolist(), batch.row_starts
        counts = [stop - start for start, stop in pairwise(starts)]
        self._pause(sum(count for count in counts if count > 1), counts.count(1))
        digests: list[bytes] = []
        positions = batch.positions.tolist()
        for table, start, count in zip(batch.tables, starts, counts, strict=False):
            frames, slots = spans.places(table, 0)
            so_far = self._weights.copy()
            # [entries, layers, K and V, heads, head_dim]
            so_far.update(memory.storages[0][:, :, frames[:-count], :, slots[:-count]].astype(np.uint8, "C"))
            for row in range(start, start + count):
                one = so_far.copy()
                one.update(struct.pack("<qq", tokens[row], positions[row]))
                digests.append(one.digest())
                so_far.update(digests[-1])
        made = np.frombuffer(b"".join(digests), np.uint8).reshape(-1, VOCAB)
        memory.storages[0][:, :, batch.pages[0], :, batch.slots] = made.reshape(-1, *ENTRY)
        return ForwardOutput(StoredLogits(made[batch.wanted].astype(np.float32) / np.float32(SPREAD)), None)

    def sample(self, rows: Sequence[Any], draws: Sequence[Draw]) -> KnownTokens:
        return KnownTokens(sample(np.concatenate([row.read() for row in rows]), draws)) if rows else KnownTokens()

    def rows_of(self, states: np.ndarray) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Sizes:
    """Of a worker. `in_flight`: as in `SchedulerConfig`."""

    pages: int
    page_size: int
    index: str
    max_step_tokens: int
    max_running: int
    in_flight: bool


class Pool(PagePool):
    max_elsewhere = 1 << 12  # the books of more take longer to clear than a run does


class Opened:
    """The part of `LLM` that a worker uses."""

    def __init__(
        self, sizes: Sizes, clock: Clock, pause: Pause, readers: Any = None, roles: Mapping[str, str] = ROLES
    ) -> None:
        """`readers`: what brings pages back from the host; None: threads. `roles`: the weights of each model."""
        memory = HostMemory(sizes.pages, GEOMETRY.page_shape(sizes.page_size))
        self.pool = Pool(GEOMETRY, memory, sizes.pages, sizes.page_size)
        self.tokenizer, self.config = cast(Tokenizer, Letters()), CONFIG
        models = {role: self._model(weights, sizes, pause) for role, weights in roles.items()}
        self.model = models["main"]
        tiers = Tiers()
        tiers.readers = readers or tiers.readers
        config = SchedulerConfig(sizes.max_step_tokens, sizes.max_running, in_flight=sizes.in_flight)
        self.engine = Engine(models, "main", config, tiers, clock=clock)
        self.engine.prefill_seconds = lambda model: lambda before, tokens: 1e-3 * tokens  # pyright: ignore

    def _model(self, weights: str, sizes: Sizes, pause: Pause) -> Model:
        kind = INDEXES[sizes.index]
        index = None if kind is None else kind(self.pool, weights)
        backend, compiled = cast(Any, SimulatedBackend(asynchronous=False)), StandIn(weights, pause)
        cost = CostModel(CONFIG, {}, self.pool.entry_bytes)
        return Model(weights, weights, backend, compiled, self.tokenizer, self.pool, index, cost)

    def request(self, prompt: Sequence[int], params: SamplingParams, method: Method) -> Request:
        asked = Prompt(prompt, self.tokenizer)
        return Request(lambda: method.program(asked), params, self.tokenizer, len(prompt))

    def require_method(self, method: Method) -> None: ...

    @property
    def as_llm(self) -> LLM:
        return cast(LLM, self)
