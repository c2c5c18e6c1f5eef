"""Gains and losses of speculation: tokens per second against plain decoding of the same model.

    python -m benchmarks.speculation --models qwen2.5-coder-1.5b --draft qwen2.5-coder-0.5b

Sources of guesses are prompt lookup, the model's weights in fewer bits (a student, on the model's KV), and a draft
model with its own KV. The number of guesses is fixed, or as many as pay (twostroke/engine/guess_judge.py).
Contenders take turns, each round beginning with another. One engine serves them all, and the run fails unless every
answer has the tokens of the plain one and bitwise equal log-probabilities.

A 4-bit checkpoint has no copy that is much smaller: its int4 student is nearly the model itself, and int3 and int2 are
stored in 4 bits (twostroke/models/checkpoints/quantize.py). With --weights int8 or bf16 the model is larger and an int4
student smaller. The channels are then shuffled (benchmarks/shuffled.py), so that 4 bits have a realistic loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from os import urandom
from random import Random
from statistics import median
from typing import Any

from benchmarks.peer.figures import turn_order
from benchmarks.quiet import OTHERS_CPU, Others, doubt
from benchmarks.results_file import save
from benchmarks.shuffled import shuffled
from benchmarks.speculation_workloads import WORKLOADS, Workload
from benchmarks.terminal import command_line, markdown, numbers, say
from twostroke.api.completion import Completion
from twostroke.api.llm import LLM
from twostroke.engine.output import Token
from twostroke.errors import InvalidRequest
from twostroke.methods import Method, Plain, Speculative
from twostroke.methods.speculative import Speculation
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.sampling.params import SamplingParams
from twostroke.study.evaluate.measures.judge import repetition

DRAFTS = {"qwen2.5-coder-1.5b": "qwen2.5-coder-0.5b"}  # default of --draft
WARM_UP = 8  # tokens of warm-up answers
COLUMNS = ("workload", "at once", "decoding", "tokens/s", "of plain", "while all answer", "accepted", "tokens/pass")

DEFINITIONS = {
    "tokens_per_second": "tokens after the first / (last token - first token); so many streams, each of which has its "
    "next answer when one ends; answers are of half to 1.5 times as many tokens as asked for; prompts are in the "
    "prefix index, so a model's prefill is left out, a draft's is not",
    "of_plain": "median over rounds of tokens_per_second / plain's in the same round",
    "while_all": "the same until an answer ends and none is left to take its place: with guesses the last answers end "
    "one after another, and a server has more of them; tokens_per_second where no token falls between",
    "whole_s": "arrival to last token of all, with what is left of prefill",
    "acceptance": "accepted guesses / guesses; None if there were none",
    "tokens_per_pass": "tokens after the first / passes of the model that judge them; plain decoding has 1",
    "repetition3": "share of three tokens in a row that occurred before in the same answer",
    "identical": "every contender's answers in every round: token ids and log-probabilities, bitwise",
    **OTHERS_CPU,
}


class Differs(Exception):
    """An answer differs from the plain one: the figures are invalid."""


@dataclass(frozen=True)
class Contender:
    """A way to decode. The first one is the baseline.

    Attributes:
        before: whether the engine has given the same answers before, and may guess from them.
    """

    name: str
    method: Method
    before: bool = False


@dataclass(frozen=True)
class Turn:
    """One measurement, as in `DEFINITIONS`."""

    tokens_per_second: float
    while_all: float
    whole_s: float
    acceptance: float | None
    tokens_per_pass: float
    others_cpu: float


def contenders(guesses: Sequence[int], student: str | None, draft: str | None) -> list[Contender]:
    """Plain decoding, and each source of guesses: as many as pay, then every fixed number."""
    found = [Contender("plain", Plain())]
    for source, label in {"lookup": "lookup", "student": student, "draft": draft}.items():
        if label:
            found.append(Contender(f"{label}, judged", Speculative(source)))
            if source == "lookup":
                found.append(Contender("lookup, answered before", Speculative(source), before=True))
            found += [Contender(f"{label}, {k}", Speculative(source, guesses=k, adaptive=False)) for k in guesses if k]
    return found


def limits(tokens: int, count: int) -> list[int]:
    """Most tokens of each answer: from half of `tokens` to half as many again. Streams do not end in step then."""
    spread = [round(tokens * (0.5 + i / max(1, count - 1))) for i in range(count)]
    return Random(0).sample(spread, count)


def answer(
    llm: LLM, prompts: Sequence[Sequence[int]], method: Method, salt: bytes, most: Sequence[int], **sampling: Any
) -> list[Completion]:
    """An answer to each prompt, of at most so many tokens."""
    requests = [
        llm.request(prompt, SamplingParams(max_tokens=tokens, **sampling), method)
        for prompt, tokens in zip(prompts, most, strict=True)
    ]
    for request in requests:
        request.cache_salt = salt
    llm.engine.run(requests)
    return [Completion.of(request, request.events) for request in requests]


def take_turn(
    llm: LLM, contender: Contender, workload: Workload, prompts: Sequence[Sequence[int]], tokens: int, streams: int = 1
) -> tuple[Turn, list[list[Token]]]:
    """Answer a workload's prompts with about that many tokens each (`limits`); the engine runs so many at once."""
    salt = b"before" if contender.before else urandom(8)  # other texts are not guessed from
    answer(llm, prompts, Plain(), salt, [1] * len(prompts))  # so that no prefill is among the decodes
    others = Others()
    most = limits(tokens, len(prompts))
    answers = answer(llm, prompts, contender.method, salt, most, temperature=workload.temperature, seed=0)
    tokens_at = [answer.timings.tokens for answer in answers]
    first, last = min(one[0] for one in tokens_at), max(one[-1] for one in tokens_at)
    until = sorted(one[-1] for one in tokens_at)[-streams]
    decoded = sum(len(answer.tokens) - 1 for answer in answers)
    if not decoded:
        raise InvalidRequest(f"every answer to {workload.name!r} is one token long: nothing is decoded")
    while_all = sum(first < at <= until for one in tokens_at for at in one)
    work = [answer.facts for answer in answers if isinstance(answer.facts, Speculation)]
    guessed = sum(one.guessed for one in work)
    turn = Turn(
        tokens_per_second=decoded / (last - first),
        while_all=while_all / (until - first) if while_all else decoded / (last - first),
        whole_s=last - min(answer.timings.arrival for answer in answers),
        acceptance=sum(one.accepted for one in work) / guessed if guessed else None,
        tokens_per_pass=decoded / max(decoded - sum(one.accepted for one in work), sum(one.rounds for one in work)),
        others_cpu=others.cpu,
    )
    return turn, [answer.tokens for answer in answers]


