"""Predicts how long steps take, and corrects the prediction by measured steps."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

from twostroke.engine.calibration import calibrate
from twostroke.engine.model import Model
from twostroke.engine.scheduler import Plan
from twostroke.engine.step import Chunk
from twostroke.models.cost import SequenceRows
from twostroke.models.step_predictor import StepCorrection, StepSeconds


class Forecast:
    """Predicts the seconds of a step over any of an engine's models, corrected by measured steps.

    Steps of single rows, steps of chunks, and mixed steps have separate corrections: time outside the kernels is a
    larger part of single-row steps, and only mixed steps must meet the ITL objective.
    """

    def __init__(self, predictors: Mapping[Model, StepSeconds]) -> None:
        self._predictors = dict(predictors)
        self._corrections: defaultdict[str, StepCorrection] = defaultdict(StepCorrection)

    @classmethod
    def calibrated(cls, models: Iterable[Model]) -> "Forecast":
        """Calibrate each model, which takes about a second each."""
        return cls({model: calibrate(model) for model in dict.fromkeys(models)})

    @property
    def models(self) -> list[Model]:
        return list(self._predictors)

    def decode_step(self, model: Model) -> float:
        """Predicted seconds of a step in which one sequence makes a token."""
        return self._predictors[model].seconds([SequenceRows(1, 0, 1)])

    def seconds(self, model: Model, step: Sequence[SequenceRows]) -> float:
        """Predicted seconds of a step of one model, on a machine as it was when the model was calibrated."""
        return self._predictors[model].seconds(step)

    def prefill(self, model: Model, chunk: int) -> Callable[[int, int], float]:
        """A function that predicts the seconds to compute tokens alone, `chunk` in a step: (entries before, tokens)."""
        predictor, correction = self._predictors[model], self._corrections["chunks"]

        def seconds(context: int, count: int) -> float:
            starts = range(context, context + count, chunk)
            steps = [SequenceRows(min(chunk, context + count - start), start) for start in starts]
            return sum(predictor.seconds([rows]) for rows in steps) * correction.factor

        return seconds

    def planned(self, plan: Plan) -> float:
        """Predicted seconds of a planned step."""
        return self._seconds(
            (lane.model, SequenceRows(count, len(lane.writer), lane.logit_rows(count))) for _, lane, count in plan
        )

    def placed(self, entries: Sequence[Chunk]) -> float:
        """Predicted seconds of a step whose tokens have been placed."""
        return self._seconds(
            (one.lane.model, SequenceRows(len(one.tokens), len(one.lane.writer) - len(one.tokens), one.logit_rows))
            for one in entries
        )

    def observe(self, entries: Sequence[Chunk], predicted: float, measured: float) -> None:
        """Correct later predictions by one measured step; both arguments are seconds."""
        self._corrections[_kind(len(one.tokens) for one in entries)].observe(predicted, measured)

    def _seconds(self, step: Iterable[tuple[Model, SequenceRows]]) -> float:
        by_model: defaultdict[Model, list[SequenceRows]] = defaultdict(list)
        for model, rows in step:
            by_model[model].append(rows)
        kind = _kind(rows.count for group in by_model.values() for rows in group)
        seconds = sum(self._predictors[model].seconds(group) for model, group in by_model.items())
        return seconds * self._corrections[kind].factor


def _kind(counts: Iterable[int]) -> str:
    single = {count == 1 for count in counts}
    return "mixed" if len(single) > 1 else "single" if single == {True} else "chunks"
