"""Opens the engine itself over a simulated model: its scheduler, placement, prefix index and pool accounting.

Before it lies a server's HTTP, which takes time on the way in and on the way out. An engine on a machine that is
described by its peaks is made here; `model_timing` makes one that is timed on this machine.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from twostroke.engine.engine import Engine
from twostroke.engine.forecast import Forecast
from twostroke.engine.model import Model
from twostroke.engine.options import PREFIX_INDEXES
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import InvalidRequest
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.models.config import ModelConfig
from twostroke.models.cost import CostModel
from twostroke.sampling.draw import Sampled
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.named_models import companion_of, find_model
from twostroke.study.roofline.roofline import Roofline
from twostroke.study.roofline.techniques import PLAIN, SpeculatedDecode, Technique, choose_technique, techniques
from twostroke.study.simulate.null_objects import NullPool, NullTokenizer
from twostroke.study.simulate.simulated_model import HIDDEN, PassObserver, SimulatedBackend, SimulatedModel
from twostroke.study.simulate.step_costs import HostInclusiveSeconds, RooflineCosts, StepCostModel
from twostroke.study.simulate.virtual_time import VirtualClock

ROLE = "main"
MAX_PAGES = 1 << 26  # each takes some dozens of bytes here


@dataclass(frozen=True)
class HttpOverhead:
    """The way of a request to the engine, and of its tokens to its user."""

    request_s: float = 0.0  # seconds until the engine has a request, and back from its first token
    prompt_s: float = 0.0  # the same for each token of its prompt, also for those that the prefix index has
    # by how much tokens came late on their way to users, one after the other as measured; empty for not
    late_s: Sequence[float] = ()

    def request_delay(self, prompt: int) -> float:
        """Seconds from the arrival of a request with so many prompt tokens until the engine has it."""
        return self.request_s + prompt * self.prompt_s

    def delivery_times(self, number: int, made: Sequence[float]) -> list[float]:
        """When the user of call `number` has each of its tokens, from when they were made.

        They are late as a row of measured tokens was, from a place on that the number draws. None overtakes another.
        """
        if not self.late_s:
            return list(made)
        start = random.Random(number).randrange(len(self.late_s))
        late = [self.late_s[(start + i) % len(self.late_s)] for i in range(len(made))]
        return np.maximum.accumulate(np.array(made) + late).tolist()


@dataclass(frozen=True)
class EngineSetup:
    """One engine: a model, what its steps take, and the settings that `serve` has too."""

    model: ModelSpec
    costs: StepCostModel
    pages: int  # pages of its KV pool, each of `page_size` entries
    page_size: int = 16
    index: str = "radix"
    asynchronous: bool = False  # whether a step is in flight while Python works, as on a GPU
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    http: HttpOverhead = field(default_factory=HttpOverhead)  # what lies between users and the engine
    technique: Technique = PLAIN  # how answers are made; `companion_costs` are of the steps of its companion
    companion_costs: StepCostModel | None = None

    def __post_init__(self) -> None:
        if self.technique.method.get("draft") == "lookup":
            raise InvalidRequest("prompt lookup cannot be simulated: its guesses come from texts, which are not there")
        if self.index not in PREFIX_INDEXES:
            raise InvalidRequest(f"the prefix index must be one of {', '.join(PREFIX_INDEXES)}, not {self.index!r}")
        if not 1 <= self.pages <= MAX_PAGES or self.page_size < 1:
            raise InvalidRequest(
                f"there must be room for one page of KV, and for {MAX_PAGES:,} at most, not {self.pages:,} pages of "
                f"{self.page_size:,} entries"
            )

    @cached_property
    def config(self) -> ModelConfig:
        return self.model.config

    @cached_property  # each request asks
    def vocab(self) -> int:
        """Ids that all its models have."""
        used = self.technique.companion
        return min(self.config.vocab_size, self.config.vocab_size if used is None else used.model.vocab)

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a prompt and its answer together."""
        return min(self.config.max_position, kv_geometry(self.model).max_entries(self.pages, self.page_size))

    def open(self, clock: VirtualClock, watch: PassObserver | None = None) -> Engine:
        """The engine, which reads this clock. `watch` is told of each step."""
        config = self.config
        compiled = SimulatedModel(config, clock, self.costs, self.asynchronous, watch)
        compiled.token = Sampled(self.vocab - 1)
        return open_engine(self, clock, compiled, self.open_pool(), NullTokenizer())

    def open_pool(self, model: ModelSpec | None = None) -> NullPool:
        """An empty pool of this size, for the model's KV or another's."""
        return NullPool(kv_geometry(model or self.model), self.pages, self.page_size, gaps=bool(self.technique.method))

    def companion(self, compiled: SimulatedModel, main: PagePool) -> tuple[str, SimulatedModel, PagePool] | None:
        """The technique's other model on the same device, under its role, with the pool of its values."""
        used, costs = self.technique, self.companion_costs
        if used.companion is None or costs is None:
            return None
        model = used.companion.model
        right = used.accepted if isinstance(used, SpeculatedDecode) else 1.0
        pool = main if used.role == "student" else self.open_pool(model)
        config = replace(model.config, hidden_size=HIDDEN) if model.config.takes_hidden else model.config
        return used.role, compiled.companion(config, costs, right), pool


