"""Opens the engine itself over a simulated model: its scheduler, placement, prefix index and pool accounting."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

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
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.techniques import PLAIN, SpeculatedDecode, Technique
from twostroke.study.simulate.clock import VirtualClock
from twostroke.study.simulate.http_overhead import HttpOverhead
from twostroke.study.simulate.null_objects import NullPool, NullTokenizer
from twostroke.study.simulate.simulated_model import HIDDEN, PassObserver, SimulatedBackend, SimulatedModel
from twostroke.study.simulate.step_costs import HostInclusiveSeconds, StepCostModel

ROLE = "main"
MAX_PAGES = 1 << 26  # each takes some dozens of bytes here


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
