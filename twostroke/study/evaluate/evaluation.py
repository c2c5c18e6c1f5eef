"""Running an evaluation batch by batch."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from time import monotonic
from typing import Any

from twostroke.api.llm import LLM
from twostroke.api.open_engine import MAIN
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.methods.method import Prompt
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.contenders import Contender
from twostroke.study.evaluate.measure import Case, Comparison, RecordsByMeasure
from twostroke.study.evaluate.measures import MEASURES
from twostroke.study.evaluate.options import EvaluationOptions
from twostroke.study.evaluate.run_directory import ItemRecords, run_directory
from twostroke.study.evaluate.task import Item, Task, encode_answer, encode_prompt, random_stream


class Evaluation:
    """Methods compared on the same items."""

    def __init__(self, llm: LLM, task: Task, contenders: Sequence[Contender], options: EvaluationOptions) -> None:
        """
        Raises:
            InvalidRequest: it cannot be measured. ContextLengthExceeded: an item is too long for the model. FetchError:
            the task's data cannot be had.
        """
        names = [contender.name for contender in contenders]
        for contender in contenders:
            llm.require_method(contender.method)
        if len(set(names)) < len(names) or not names:
            raise InvalidRequest("name at least one method, each once")
        baseline = options.baseline or ("repeat" if "repeat" in names else names[0])
        if baseline not in names:
            raise InvalidRequest(f"the baseline {baseline!r} is not among the methods {', '.join(names)}")
        chat = llm.tokenizer.chat_template is not None if options.chat is None else options.chat
        if chat and llm.tokenizer.chat_template is None:
            raise InvalidRequest(f"model {llm.name} has no chat template: evaluate it without")
        # the items in the model's tokens
        self.cases = [
            Case(
                item,
                Prompt(encode_prompt(llm.tokenizer, item, chat), llm.tokenizer),
                [encode_answer(llm.tokenizer, answer, chat) for answer in item.answers],
            )
            for item in task.items(llm.tokenizer, options.limit, options.seed)
        ]
        if not self.cases:
            raise InvalidRequest(f"{task.name} has no item with these parameters: choose others")
        for case in self.cases:
            try:
                llm.model.require_room(len(case.prompt))
            except ContextLengthExceeded as error:
                raise ContextLengthExceeded(f"item {case.item.id} of {task.name}: {error}") from None
        wanted = options.measures or task.measures
        self.measures = [measure for name, measure in MEASURES.items() if name in wanted]  # what is measured, in order
        for measure in self.measures:
            if missing := [name for name in measure.needs if name not in wanted]:
                raise InvalidRequest(f"measure {measure.name} reads the records of {missing[0]}: measure both")
            if reason := measure.suits(task, self.cases):
                raise InvalidRequest(f"{measure.name} cannot be measured: {reason}")
        self.options = options
        self.comparison = Comparison(
            llm,
            task,
            tuple(contenders),
            next(contender for contender in contenders if contender.name == baseline),
            self._params,
            options.positions,
            options.timings,
        )
        backend = llm.backend
        # everything that the numbers depend on; a run may continue another with the same settings
        self.settings: dict[str, Any] = {
            "task": {"name": task.name, "parameters": task.parameters},
            "seed": options.seed,
            "model": llm.name,
            "weights": llm.model.id,
            "companions": {
                role: {"model": model.name, "weights": model.id}
                for role, model in llm.engine.models.items()
                if role != MAIN
            },
            "backend": backend.label,
            "dtype": backend.dtype,
            "methods": [contender.facts for contender in contenders],
            "baseline": baseline,
            "measures": [measure.name for measure in self.measures],
            "chat": chat,
            "max_tokens": options.max_tokens or task.max_tokens,
            "temperature": options.temperature,
            "ignore_eos": options.ignore_eos,
            "positions": options.positions,
            "batch": options.batch,
            "timings": options.timings,
        }

    def run(
        self, directory: Path | None = None, progress: Callable[[int], None] = lambda done: None
    ) -> list[ItemRecords]:
        """The records of every item in order; with `minutes`, of those that are done by then, at least a batch's.

        Args:
            directory: where items are written as they are done, and read from if they are there; None keeps nothing.
            progress: called with the number of items done.

        Raises:
            InvalidRequest: the directory holds a run with other settings, another run writes there, or it cannot be
            written.
        """
        with nullcontext() if directory is None else run_directory(directory, self.settings) as held:
            known = {} if held is None else held.known
            return self._run(known, (lambda _: None) if held is None else held.add, progress)

    def _run(
        self,
        known: dict[str, ItemRecords],
        keep: Callable[[Sequence[ItemRecords]], None],
        progress: Callable[[int], None],
    ) -> list[ItemRecords]:
        todo = [case for case in self.cases if case.item.id not in known]
        progress(len(self.cases) - len(todo))
        if todo and self.options.timings:  # the first pass also reads the weights into memory
            self.comparison.llm.generate([todo[0].prompt], max_tokens=2)
        end = monotonic() + 60 * (math.inf if self.options.minutes is None else self.options.minutes)
        for start in range(0, len(todo), self.options.batch):
            if start and monotonic() > end:
                break
            lines = self._measure(todo[start : start + self.options.batch])
            known |= {line.item: line for line in lines}
            keep(lines)
            progress(len(self.cases) - len(todo) + start + len(lines))
        return [known[case.item.id] for case in self.cases if case.item.id in known]

    def _params(self, item: Item) -> SamplingParams:
        return SamplingParams(
            max_tokens=self.settings["max_tokens"],
            temperature=self.options.temperature,
            ignore_eos=self.options.ignore_eos,
            seed=random_stream(self.options.seed, "sampling", item.id).getrandbits(63),
        )

    def _measure(self, cases: Sequence[Case]) -> list[ItemRecords]:
        known: list[RecordsByMeasure] = [{} for _ in cases]
        for measure in self.measures:
            for records, made in zip(known, measure.measure(self.comparison, cases, known), strict=True):
                records[measure.name] = made
                kept = made[self.comparison.baseline.name].get("kept_bytes")
                for record in made.values() if kept is not None else ():
                    record["kept_ratio"] = record["kept_bytes"] / kept
        return [ItemRecords(case.item.id, records) for case, records in zip(cases, known, strict=True)]
