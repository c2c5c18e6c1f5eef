"""Measures of an evaluation: for every method and item a record of numbers, and a note on their limits."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Program
from twostroke.methods.method import Prompt
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.contenders import Contender
from twostroke.study.evaluate.task import Item, Task

Record = dict[str, Any]
RecordsByMeasure = dict[str, dict[str, Record]]  # by measure, then by contender


@dataclass(frozen=True)
class Metric:
    """A number in a record."""

    key: str  # its name there
    title: str
    # "share" for a bool, whose mean is a share of items; "curve" for a list; otherwise the unit of a number
    form: Literal["share", "part", "ratio", "nats", "perplexity", "bytes", "seconds", "rate", "count", "curve"]
    meaning: str  # its definition
    pairs: bool = False  # whether methods are compared on it, item by item
    exponent_of: str | None = None  # it is no field of a record, but e to the mean of this one


# What a method keeps of the prompt; an evaluation fills in the second.
KEPT = (
    Metric("kept_bytes", "KV kept", "bytes", "K and V of the value that the first decode starts from"),
    Metric("kept_ratio", "KV ratio", "ratio", "KV kept / the baseline's"),
)


@dataclass(frozen=True)
class Case:
    """An item in a model's tokens. `answers` are those whose likelihood can be measured."""

    item: Item
    prompt: Prompt
    answers: list[list[int]]


@dataclass(frozen=True)
class Comparison:
    """The methods of a comparison, and its terms."""

    llm: LLM
    task: Task
    contenders: tuple[Contender, ...]
    baseline: Contender  # the contender that the others are compared with
    params: Callable[[Item], SamplingParams]  # how the answer to an item is sampled, by every contender alike
    positions: int  # tokens of the baseline's answer over which divergence is measured
    timings: bool  # every method computes its own prefills, so that TTFT includes all of them

    def run(
        self, make_programs: Sequence[Callable[[], Program]], params: Sequence[SamplingParams] | None = None
    ) -> list[Request]:
        """Run programs side by side; without params, to their end. Raises the error of the first that fails."""
        tokenizer, engine = self.llm.tokenizer, self.llm.engine
        params = params or [SamplingParams(max_tokens=None)] * len(make_programs)
        requests = [
            engine.submit(Request(make, own, tokenizer)) for make, own in zip(make_programs, params, strict=True)
        ]
        engine.finish(requests)
        return requests

    def clear_prefix_indexes(self) -> None:
        """Empty the prefix indexes, so that one method's prefill does not shorten the next one's."""
        for model in self.llm.engine.models.values():
            if model.index is not None:
                model.index.clear()


class Measure(ABC):
    """One kind of record."""

    name: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # measures whose records this one reads
    metrics: ClassVar[tuple[Metric, ...]]
    headlines: ClassVar[tuple[str, ...]]  # keys of the metrics that are also in the table with a row for each method
    blind: ClassVar[str]  # what its numbers cannot show

    def suits(self, task: Task, cases: Sequence[Case]) -> str | None:
        """Why it cannot be measured on these, or None."""
        return None

    @abstractmethod
    def measure(
        self, comparison: Comparison, cases: Sequence[Case], known: Sequence[RecordsByMeasure]
    ) -> list[dict[str, Record]]:
        """Return each contender's record for each case. `known` has the records of earlier measures."""
