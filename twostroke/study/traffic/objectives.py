"""What users are promised: objectives for TTFT and ITL."""

from dataclasses import dataclass
from typing import Self

from twostroke.engine.timings import Timings, percentile
from twostroke.errors import InvalidRequest


@dataclass(frozen=True)
class Objectives:
    """Limits in seconds; None for no limit. Raises InvalidRequest for limits that nothing can meet."""

    ttft_s: float | None = None
    itl_s: float | None = None
    percent: float = 99.0  # which percentile of all TTFTs, and of an answer's gaps, has to keep the limit

    def __post_init__(self) -> None:
        for name, limit in (("TTFT", self.ttft_s), ("ITL", self.itl_s)):
            if limit is not None and not limit > 0:
                raise InvalidRequest(f"an objective of {limit * 1e3:g} ms for {name} cannot be met: give more than 0")
        if not 0 < self.percent < 100:
            raise InvalidRequest(f"a percentile is above 0 and below 100, not {self.percent:g}")

    @classmethod
    def of_ms(cls, ttft_ms: float | None, itl_ms: float | None, percent: float = 99.0) -> Self:
        """The same of milliseconds."""
        return cls(ttft_ms and ttft_ms / 1e3, itl_ms and itl_ms / 1e3, percent)

    @property
    def given(self) -> bool:
        return self.ttft_s is not None or self.itl_s is not None

    def met(self, timings: Timings) -> bool:
        """Whether an answer that came to its end kept both limits."""
        ttft, worst = timings.ttft, percentile(timings.itls, self.percent)
        in_time = self.ttft_s is None or (ttft is not None and ttft <= self.ttft_s)
        return in_time and (self.itl_s is None or worst is None or worst <= self.itl_s)
