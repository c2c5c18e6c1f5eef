"""Real engines on the clock of a simulation: the kernels compute, and the cost model says how long it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from twostroke.backends.interface import CompiledModel, DrawnTokens, ForwardOutput, LazyLogits, RaggedBatch
from twostroke.engine.engine import Engine
from twostroke.engine.model import Model
from twostroke.engine.model_loader import new_pool
from twostroke.sampling.draw import Draw, Sampled
from twostroke.sampling.params import SamplingParams
from twostroke.study.simulate.engine_setup import EngineSetup, open_engine
from twostroke.study.simulate.simulated_model import PassObserver, PendingTokens, SimulatedModel
from twostroke.study.simulate.virtual_time import VirtualClock


class Timed:
    """Implements `Drawn`: real tokens at a simulated time."""

    def __init__(self, tokens: PendingTokens, real: DrawnTokens) -> None:
        self._tokens, self.real = tokens, real

    def __len__(self) -> int:
        return len(self.real)

    def read(self) -> list[Sampled]:
        self._tokens.read()
        return self.real.read()


class Paced(SimulatedModel):
    """Takes the time of a simulated pass, and computes a real one. A bias makes every token the simulation's."""

    real: CompiledModel

    def forward(self, batch: RaggedBatch[np.ndarray], memory: Any) -> ForwardOutput:
        super().forward(batch, memory)
        drawn = batch.drawn.real if isinstance(batch.drawn, Timed) else None
        return self.real.forward(replace(batch, drawn=drawn), memory)

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> Any:
        biased = SamplingParams(logit_bias={self.config.vocab_size - 1: 1e9})
        return Timed(
            super().sample(rows, draws), self.real.sample(rows, [replace(one, params=biased) for one in draws])
        )


@dataclass(frozen=True)
class RealSetup(EngineSetup):
    """Opens engines that compute by `opened`'s weights, each with a pool of its own."""

    opened: Model | None = None

    def open(self, clock: VirtualClock, watch: PassObserver | None = None) -> Engine:
        model = self.opened
        assert model is not None
        paced = Paced(model.config, clock, self.costs, self.asynchronous, watch)
        paced.real = model.compiled
        pool = new_pool(model.pool.geometry, self.pages, self.page_size, model.backend)
        return open_engine(self, clock, paced, pool, model.tokenizer)
