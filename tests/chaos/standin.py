"""A stand-in for a model: K and V of an entry are a digest of all entries before it, of its token and its position.

A step reads every entry that its rows attend to. So a page with other bytes than its owner's gives other tokens, which
a comparison with an undisturbed run finds.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from tests.kv.values import array
from twostroke.backends.interface import Output, RaggedBatch
from twostroke.backends.memory import HostMemory, Memory
from twostroke.backends.rows import Ready, Stored, resolved
from twostroke.checkpoints.tokenizer import Tokenizer
from twostroke.engine.clock import Clock
from twostroke.engine.engine import Engine
from twostroke.engine.model import Model
from twostroke.engine.opening import INDEXES
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv import spans
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.llm import LLM
from twostroke.methods import Method, Prompt
from twostroke.models.config import Attention, GatedMLP, Layer, ModelConfig
from twostroke.models.cost import Cost
from twostroke.models.rope import Rope
from twostroke.sampling.draw import Draw
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.sampler import sample
from twostroke.simulation.blank import NoText
from twostroke.simulation.device import Facts
from twostroke.tiers.tiers import Tiers

VOCAB = 32  # a digest has as many bytes, which are the logits
LAYER = Layer(Attention(2, 2, 4, 1.0, Rope(10_000.0)), GatedMLP(8))
CONFIG = ModelConfig("stand-in", VOCAB, 32, 1024, 1e-6, (LAYER,) * 2, tied=True)
GEOMETRY = Geometry.of(CONFIG, "float32", NoText.fingerprint)
SPREAD = 24.0  # bytes that make a difference of 1 between logits

Pause = Callable[[int, int], None]  # waits as long as a step takes with so many prompt tokens and decode rows


class StandIn:
    """Implements `CompiledModel`."""

    config = CONFIG

    def __init__(self, pause: Pause) -> None:
        self._pause = pause

    def forward(self, batch: RaggedBatch[np.ndarray], memory: Memory) -> Output:
        tokens, starts = resolved(batch), batch.row_starts
        counts = np.diff(starts)
        self._pause(int(counts[counts > 1].sum()), int(np.count_nonzero(counts == 1)))
        digests: list[bytes] = []
        for table, start, stop in zip(batch.tables, starts, starts[1:], strict=False):
            frames, slots = spans.pages_and_slots(table)
            known = len(frames) - (stop - start)
            before = memory.read(frames[:known], slots[:known])
            so_far = hashlib.blake2b(np.moveaxis(before, 2, 0).astype(np.uint8).tobytes(), digest_size=32)
            for row in range(start, stop):
                one = so_far.copy()
                one.update(struct.pack("<qq", tokens[row], batch.positions[row]))
                digests.append(one.digest())
                so_far.update(digests[-1])
        memory.write(batch.pages, batch.slots, array(digests))
        wanted = b"".join(digests[row] for row in batch.wanted.tolist())
        logits = np.frombuffer(wanted, np.uint8).reshape(-1, VOCAB).astype(np.float32) / np.float32(SPREAD)
        return Output(Stored(logits), None)

    def sample(self, rows: Sequence[Any], draws: Sequence[Draw]) -> Ready:
        return Ready(sample(np.concatenate([row.read() for row in rows]), draws)) if rows else Ready()

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


class Opened:
    """The part of `LLM` that a worker uses."""

    def __init__(self, sizes: Sizes, clock: Clock, pause: Pause, readers: Any = None) -> None:
        """`readers`: what brings pages back from the host; None: threads."""
        shape = (sizes.pages, 2, 2, 2, sizes.page_size, 4)
        self.pool = PagePool(GEOMETRY, HostMemory(shape, GEOMETRY.dtype), sizes.pages, sizes.page_size)
        kind = INDEXES[sizes.index]
        index = None if kind is None else kind(self.pool, "stand-in")
        self.tokenizer, self.config = cast(Tokenizer, NoText()), CONFIG
        backend, compiled = cast(Any, Facts(asynchronous=False)), StandIn(pause)
        cost = Cost(CONFIG, {}, self.pool.entry_bytes)
        self.model = Model("stand-in", "stand-in", backend, compiled, self.tokenizer, self.pool, index, cost)
        tiers = Tiers()
        tiers._readers = readers or tiers._readers
        config = SchedulerConfig(sizes.max_step_tokens, sizes.max_running, in_flight=sizes.in_flight)
        self.engine = Engine({"main": self.model}, "main", config, tiers, clock=clock)

        self.engine.prefill_seconds = lambda model: lambda before, tokens: 1e-3 * tokens  # pyright: ignore

    def request(self, prompt: Sequence[int], params: SamplingParams, method: Method) -> Request:
        asked = Prompt(prompt, self.tokenizer)
        return Request(lambda: method.program(asked), params, self.tokenizer, len(prompt))

    def require_companions(self, method: Method) -> None: ...

    @property
    def as_llm(self) -> LLM:
        return cast(LLM, self)
