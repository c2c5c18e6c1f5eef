"""Options of an evaluation. Those of `twostroke eval` are made from this file, which imports no numpy."""

from dataclasses import dataclass

from twostroke.errors import InvalidRequest
from twostroke.fields import Checked, Rule, declare, flag, integer, like, number, text
from twostroke.sampling.params import SamplingParams

NAMES = ("answers", "likelihood", "divergence", "judge", "serving")  # of the measures, in the order they are taken


@dataclass(frozen=True)
class EvaluationOptions(Checked):
    """Options of an evaluation, checked on construction (InvalidRequest names the field)."""

    limit: int = integer(100, least=1, help="Items; a larger limit continues a smaller one.")
    seed: int = integer(0, least=0, help="Of the items.")
    measures: tuple[str, ...] = declare(
        (), Rule(tuple, f"{', '.join(NAMES)}, or several; none for the task's own.", each=Rule(str))
    )
    baseline: str | None = text(None, help="The method that the others are compared with.")
    chat: bool | None = declare(None, Rule(bool, "Through the model's chat template, or as plain text.", optional=True))
    max_tokens: int | None = like(SamplingParams, "max_tokens", None, "Most tokens of a generated answer.")
    temperature: float = like(
        SamplingParams, "temperature", help="Of generated answers. Every method draws with the same random numbers."
    )
    ignore_eos: bool = like(SamplingParams, "ignore_eos", help="End tokens do not end an answer: all are equally long.")
    positions: int = integer(64, least=1, help="Tokens of the baseline's answer over which divergence is measured.")
    batch: int = integer(8, least=1, help="Items that run side by side.")
    minutes: float | None = number(None, least=0, help="Begin no more items after so many; the same command goes on.")
    timings: bool = flag(
        True,
        help="Measure TTFT and ITL: every method computes its own prefills. Without, methods share them through the "
        "prefix index, which is quicker.",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.measures if name not in NAMES]:
            raise InvalidRequest(f"there is no measure {unknown[0]!r}; there are {', '.join(NAMES)}")