@dataclass(frozen=True)
class Found:
    """Measurements on one workload: turns by contender, one per round, and the answers, which are equal for all."""

    workload: Workload
    streams: int
    turns: dict[str, list[Turn]]
    answers: list[list[Token]]

    def of_plain(self, name: str, while_all: bool = False) -> float:
        """See `DEFINITIONS`; with `while_all` the ratio of that."""
        plain = next(iter(self.turns.values()))
        pairs = zip(self.turns[name], plain, strict=True)
        if while_all:
            return median(mine.while_all / other.while_all for mine, other in pairs)
        return median(mine.tokens_per_second / other.tokens_per_second for mine, other in pairs)

    def medians(self, name: str) -> dict[str, float | None]:
        """Median speeds over rounds; acceptance is that of the last, in which the judge knows most."""
        turns = self.turns[name]
        return {
            "tokens_per_second": median(turn.tokens_per_second for turn in turns),
            "of_plain": self.of_plain(name),
            "while_all_of_plain": self.of_plain(name, while_all=True),
            "whole_s": median(turn.whole_s for turn in turns),
            "acceptance": turns[-1].acceptance,
            "tokens_per_pass": turns[-1].tokens_per_pass,
        }

    @property
    def repetition3(self) -> float:
        """See `DEFINITIONS`; the mean over answers."""
        return sum(repetition([token.id for token in answer]) or 0.0 for answer in self.answers) / len(self.answers)


def measure(
    llm: LLM,
    chosen: Sequence[Contender],
    workload: Workload,
    streams: int,
    rounds: int,
    tokens: int,
    say: Callable[[str], None],
) -> Found:
    """Turns of every contender, after a short warm-up answer of each. Raises Differs, InvalidRequest."""
    prompts, by_name = workload.prompts(llm, 2 * streams), {contender.name: contender for contender in chosen}
    if (needed := max(map(len, prompts)) + max(limits(tokens, len(prompts)))) > llm.config.max_position:
        raise InvalidRequest(
            f"{workload.name!r} needs {needed} positions, and {llm.name} has {llm.config.max_position}"
        )
    for contender in chosen:
        take_turn(llm, contender, workload, prompts, tokens if contender.before else WARM_UP, streams)
    found = Found(workload, streams, {name: [] for name in by_name}, [])
    for number in range(rounds):
        for name in turn_order(list(by_name), number):
            say(f"{llm.name}, {workload.name}, {streams} at once: round {number + 1} of {rounds}, {name}")
            turn, answers = take_turn(llm, by_name[name], workload, prompts, tokens, streams)
            found.turns[name].append(turn)
            found.answers[:] = found.answers or answers  # in round 1 plain decoding comes first
            if answers != found.answers:
                raise Differs(f"{llm.name}, {workload.name}: {name} does not answer as {chosen[0].name} does")
    return found