def kv_geometry(model: ModelSpec) -> Geometry:
    """The shape of the model's KV in a simulation, whose pages have no contents: its numbers have no bits."""
    return Geometry.of(model.config, model.stored.name, NullTokenizer.fingerprint)


def open_engine(setup: EngineSetup, clock: VirtualClock, compiled: Any, pool: PagePool, tokenizer: Any) -> Engine:
    """The engine over a compiled model that moves this clock."""

    def model_of(name: str, compiled: Any, pool: PagePool) -> Model:
        return Model(
            name=name,
            id=name,
            backend=cast("Any", SimulatedBackend(setup.asynchronous)),
            compiled=compiled,
            tokenizer=cast(Tokenizer, tokenizer),
            pool=pool,
            index=None if setup.index == "off" or compiled.config.takes_hidden else PrefixIndex(pool, name),
            cost=CostModel(compiled.config, {}, pool.entry_bytes),
        )

    model = model_of(setup.model.name, compiled, pool)
    models, costs = {ROLE: model}, {model: HostInclusiveSeconds(setup.costs)}
    if (found := setup.companion(compiled, pool)) is not None and setup.companion_costs is not None:
        role, other, its_pool = found
        models[role] = model_of(f"{setup.model.name}'s {role}", other, its_pool)
        costs[models[role]] = HostInclusiveSeconds(setup.companion_costs)
    # Without an objective nothing asks what a step will take.
    forecast = None if setup.scheduler.itl_ms is None else Forecast(costs)
    return Engine(models, ROLE, setup.scheduler, clock=clock, forecast=forecast)


def machine_setup(
    # name, on: a model and a machine, as for `twostroke plan`
    name: str,
    on: str,
    *,
    weights: str | None = None,  # a format of `roofline.weight_formats`; None is that of the files, or as published
    kv_bits: int = 16,  # of a number in the KV cache
    tp: int = 1,
    efficiency: float | None = None,
    # method, draft, acceptance: a technique of `roofline.techniques`, its companion, the share of guesses that stand
    method: str = "plain",
    draft: str | None = None,
    acceptance: float | None = None,
    **engine: Any,  # as for `roofline_setup`
) -> EngineSetup:
    """An engine of `tp` devices, by the names of its model and its machine.

    Raises:
        InvalidRequest, UnknownModel: unknown names; no room for KV.
    """
    found = find_model(name)
    technique = choose_technique(techniques(found.model, companion_of(draft, found.model), acceptance), method)
    form = found.form(weights)
    roofline = Roofline(found.model.with_kv_bits(kv_bits), find_machine(on, efficiency), form, tp)
    return roofline_setup(roofline, technique, **engine)


def roofline_setup(
    roofline: Roofline,
    technique: Technique = PLAIN,
    *,
    kv_bytes: int | None = None,
    page_size: int = 16,
    index: str = "radix",
    scheduler: SchedulerConfig | None = None,
    host_s: float = 0.0,
) -> EngineSetup:
    """An engine whose steps a roofline times. Everything but a CPU keeps a step in flight.

    `kv_bytes`: bytes for KV, on all devices together; None is what the weights leave of 90% of the memory.
    Raises InvalidRequest if there is no room for KV.
    """
    model, machine, used = roofline.model, roofline.machine, technique.companion
    total, companion_costs = roofline.weights.total(model), None
    page = kv_geometry(model).page_bytes(page_size)
    if used is not None:
        companion_costs = RooflineCosts(used.roofline(roofline), host_s)
        total += used.total(roofline.weights)
        page += kv_geometry(used.model).page_bytes(page_size) if technique.role != "student" else 0  # as many pages
    room = kv_bytes
    if room is None:
        room = int((int(roofline.tp * machine.usable_memory) - total) / roofline.kv_copies)
        if room < page // page_size:
            raise InvalidRequest(
                f"the weights of {model.name} leave no room for KV: use more devices (--tp), smaller weights, or "
                f"say --kv-bytes"
            )
    pages = room // page
    if pages < 1:
        raise InvalidRequest(
            f"a page of {page_size:,} entries takes {page:,} bytes, and there are {room:,} for KV: "
            f"make pages smaller (--page-size), or give more (--kv-bytes)"
        )
    return EngineSetup(
        model=model,
        costs=RooflineCosts(roofline, host_s),
        pages=pages,
        page_size=page_size,
        index=index,
        asynchronous=machine.kind != "cpu",
        scheduler=scheduler or SchedulerConfig(),
        technique=technique,
        companion_costs=companion_costs,
    )
