"""ITL of running decoders, and TTFT, while long prompts arrive at the engine.

    python3 -m benchmarks.gpu.arrivals --models llama-3.1-8b --out arrivals.json

Streams decode; then long prompts arrive one after another, each when the one before has its first token. Policies of
chunking take turns on the same tokens: budgets of tokens a step, and an objective for ITL with --itl-ms.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.gpu.bench import Bench, markdown, parser
from benchmarks.gpu.models import MODELS
from benchmarks.gpu.opened import open_llm, random_prompts
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.timings import percentile
from twostroke.sampling.params import SamplingParams

LEAD_TOKENS = 16  # of every stream, before the first long prompt arrives
DEFINITIONS = {
    "calm": "gaps between tokens of the streams before the first long prompt arrives, without the first two",
    "busy": "gaps that end between the first arrival and the last first token",
    "ttft_s": "of each long prompt: first token - arrival",
    "tokens_per_second": "prompt tokens of the long prompts and tokens of streams / seconds, while busy",
    "outlasted": "all streams were still decoding at the last first token; else gaps are of a part",
}


@dataclass(frozen=True)
class Load:
    """`streams` prompts of `stream_prompt` tokens decode; `arrivals` prompts of `prompt` tokens arrive."""

    streams: int
    stream_prompt: int
    arrivals: int
    prompt: int
    output: int


@dataclass(frozen=True)
class Turn:
    """One policy's figures, in seconds; as in `DEFINITIONS`."""

    calm_p50: float | None
    busy_p50: float | None
    busy_p99: float | None
    busy_max: float
    ttft_s: list[float]
    tokens_per_second: float
    outlasted: bool
    gaps_s: list[float]


def take_turn(llm: LLM, config: SchedulerConfig, load: Load, seed: int) -> Turn:
    """Run the load once. The engine must be idle."""
    engine, vocab = llm.engine, llm.config.vocab_size
    engine.config = config

    def submit(prompt: list[int], tokens: int) -> Request:
        return engine.submit(llm.request(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True)))

    streams = [submit(one, load.output) for one in random_prompts(vocab, load.streams, load.stream_prompt, seed)]
    while any(len(stream.timings.tokens) < LEAD_TOKENS for stream in streams):
        engine.step()
    longs, began = list[Request](), time.perf_counter()
    for prompt in random_prompts(vocab, load.arrivals, load.prompt, seed + 1):
        longs.append(submit(prompt, 4))
        while not longs[-1].timings.tokens:
            engine.step()
    ended = longs[-1].timings.tokens[0]
    outlasted = not any(stream.done for stream in streams)
    engine.finish([*longs, *streams])
    times = [stream.timings.tokens for stream in streams]
    firsts = max(one[0] for one in times)
    calm = [b - a for one in times for a, b in pairwise(one) if firsts < a and b <= began]
    busy = [b - a for one in times for a, b in pairwise(one) if began < b <= ended]
    made = load.arrivals * load.prompt + len(busy)
    ttfts = [one.timings.ttft or 0.0 for one in longs]
    return Turn(
        percentile(calm, 50), percentile(busy, 50), percentile(busy, 99), max(busy, default=0.0), ttfts,
        made / (ended - began), outlasted, busy,
    )  # fmt: skip


def table(load: Load, found: Sequence[dict[str, Any]]) -> list[str]:
    def ms(value: float | None) -> float | None:
        return None if value is None else 1e3 * value

    rows = [
        (one["model"], one["policy"], ms(one["calm_p50"]), *(ms(one[f"busy_{key}"]) for key in ("p50", "p99", "max")),
         ms(sum(one["ttft_s"]) / len(one["ttft_s"])), one["tokens_per_second"], "" if one["outlasted"] else "no")
        for one in found
        if "failure" not in one
    ]  # fmt: skip
    head = ("model", "policy", "calm ITL p50 ms", "busy p50", "p99", "max", "TTFT ms", "tokens/s", "outlasted")
    title = f"{load.streams} streams after {load.stream_prompt:,} tokens; {load.arrivals} prompts of {load.prompt:,}"
    return [title, *markdown(head, rows)]


def main() -> None:
    made = parser("arrivals", __doc__ or "", ["llama-3.1-8b"])
    made.add_argument("--streams", type=int, default=32, help="decoding sequences (default 32)")
    made.add_argument("--stream-prompt", type=int, default=512, help="tokens of each (default 512)")
    made.add_argument("--output", type=int, default=512, help="tokens that each stream makes (default 512)")
    made.add_argument("--arrivals", type=int, help="long prompts (default 4; quick: 2)")
    made.add_argument("--prompt", type=int, default=8192, help="tokens of each long prompt (default 8192)")
    made.add_argument("--budgets", type=int, nargs="+", help="tokens a step (default 256 to 8192; quick: 512 2048)")
    made.add_argument("--itl-ms", type=float, nargs="*", default=[], help="objectives, as policies of their own")
    options = made.parse_args()
    budgets = options.budgets or ([512, 2048] if options.quick else [256, 512, 1024, 2048, 8192])
    arrivals = options.arrivals or (2 if options.quick else 4)
    load = Load(options.streams, options.stream_prompt, arrivals, options.prompt, options.output)
    bench = Bench("arrivals", options, DEFINITIONS)
    bench.facts["load"] = asdict(load)
    for name in options.models:
        if bench.over:
            break
        config = MODELS[name]
        entries = load.streams * (load.stream_prompt + load.output) + 2 * (load.prompt + 64) + 4096
        entry = config.num_layers * 4 * config.num_kv_heads * config.head_dim
        bench.say(f"{name}: loading")
        objective = options.itl_ms[0] if options.itl_ms else None
        opening = SchedulerConfig(max(budgets), itl_ms=objective)
        llm = open_llm(name, options.backend, options.device, entries * entry, opening, options.weights)
        policies = {f"budget {budget:,}": SchedulerConfig(budget) for budget in budgets}
        policies |= {f"objective {ms:g} ms": SchedulerConfig(load.prompt, itl_ms=ms) for ms in options.itl_ms}
        for policy, scheduler in policies.items():
            if bench.over:
                break
            bench.say(f"{name}: {policy}")
            small = Load(load.streams, load.stream_prompt, 1, min(load.prompt, 2 * scheduler.max_step_tokens), 64)
            with bench.guarded(model=name, policy=policy):
                take_turn(llm, scheduler, small, 7)  # compiles what this policy's steps need
                bench.add(model=name, policy=policy, **asdict(take_turn(llm, scheduler, load, 1)))
        llm.close()
    bench.show(*table(load, bench.cases))


if __name__ == "__main__":
    main()