def table(title: str, results: Sequence[Found]) -> str:
    """A Markdown table with a block of rows for each workload, and the cases where speculation was slower."""
    rounds = len(next(iter(results[0].turns.values())))
    rows: list[list[str]] = []
    for found in results:
        for name in found.turns:
            one = found.medians(name)
            accepted = "" if one["acceptance"] is None else f"{one['acceptance']:.0%}"
            of_plain = [f"{one[key]:.2f}" for key in ("of_plain", "while_all_of_plain")]
            speeds = [f"{one['tokens_per_second']:.1f}", *of_plain, accepted, f"{one['tokens_per_pass']:.2f}"]
            rows.append([found.workload.name, str(found.streams), name, *speeds])
    title = f"**{title}**: medians of {rounds}, every answer the plain one to the bit"
    lines = [title, "", markdown(COLUMNS, rows, words=3), ""]
    for found in results:
        count, again = sum(map(len, found.answers)), f"{found.repetition3:.0%} of three tokens in a row occurred before"
        lost = [name for name in found.turns if found.of_plain(name) < 1]
        slower = f"; slower than plain: {'; '.join(lost)}" if lost else ""
        lines.append(
            f"- {found.workload.name}, {found.streams} ({found.workload.about}): {count} tokens, {again}{slower}"
        )
    cpus = [turn.others_cpu for found in results for turns in found.turns.values() for turn in turns]
    return "\n".join([*lines, "", *doubt(cpus)])


def facts(results: Sequence[Found], tokens: int) -> dict[str, Any]:
    """All results, for JSON."""
    rows = [
        {
            "workload": found.workload.name,
            "streams": found.streams,
            "temperature": found.workload.temperature,
            "contender": name,
        }
        | {"medians": found.medians(name), "turns": [asdict(turn) for turn in turns]}
        for found in results
        for name, turns in found.turns.items()
    ]
    answers = {
        f"{found.workload.name}, {found.streams}": {
            "repetition3": found.repetition3,
            "tokens": [len(answer) for answer in found.answers],
        }
        for found in results
    }
    return {"tokens": tokens, "answers": answers, "rows": rows}


def open_model(name: str, streams: int, options: argparse.Namespace) -> tuple[str, LLM, list[Contender]]:
    """(name in results, an engine with its companions that runs so many answers at once, contenders)."""
    student = None if options.student == "off" else options.student
    draft = options.draft or DRAFTS.get(name)
    if draft in (name, "off"):
        draft = None
    stored = options.weights == "stored"
    llm = LLM(
        name if stored else shuffled(open_checkpoint(name)),
        backend="native",
        weights=options.weights,
        student=student,
        draft=draft,
        threads=options.threads,
        prefix_index="radix",
        kv_bytes=(1 << 28) + (streams - 1 << 26),
        max_running=streams,
    )
    title = name if stored else f"{name} in {options.weights}"
    student_label = draft_label = None
    if student:
        itself = llm.engine.models["student"] is llm.model
        student_label = f"student {student}" + (" (the same weights)" if itself else "")
        title += f", student {student}"
    if draft:
        draft_label = f"draft {draft}"
        title += f", {draft_label}"
    return title, llm, contenders(options.guesses, student_label, draft_label)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m"], help="(default smollm2-135m)")
    parser.add_argument("--draft", help="draft model for all other models, or off (default: Qwen's 0.5b for its 1.5b)")
    parser.add_argument("--student", default="int4", help="as twostroke's --student, or off (default int4)")
    parser.add_argument("--weights", default="stored", help="as twostroke's --weights (default stored)")
    parser.add_argument(
        "--guesses", type=numbers, default=[4], help="fixed numbers of guesses, as 2,8 (default 4; 0: none)"
    )
    names = [workload.name for workload in WORKLOADS]
    usual = [name for name in names if name != "sharegpt"]  # which needs a package
    parser.add_argument("--streams", type=numbers, default=[1], help="answers at once, as 1,4,16,32 (default 1)")
    parser.add_argument("--workloads", nargs="+", choices=names, default=usual, help="(default all but sharegpt)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds to take medians over (default 3)")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, half to 1.5 times as many (default 128)")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    options = parser.parse_args()
    workloads = [workload for workload in WORKLOADS if workload.name in options.workloads]
    for model in options.models:
        results, title = list[Found](), ""
        for streams in options.streams:
            title, llm, chosen = open_model(model, streams, options)
            for one in workloads:
                results.append(measure(llm, chosen, one, streams, options.rounds, options.tokens, say))
                say(save("speculation", DEFINITIONS, title, facts(results, options.tokens)))  # results so far
            llm.close()
        print(table(title, results), flush=True)


if __name__ == "__main__":
    main()
