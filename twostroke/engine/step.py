"""What a step computes, and what is told of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.runner import Chunk


@dataclass(frozen=True)
class ScheduledStep:
    """What a step computes.

    `predicted` is its predicted duration in seconds, None without a forecast; `began` when it began.
    """

    chunks: Sequence[Chunk]
    predicted: float | None
    began: float


@dataclass(frozen=True)
class StepReport:
    """Tokens that a step computed, in decoding lanes and in chunks (including replays).

    `predicted_s` is the predicted duration in seconds; None without an ITL objective.
    """

    prefill: int = 0
    decode: int = 0
    predicted_s: float | None = None

    @classmethod
    def of(cls, step: ScheduledStep) -> StepReport:
        """The report of a step whose tokens have been placed."""
        decode = sum(len(chunk.tokens) == 1 and isinstance(chunk.lane, DecodeLane) for chunk in step.chunks)
        return cls(sum(len(chunk.tokens) for chunk in step.chunks) - decode, decode, step.predicted)
