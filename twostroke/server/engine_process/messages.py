"""What the server and its engine's process say to each other.

Both run the same code of the same installation, on one host, over a pair of sockets that nobody else has. `VERSION`
guards against one that was changed on disk while the server ran.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from twostroke.api.llm import LLM
from twostroke.engine.output import Token
from twostroke.engine.step import StepReport
from twostroke.engine.strokes import Program
from twostroke.kv.kv_events import Change
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.scores import TokenScore

VERSION = 2


@dataclass(frozen=True)
class OpenOptions:
    """How the process opens its model.
    cores: those that it may use; empty for all.
    tells_pages: it says which pages its prefix index gets and loses.
    """

    opener: Callable[..., LLM]  # makes the `LLM`; a function of a module
    arguments: Mapping[str, Any]  # its arguments
    generation: int = 0  # how many processes came before, so that values of another are known as such
    methods: Sequence[str] = ()  # techniques that the server knows, by the sources that they come from
    log_format: str | None = None  # that of the server's log
    one_pool: bool = True  # a later process' pool takes as much as the first one's did, where `kv_bytes` is left open
    cores: Sequence[int] = ()
    tells_pages: bool = False
    version: int = VERSION


@dataclass(frozen=True)
class Begin:
    """Start a request. `given`: the tokens of each choice that another process has made and delivered."""

    id: int
    program: Callable[[], Program]
    params: SamplingParams
    prompt_tokens: int
    seed: int
    arrival: float
    priority: int
    name: str
    salt: bytes
    first_choice: int
    given: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Cancel:
    """End a request."""

    id: int


@dataclass(frozen=True)
class Ask:
    """Run a function of a module: between two steps with the engine, or beside them with the `LLM`."""

    id: int
    action: Callable[[Any], Any]
    between_steps: bool


@dataclass(frozen=True)
class Release:
    """A value that the server held is not needed any more."""

    value: int


@dataclass(frozen=True)
class Stop:
    """Close the model and end. `comes_back`: what its pool holds goes to the tiers before."""

    comes_back: bool = False


@dataclass(frozen=True)
class Opened:
    """The model is there; the state is `HollowState`."""

    state: Any


@dataclass(frozen=True)
class Failed:
    """The process ends, and this is why: a typed error while it was opened, or its engine's failure."""

    error: Exception


@dataclass(frozen=True)
class RequestFacts:
    """What else is known of a request: with its first tokens, and at its end."""

    scheduled: float | None
    finished: float | None
    loading: float
    in_bulk: bool
    cancelled: bool
    prefilled_tokens: int
    kv_bytes: int
    preemptions: int
    cached_by_tier: Counter[str]
    prompt_scores: tuple[TokenScore | None, ...] | None = None
    result: Any = None


@dataclass(frozen=True)
class RequestNews:
    """What a step did for one request. `times`: of the first choice's new tokens, in seconds of the monotonic clock."""

    id: int
    tokens: tuple[Token, ...]
    times: tuple[float, ...]
    done: bool
    error: Exception | None
    facts: RequestFacts | None


@dataclass(frozen=True)
class News:
    """What steps did: for requests, their durations in seconds with their reports, and to the prefix index."""

    requests: list[RequestNews] = field(default_factory=list[RequestNews])
    steps: list[tuple[float, StepReport]] = field(default_factory=list[tuple[float, StepReport]])
    pages: list[Change] = field(default_factory=list[Change])


@dataclass(frozen=True)
class Beat:
    """The process lives; `step_age_s` is how long ago it was between two steps."""

    step_age_s: float


@dataclass(frozen=True)
class AskReply:
    """What came of an `Ask`."""

    id: int
    result: Any
    error: Exception | None
