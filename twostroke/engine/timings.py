"""Times of a request's tokens, and the only definitions of TTFT, ITL and TPOT."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from twostroke.engine.clock import SYSTEM

DEFINITIONS = {
    "ttft_s": "first token - arrival",
    "itl_mean_s": "mean of the gaps between consecutive tokens",
    "itl_p99_s": "99th percentile (nearest rank) of the gaps between consecutive tokens",
    "tpot_s": "(last - first) / (n - 1)",
    "prefill_tokens_per_second": "prefilled tokens that were computed, not found in the prefix index / TTFT",
    "decode_tokens_per_second": "(n - 1) / (last - first)",
}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Percentile by nearest rank: the smallest value that at least `percent` % of the values do not exceed."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


@dataclass
class Timings:
    """Times of a request's events, in seconds of the engine's clock."""

    arrival: float = field(default_factory=SYSTEM)
    scheduled: float | None = None
    tokens: list[float] = field(default_factory=list)  # of the first choice
    finished: float | None = None
    loading: float = 0.0  # seconds that its strokes waited for pages from other tiers
    in_bulk: bool = False  # tokens were emitted after decoding: the gaps between them have no meaning

    @property
    def ttft(self) -> float | None:
        """First token - arrival."""
        return self.tokens[0] - self.arrival if self.tokens else None

    @property
    def itls(self) -> list[float]:
        """All gaps between consecutive tokens, in seconds."""
        return [b - a for a, b in itertools.pairwise(self.tokens)]

    @property
    def tpot(self) -> float | None:
        """(last - first) / (n - 1)."""
        n = len(self.tokens)
        return (self.tokens[-1] - self.tokens[0]) / (n - 1) if n > 1 else None


@dataclass(frozen=True)
class Pace:
    """Fields as in `DEFINITIONS`; None if there were too few tokens, or if they were emitted in bulk."""

    ttft_s: float | None
    itl_mean_s: float | None
    itl_p99_s: float | None
    tpot_s: float | None
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None

    @classmethod
    def of(cls, timings: Timings, computed_tokens: int) -> "Pace":
        """`computed_tokens` is the number of tokens that prefill computed before the first token."""
        ttft, gaps, tpot = timings.ttft, timings.itls, timings.tpot
        if timings.in_bulk:
            return cls(ttft, None, None, None, None, None)
        return cls(
            ttft,
            mean(gaps),
            percentile(gaps, 99),
            tpot,
            computed_tokens / ttft if ttft else None,
            1 / tpot if tpot else None,
        )

    def as_dict(self) -> dict[str, float | None]:
        return asdict(self)
