"""What serves: workers, their router, the links between them, and what may go wrong."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from twostroke.engine.router import KvAware, LeastLoaded, RoundRobin, RoutedCall, Router
from twostroke.errors import InvalidRequest
from twostroke.kv.kv_events import page_names
from twostroke.study.simulate.engine_setup import EngineSetup
from twostroke.study.simulate.simulated_request import SimulatedRequest, prompt_tokens
from twostroke.study.simulate.worker import SimulatedWorker

ROUTERS: Sequence[str] = ("round-robin", "least-loaded", "kv-aware")


def make_router(name: str) -> Router[SimulatedWorker]:
    """The router of that name. Raises InvalidRequest, which lists all."""
    if name not in ROUTERS:
        raise InvalidRequest(f"the router must be one of {', '.join(ROUTERS)}, not {name!r}")
    return RoundRobin() if name == "round-robin" else KvAware() if name == "kv-aware" else LeastLoaded()


def routed(call: SimulatedRequest, setup: EngineSetup) -> RoutedCall:
    """A call as routers see it: its load is the pages of its prompt and answer."""
    pages = -(-(call.asked.prompt_tokens + call.asked.output_tokens) // setup.page_size)
    return RoutedCall(pages, _names(call, setup))


def _names(call: SimulatedRequest, setup: EngineSetup) -> Iterator[bytes]:
    yield from page_names(prompt_tokens(call.asked.pieces, setup.vocab), setup.page_size)


@dataclass(frozen=True)
class FleetFaults:
    """What goes wrong, drawn from `seed`."""

    life_s: float | None = None  # mean seconds that a worker lives, exponentially distributed; None: they do not die
    down_s: float = 10.0  # seconds until another takes its place, with an empty pool
    notice_s: float = 1.0  # seconds until the router knows of a death, and gives its calls to others
    lost: float = 0.0  # share of transfers that never arrive; the receiver waits `patience_s` for them
    patience_s: float = 5.0
    until_s: float = math.inf  # when nothing goes wrong any more
    seed: int = 0

    def __post_init__(self) -> None:
        if self.life_s is not None and not self.life_s > 0:
            raise InvalidRequest(f"a worker lives more than 0 s, not {self.life_s:g}")
        if not all(0 <= seconds < math.inf for seconds in (self.down_s, self.notice_s, self.patience_s)):
            raise InvalidRequest("seconds of downtime, notice and patience are 0 or more")
        if not 0 <= self.lost < 1:
            raise InvalidRequest(f"the share of lost transfers is at least 0 and below 1, not {self.lost:g}")


@dataclass(frozen=True)
class KvLink:
    """The way of KV between workers. Each worker sends one value at a time, and receives one at a time."""

    rate: float  # bytes per second. latency_s: seconds that each transfer takes besides.
    latency_s: float = 1e-3

    def __post_init__(self) -> None:
        if not self.rate > 0 or not 0 <= self.latency_s < math.inf:
            raise InvalidRequest("a link has a rate above 0, and a latency of 0 s or more")


@dataclass(frozen=True)
class Fleet:
    """Workers of one setup."""

    setup: EngineSetup
    # workers of both strokes. prefill, decode: workers of one stroke each; all three, or the last two.
    together: int = 1
    prefill: int = 0
    decode: int = 0
    router: str = "least-loaded"
    link: KvLink | None = None  # between prefill and decode workers
    faults: FleetFaults = field(default_factory=FleetFaults)

    def __post_init__(self) -> None:
        apart = (self.prefill, self.decode)
        if min(self.together, *apart) < 0 or (self.together > 0) == (max(apart) > 0):
            raise InvalidRequest("say how many workers do both strokes, or how many prefill and how many decode")
        if max(apart) > 0 and min(apart) < 1:
            raise InvalidRequest("prefill and decode apart need at least one worker each")
        if max(apart) > 0 and self.link is None:
            raise InvalidRequest("prefill and decode apart need a link: say its rate in GB/s")
        if self.setup.technique.method and (self.disaggregated or self.faults.life_s is not None):
            raise InvalidRequest("techniques are simulated on workers of both strokes that do not die")
        if self.router not in ROUTERS:
            raise InvalidRequest(f"the router must be one of {', '.join(ROUTERS)}, not {self.router!r}")
        if self.router == "kv-aware" and self.setup.index == "off":
            raise InvalidRequest("a KV-aware router needs prefix indexes: leave out --prefix-index off")

    @property
    def size(self) -> int:
        """Number of workers."""
        return self.together + self.prefill + self.decode

    @property
    def disaggregated(self) -> bool:
        return self.prefill > 0
