"""Running an evaluation batch by batch. Each finished item is a line of JSON, and a later run continues there."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from twostroke.api.llm import LLM
from twostroke.api.open_engine import MAIN
from twostroke.errors import InvalidRequest
from twostroke.methods.method import Prompt
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.contenders import Contender
from twostroke.study.evaluate.measure import Case, Comparison, RecordsByMeasure
from twostroke.study.evaluate.measures import MEASURES
from twostroke.study.evaluate.options import EvaluationOptions
from twostroke.study.evaluate.task import Item, Task, encode_answer, encode_prompt, random_stream

ITEMS, SETTINGS = "items.jsonl", "settings.json"


@dataclass(frozen=True)
class ItemRecords:
    """An item's records. `measures` are by measure, then by contender."""

    item: str
    measures: RecordsByMeasure

    def dump(self) -> str:
        return json.dumps({"item": self.item, "measures": self.measures}) + "\n"


class Evaluation:
    """Methods compared on the same items."""

    def __init__(self, llm: LLM, task: Task, contenders: Sequence[Contender], options: EvaluationOptions) -> None:
        """Raises InvalidRequest for what cannot be measured, FetchError if the task's data cannot be had."""
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
            InvalidRequest: the directory holds a run with other settings, or cannot be written.
        """
        known = {} if directory is None else self._resume(directory)
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
            if directory is not None:
                with (directory / ITEMS).open("a", encoding="utf-8") as stream:
                    stream.writelines(line.dump() for line in lines)
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

    def _resume(self, directory: Path) -> dict[str, ItemRecords]:
        """The lines that the directory has. Without settings, it is created and gets them."""
        settings, items = directory / SETTINGS, directory / ITEMS
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not settings.exists():
                if items.exists():
                    raise InvalidRequest(f"{directory} has items of an unknown run: choose another directory")
                settings.write_text(json.dumps(self.settings, indent=1) + "\n", encoding="utf-8")
            _require_equal(directory, json.loads(settings.read_text(encoding="utf-8")), self.settings)
            items.touch()
            return _read(items)
        except (OSError, ValueError) as error:
            raise InvalidRequest(f"{directory} cannot hold this run: {error}") from None


def _require_equal(directory: Path, known: dict[str, Any], mine: dict[str, Any]) -> None:
    for field in mine.keys() | known.keys():
        if (theirs := known.get(field)) != (own := json.loads(json.dumps(mine.get(field)))):
            raise InvalidRequest(
                f"{directory} holds a run whose {field} is {json.dumps(theirs)}, not {json.dumps(own)}: "
                f"choose another directory"
            )


def _read(path: Path) -> dict[str, ItemRecords]:
    """The lines of a file. An unfinished last line, left by a killed run, is cut off."""
    text = path.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole, encoding="utf-8")
    rows = [json.loads(line) for line in whole.splitlines()]
    return {row["item"]: ItemRecords(row["item"], row["measures"]) for row in rows}
