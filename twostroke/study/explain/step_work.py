"""The cost of a step: FLOPs and bytes counted from the architecture, and what bounds it on this machine."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from twostroke.engine.model import Model
from twostroke.models.cost import SequenceRows, WorkAmounts
from twostroke.models.step_predictor import StepPredictor

READING, COMPUTING = "reading memory", "computing"


@dataclass(frozen=True)
class StepWork:
    """The work of one or several steps."""

    weight_bytes: float  # matrices, read once a step for all rows
    kv_bytes: float  # K and V of the entries that rows attend to
    # linear_flops, attention_flops, head_flops: a multiplication and an addition are two
    linear_flops: float
    attention_flops: float
    head_flops: float
    # flops, bytes: their sums
    flops: float
    bytes: float
    intensity: float  # FLOPs per byte
    # seconds of each kind of work in the order above, at prices fitted to timed steps of this model on this machine
    # (`engine/calibration.py`). Products that reading hides take none.
    predicted_s: tuple[float, ...]
    bound: str  # the kind that takes most of them: READING or COMPUTING


def step_work(model: Model, predictor: StepPredictor, steps: Iterable[Sequence[SequenceRows]]) -> StepWork:
    """The work of some steps, one after another."""
    amounts, seconds = WorkAmounts(0, 0, 0, 0, 0), WorkAmounts(0, 0, 0, 0, 0)
    for step in steps:
        amounts = WorkAmounts(*map(sum, zip(amounts, model.cost.work(step), strict=True)))
        seconds = WorkAmounts(*map(sum, zip(seconds, predictor.parts(step), strict=True)))
    read, computed = sum(seconds[:2]), sum(seconds[2:])
    flops, total = sum(amounts[2:]), sum(amounts[:2])
    return StepWork(
        *amounts,
        flops=flops,
        bytes=total,
        intensity=flops / total if total else 0.0,
        predicted_s=tuple(seconds),
        bound=READING if read > computed else COMPUTING,
    )


def prefill_steps(tokens: int, chunk: int) -> list[list[SequenceRows]]:
    """The steps of a prompt that is prefilled alone, `chunk` tokens in a step."""
    starts = range(0, tokens, chunk)
    return [[SequenceRows(min(chunk, tokens - start), start, int(start + chunk >= tokens))] for start in starts]
