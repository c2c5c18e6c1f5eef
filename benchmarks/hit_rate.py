"""The gain of prefix hits: TTFT at controlled hit rates, for both indexes, and with a shared system prompt.

    python -m benchmarks.hit_rate --model smollm2-135m

Every measurement starts cold: the index is cleared, and the run fails unless the pool is then empty. First the
beginning of a prompt is prefilled, which is not timed. Then the prompt is answered. Cases take turns, each round with
fresh tokens and in another order. In a round all cases get the same prompt, and the run fails unless every answer has
the same tokens and bitwise equal log-probabilities.

An index holds whole pages of 16 tokens, and the last token of a prompt is always computed, as its logits are needed.
So the highest rate is slightly below 100%.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.peer.figures import turn_order
from benchmarks.quiet import Others, doubt
from benchmarks.results_file import save
from twostroke.api.llm import LLM
from twostroke.engine.output import Token
from twostroke.errors import InvalidRequest
from twostroke.study.bench.latency import BatchShape, PromptSource

INDEXES = ("radix", "hash")
RATES = (0, 25, 50, 75, 100)

DEFINITIONS = {
    "wanted": "tokens prefilled before / tokens of the prompt",
    "hit_rate": "tokens that the index found / tokens looked up in it, by the engine's counters, for the timed prompt",
    "ttft_s": "of the timed prompt: first token - arrival",
    "computed": "tokens of the timed prompt that were not found",
    "cold": "before each measurement the index is cleared and the pool is checked to hold no page",
    "others_cpu": "processor time of everything else on the machine during the turn / wall time; 1 is a whole core",
}


class Differs(Exception):
    """An answer differs from the cold one, or a start was not cold: the figures are invalid."""


@dataclass(frozen=True)
class Case:
    """One prompt, whose first `known` tokens are prefilled before, followed by `other` tokens."""

    name: str
    prompt: int
    known: int
    other: int = 0


@dataclass(frozen=True)
class Turn:
    """One measurement, as in `DEFINITIONS`."""

    ttft_s: float
    hit_rate: float
    computed: int
    others_cpu: float


def cases(prompt: int, system: int, question: int) -> list[Case]:
    """The hit rates, and a question after a system prompt: cold, and after another question with the same prompt."""
    return [
        *(Case(f"{rate}%", prompt, prompt * rate // 100) for rate in RATES),
        Case("system prompt, cold", system + question, 0),
        Case("system prompt, warm", system + question, system, question),
    ]


def take_turn(llm: LLM, case: Case, prompts: PromptSource, number: int, output: int) -> tuple[Turn, list[Token]]:
    """Start cold, prefill the known tokens, answer the prompt. Raises Differs if the start is not cold."""
    index = llm.model.index
    assert index is not None
    index.clear()
    if index.num_pages or llm.pool.num_used:
        raise Differs(f"{index.num_pages} pages are indexed and {llm.pool.num_used} in use after a reset")
    (prompt,) = prompts.make(llm, BatchShape(case.prompt, output), number)
    if case.known:
        (other,) = prompts.make(llm, BatchShape(case.other, output), number) if case.other else [[]]
        llm.prefill(prompt[: case.known] + other)
    queried, hit, others = index.queried_tokens, index.hit_tokens, Others()
    (answer,) = llm.generate([prompt], max_tokens=output, ignore_eos=True)
    found, ttft = index.hit_tokens - hit, answer.timings.ttft
    assert ttft is not None
    return Turn(ttft, found / (index.queried_tokens - queried), case.prompt - found, others.cpu), answer.tokens


Found = dict[tuple[str, str], list[Turn]]  # by index and case


def measure(
    llms: dict[str, LLM], chosen: Sequence[Case], rounds: int, output: int, say: Callable[[str], None]
) -> Found:
    """Turns of every case on every index. Round 0 warms up. Raises Differs."""
    by_name = {case.name: case for case in chosen}
    keys = [(index, name) for name in by_name for index in llms]
    found: Found = {key: [] for key in keys}
    labels = {f"{index}, {name}": (index, name) for index, name in keys}
    for number in range(rounds + 1):
        answers: dict[int, tuple[str, list[Token]]] = {}
        for label in turn_order(list(labels), number):
            index, name = labels[label]
            say(f"round {number} of {rounds}, {label}")
            turn, tokens = take_turn(llms[index], by_name[name], PromptSource(), number, output)
            first, expected = answers.setdefault(by_name[name].prompt, (label, tokens))
            if tokens != expected:
                raise Differs(f"{label} and {first} answer the same prompt differently")
            found[index, name] += [turn] if number else []
    return found


def medians(turns: Sequence[Turn]) -> dict[str, float]:
    return {name: median(getattr(turn, name) for turn in turns) for name in ("ttft_s", "hit_rate", "computed")}


def table(model: str, chosen: Sequence[Case], found: Found) -> str:
    """A Markdown table. Times are also given relative to the cold times of the same prompt."""
    rounds = len(next(iter(found.values())))
    lines = [
        f"**{model}**: {chosen[0].prompt:,} tokens, and a system prompt of {chosen[-1].known:,}; medians of {rounds}",
        "",
        "| known before | index | hit rate | tokens computed | TTFT ms | of cold |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for case in chosen:
        cold = next(one.name for one in chosen if one.prompt == case.prompt)
        for index in dict.fromkeys(index for index, _ in found):
            one = medians(found[index, case.name])
            share = one["ttft_s"] / medians(found[index, cold])["ttft_s"]
            lines.append(
                f"| {case.name} | {index} | {one['hit_rate']:.1%} | {one['computed']:.0f} "
                f"| {1e3 * one['ttft_s']:.1f} | {share:.1%} |"
            )
    return "\n".join([*lines, "", *doubt([turn.others_cpu for turns in found.values() for turn in turns])])


def facts(chosen: Sequence[Case], found: Found, output: int) -> dict[str, Any]:
    """All results, for JSON."""
    rows = [
        {"index": index, **asdict(case), "wanted": case.known / case.prompt}
        | {"medians": medians(turns), "turns": [asdict(turn) for turn in turns]}
        for case in chosen
        for (index, name), turns in found.items()
        if name == case.name
    ]
    return {"output_tokens": output, "identical": "all answers of a round, to the last bit", "cases": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description="TTFT by prefix hit rate, radix and hash.")
    parser.add_argument("--model", action="append", help="may be repeated (default smollm2-135m)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take medians over (default 5)")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens (default 2048)")
    parser.add_argument("--system", type=int, default=2000, help="tokens of the system prompt (default 2000)")
    parser.add_argument("--question", type=int, default=50, help="tokens after it (default 50)")
    parser.add_argument("--output", type=int, default=16, help="tokens compared with the cold answer (default 16)")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    options = parser.parse_args()
    chosen = cases(options.prompt, options.system, options.question)
    longest = max(case.prompt for case in chosen) + options.output
    for model in options.model or ["smollm2-135m"]:
        llms = {one: LLM(model, backend="native", prefix_index=one, threads=options.threads) for one in INDEXES}
        if longest > (positions := llms[INDEXES[0]].config.max_position):
            raise InvalidRequest(f"the prompts need {longest} positions, and {model} has {positions}")
        found = measure(llms, chosen, options.rounds, options.output, lambda text: print(text, file=sys.stderr))
        print(table(model, chosen, found), flush=True)
        print(save("hit-rate", DEFINITIONS, model, facts(chosen, found, options.output)), file=sys.stderr)


if __name__ == "__main__":
    main()
