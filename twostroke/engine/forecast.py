"""How long steps will take, learned from how long they took."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from twostroke.engine.calibration import calibrate
from twostroke.engine.model import Model
from twostroke.engine.runner import Chunk
from twostroke.engine.scheduler import Plan
from twostroke.models.cost import Correction, Predictor, Rows


class Forecast:
    """Seconds of a step over any of an engine's models, corrected by those that were taken.

    Steps of single rows, of chunks, and of both each have a correction of their own: what is outside the kernels is
    a larger part of the first, and only the last are held to an objective.
    """

    def __init__(self, predictors: Mapping[Model, Predictor]) -> None:
        self._predictors = dict(predictors)
        self._corrections: defaultdict[str, Correction] = defaultdict(Correction)

    @classmethod
    def calibrated(cls, models: Iterable[Model]) -> "Forecast":
        """Takes about a second for each model."""
        return cls({model: calibrate(model) for model in dict.fromkeys(models)})

    def planned(self, plan: Plan) -> float:
        """Seconds of a step in which lanes enter so many of their tokens."""
        return self._seconds(
            (lane.model, Rows(count, len(lane.writer), lane.logit_rows(count))) for lane, count in plan
        )

    def placed(self, entries: Sequence[Chunk]) -> float:
        """The same, once the tokens have their places."""
        return self._seconds(
            (one.lane.model, Rows(len(one.tokens), len(one.lane.writer) - len(one.tokens), one.logit_rows))
            for one in entries
        )

    def observe(self, entries: Sequence[Chunk], predicted: float, measured: float) -> None:
        """A step that was predicted to take so many seconds has taken so many."""
        self._corrections[_kind(len(one.tokens) for one in entries)].observe(predicted, measured)

    def _seconds(self, step: Iterable[tuple[Model, Rows]]) -> float:
        by_model: defaultdict[Model, list[Rows]] = defaultdict(list)
        for model, rows in step:
            by_model[model].append(rows)
        kind = _kind(rows.count for group in by_model.values() for rows in group)
        seconds = sum(self._predictors[model].seconds(group) for model, group in by_model.items())
        return seconds * self._corrections[kind].factor


def _kind(counts: Iterable[int]) -> str:
    single = {count == 1 for count in counts}
    return "mixed" if len(single) > 1 else "single" if single == {True} else "chunks"
