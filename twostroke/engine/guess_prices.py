"""What steps with guesses cost: as predicted, corrected by steps that were measured."""

from collections.abc import Callable
from functools import cache, partial
from math import log2

from twostroke.engine.forecast import Forecast
from twostroke.engine.model import Model
from twostroke.models.cost import SequenceRows

MAX_KNOWN = 256  # shapes of steps whose predicted seconds are kept, by their guesses
MIN_S = 1e-9  # a step is never free
GAIN = 0.2  # weight of a measured step in its correction
MAX_SURPRISE = 1.5  # a step counts as at most so many times slower or quicker: the machine may have paused
FORGET = 0.999  # what is left of a dearer step's surplus after each other step, so that it is tried again


class GuessPrices:
    """Seconds of steps in which so many sequences make a token, behind so many guesses in all.

    Predictions are of steps that were timed when the model was calibrated, and few of them are like these: logits of
    many rows, rows of many sequences, and what Python does for each. So there is a factor for steps of about so many
    sequences and guesses.
    """

    def __init__(self, forecast: Callable[[], Forecast]) -> None:
        self._forecast = forecast
        self._predicted: dict[tuple[Model, int, int], Callable[[int], float]] = {}  # by shape, and then by guesses
        self._factors: dict[tuple[Model, int], dict[int, float]] = {}  # by sequences, and then by guesses

    def seconds(self, model: Model, sequences: int, guesses: int, context: int) -> float:
        """Expected seconds; `context`: entries before a sequence's rows."""
        return self.of_step(model, sequences, context)(guesses)

    def reading(self, model: Model, known: int, count: int) -> float:
        """Expected seconds to enter so many tokens of one sequence behind those that are known."""
        return max(MIN_S, self._forecast().seconds(model, [SequenceRows(count, known, 1)]))

    def of_step(self, model: Model, sequences: int, context: int) -> Callable[[int], float]:
        """Expected seconds by the number of guesses."""
        predicted = self._predictions(model, sequences, context)
        factor = cache(partial(_nearest, self._factors.get((model, _size(sequences)), {})))
        return lambda guesses: predicted(guesses) * factor(_size(guesses))

    def observe(self, model: Model, sequences: int, guesses: int, context: int, seconds: float) -> None:
        """A step took so long."""
        factors, size = self._factors.setdefault((model, _size(sequences)), {}), _size(guesses)
        expected = _nearest(factors, size)
        measured = seconds / self._predictions(model, sequences, context)(guesses)
        measured = min(max(measured, expected / MAX_SURPRISE), expected * MAX_SURPRISE)
        if (plain := factors.get(0)) is not None:
            for other, factor in factors.items():
                if factor > plain and other != size:
                    factors[other] = plain + (factor - plain) * FORGET
        factors[size] = expected + GAIN * (measured - expected) if size in factors else measured

    def _predictions(self, model: Model, sequences: int, context: int) -> Callable[[int], float]:
        """Predicted seconds by the number of guesses, each predicted once."""
        shape = model, sequences, 1 << context.bit_length()
        if shape not in self._predicted:
            if len(self._predicted) >= MAX_KNOWN:
                self._predicted.clear()
            self._predicted[shape] = cache(partial(_predict, self._forecast, *shape))
        return self._predicted[shape]


def _predict(forecast: Callable[[], Forecast], model: Model, sequences: int, context: int, guesses: int) -> float:
    """Predicted seconds of a step of sequences that each make a token, one of them behind all guesses."""
    alone = [SequenceRows(1, context, 1)] * (sequences - 1)
    step = [*alone, SequenceRows(1 + guesses, context, 1 + guesses)]
    return max(MIN_S, forecast().seconds(model, step))


def _nearest(factors: dict[int, float], size: int) -> float:
    """Of the steps that were measured, the factor of those of the most similar number of guesses."""
    return factors[min(factors, key=lambda known: (abs(known - size), known))] if factors else 1.0


@cache
def _size(count: int) -> int:
    """The same for numbers that are about equal."""
    return 1 + round(2 * log2(count)) if count else 0
