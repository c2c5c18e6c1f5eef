"""The effect of a long prompt on running streams: ITL against TTFT and throughput, by prefill chunking policy.

    python -m benchmarks.itl --model smollm2-135m

Streams decode; then a long prompt arrives, and all run to their ends. Every policy gets the same tokens in a round,
and policies take turns, each round in another order. The trade-off is that of Sarathi-Serve (Agrawal et al. 2024,
figures 10 and 11): small chunks keep ITL short and delay the prompt, large chunks do the opposite. An ITL objective
chooses each step's chunk by the step's predicted cost (twostroke/models/cost.py). One engine serves all turns. It is
calibrated when it is opened, and its cost estimates carry over from turn to turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.peer.figures import turn_order
from benchmarks.quiet import OTHERS_CPU, Others, doubt
from benchmarks.results_file import save
from benchmarks.terminal import command_line, markdown, numbers, say
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.timings import percentile
from twostroke.errors import InvalidRequest
from twostroke.sampling.params import SamplingParams
from twostroke.study.bench.latency import BatchShape, PromptSource

BUDGETS = (64, 128, 256, 512, 1024, 2048)
LEAD_TOKENS = 8  # tokens of every stream when the prompt arrives
WARM_UP = 512  # tokens of the unmeasured prompt

DEFINITIONS = {
    "itl_*": "gaps between tokens of the streams that end after the prompt's arrival and by its first token",
    "itl_p99_s": "nearest rank; with few gaps (no chunking) it is the longest",
    "ttft_s": "of the long prompt: first token - arrival",
    "tokens_per_second": "prompt and output tokens of all requests / (last token - start of the first step)",
    "outlasted": "all streams were still decoding when the long prompt had its first token; else ITL is of a part",
    **OTHERS_CPU,
}


@dataclass(frozen=True)
class Policy:
    """How prefill is chunked: by a fixed budget of tokens a step, or by an objective."""

    name: str
    max_step_tokens: int
    itl_ms: float | None = None


@dataclass(frozen=True)
class Load:
    """`streams` short prompts, answered with `output_tokens` each, and one long prompt."""

    streams: int = 4
    stream_prompt: int = 64
    output_tokens: int = 512
    prompt: int = 4000
    answer: int = 32

    @property
    def tokens(self) -> int:
        return self.streams * (self.stream_prompt + self.output_tokens) + self.prompt + self.answer


@dataclass(frozen=True)
class Turn:
    """One measurement, as in `DEFINITIONS`; the ITL figures are computed from `gaps_s`."""

    itl_p50_s: float
    itl_p99_s: float
    itl_max_s: float
    ttft_s: float
    tokens_per_second: float
    outlasted: bool
    others_cpu: float
    gaps_s: list[float]


COLUMNS = (
    "prefill", "ITL p50 ms", "p99 ms", "max ms", "p99 / objective", "TTFT of the prompt s", "tokens/s", "of unchunked",
)  # fmt: skip
FIGURES = ("itl_p50_s", "itl_p99_s", "itl_max_s", "ttft_s", "tokens_per_second")


def policies(load: Load, budgets: Sequence[int], objectives: Sequence[float]) -> list[Policy]:
    """All policies, no chunking first. The budget of an ITL objective is too large to have an effect."""
    whole = load.prompt + load.streams
    return [
        Policy("no chunking", whole),
        *(Policy(f"budget {budget}", budget) for budget in budgets),
        *(Policy(f"objective {itl_ms:g} ms", whole, itl_ms) for itl_ms in objectives),
    ]


def take_turn(llm: LLM, policy: Policy, load: Load, prompts: PromptSource, number: int) -> Turn:
    """Run the load once. The engine must be idle."""
    engine, others = llm.engine, Others()
    engine.config = SchedulerConfig(policy.max_step_tokens, itl_ms=policy.itl_ms)
    short = prompts.make(llm, BatchShape(load.stream_prompt, load.output_tokens, load.streams), number)
    (long,) = prompts.make(llm, BatchShape(load.prompt, load.answer), number)

    def submit(prompt: list[int], tokens: int) -> Request:
        return engine.submit(llm.request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))

    streams = [submit(prompt, load.output_tokens) for prompt in short]
    while any(len(stream.timings.tokens) < LEAD_TOKENS for stream in streams):
        engine.step()
    prompt = submit(long, load.answer)
    engine.finish([prompt, *streams])
    arrival, first = prompt.timings.arrival, prompt.timings.tokens[0]
    times = [stream.timings.tokens for stream in streams]
    gaps = [b - a for one in times for a, b in pairwise(one) if arrival < b <= first]
    began, ended = min(s.timings.arrival for s in streams), max(one[-1] for one in [*times, prompt.timings.tokens])
    return Turn(
        itl_p50_s=percentile(gaps, 50) or 0.0,
        itl_p99_s=percentile(gaps, 99) or 0.0,
        itl_max_s=max(gaps),
        ttft_s=first - arrival,
        tokens_per_second=load.tokens / (ended - began),
        outlasted=all(one[-1] >= first for one in times),
        others_cpu=others.cpu,
        gaps_s=gaps,
    )


def measure(
    llm: LLM, chosen: Sequence[Policy], load: Load, rounds: int, say: Callable[[str], None]
) -> dict[str, list[Turn]]:
    """Turns by policy, after a short warm-up prompt."""
    if (needed := load.prompt + load.answer) > llm.config.max_position:
        raise InvalidRequest(f"the load needs {needed} positions, and {llm.name} has {llm.config.max_position}")
    prompts, by_name = PromptSource(), {policy.name: policy for policy in chosen}
    found: dict[str, list[Turn]] = {name: [] for name in by_name}
    llm.generate(prompts.make(llm, BatchShape(min(WARM_UP, load.prompt), 8), rounds), max_tokens=8)
    for number in range(rounds):
        for name in turn_order(list(by_name), number):
            say(f"{llm.name}: round {number + 1} of {rounds}, {name}")
            found[name].append(take_turn(llm, by_name[name], load, prompts, number))
    return found


def medians(turns: Sequence[Turn]) -> dict[str, float]:
    return {name: median(getattr(turn, name) for turn in turns) for name in FIGURES}


def table(model: str, load: Load, chosen: Sequence[Policy], found: dict[str, list[Turn]]) -> str:
    """A Markdown table. Throughput is also given as a share of that of the first policy, no chunking."""
    whole = medians(found[chosen[0].name])["tokens_per_second"]
    lines = [
        f"**{model}**: {load.streams} streams decode, a prompt of {load.prompt:,} tokens arrives; "
        f"medians of {len(found[chosen[0].name])}",
        "",
    ]
    rows: list[list[str]] = []
    for policy in chosen:
        one = medians(found[policy.name])
        p50, p99, longest = (f"{1e3 * one[name]:.1f}" for name in FIGURES[:3])
        kept = "" if policy.itl_ms is None else f"{1e3 * one['itl_p99_s'] / policy.itl_ms:.2f}"
        total = one["tokens_per_second"]
        speeds = [f"{one['ttft_s']:.2f}", f"{total:.0f}", f"{total / whole:.1%}"]
        rows.append([policy.name, p50, p99, longest, kept, *speeds])
    turns = [turn for policy in chosen for turn in found[policy.name]]
    lines += [markdown(COLUMNS, rows), "", *doubt([turn.others_cpu for turn in turns])]
    ended = [name for name, mine in found.items() if not all(turn.outlasted for turn in mine)]
    if ended:
        lines += [f"Streams ended before the prompt's first token: {', '.join(ended)}. Give them more --output.", ""]
    return "\n".join(lines)


def facts(load: Load, chosen: Sequence[Policy], found: dict[str, list[Turn]]) -> dict[str, Any]:
    """All results, for JSON."""
    rows = [
        asdict(policy)
        | {"medians": medians(found[policy.name]), "turns": [asdict(turn) for turn in found[policy.name]]}
        for policy in chosen
    ]
    return {"load": asdict(load), "policies": rows}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", action="append", help="may be repeated (default smollm2-135m)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take medians over (default 5)")
    parser.add_argument("--budgets", type=numbers, default=list(BUDGETS), help="tokens per step (64,128,...,2048)")
    parser.add_argument("--objectives", type=numbers, default=[50, 100], help="milliseconds (default 50,100)")
    parser.add_argument("--prompt", type=int, default=Load.prompt, help="tokens of the long prompt (default 4000)")
    parser.add_argument("--output", type=int, default=Load.output_tokens, help="tokens of each stream (default 512)")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    options = parser.parse_args()
    load = Load(prompt=options.prompt, output_tokens=options.output)
    chosen = policies(load, options.budgets, options.objectives)
    for model in options.model or ["smollm2-135m"]:
        objective = next((policy.itl_ms for policy in chosen if policy.itl_ms), None)
        llm = LLM(model, backend="native", prefix_index="off", threads=options.threads, itl_ms=objective)
        found = measure(llm, chosen, load, options.rounds, say)
        print(table(model, load, chosen, found), flush=True)
        say(save("itl", DEFINITIONS, model, facts(load, chosen, found)))


if __name__ == "__main__":
    main()
