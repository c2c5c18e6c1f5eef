"""The share of a decode step outside of kernels: planning, the batch, sampling, delivery.

    python -m benchmarks.overhead --model smollm2-135m

The step is timed as a whole, and every call of the native library in it. The rest is Python and the code it calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from benchmarks.peer.figures import turn_order
from benchmarks.quiet import OTHERS_CPU, Others, doubt
from benchmarks.results_file import save
from benchmarks.terminal import command_line, markdown, say
from twostroke.api.llm import LLM
from twostroke.backends.native.model import NativeModel
from twostroke.sampling.params import SamplingParams
from twostroke.study.bench.latency import BatchShape, PromptSource

BATCHES = (1, 8)

DEFINITIONS = {
    "step_ms": "median over the turn's steps in which every sequence decodes one token",
    "kernels_ms": "median of the time in calls of the native library in such a step",
    "outside": "1 - kernels_ms / step_ms",
    **OTHERS_CPU,
}


class Timed:
    """A library whose calls are timed."""

    def __init__(self, library: Any) -> None:
        self._library, self.seconds = library, 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        function = getattr(self._library, name)

        def call(*arguments: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - began

        setattr(self, name, call)
        return call


def time_kernels(llm: LLM) -> Timed:
    """Time all calls of the native library that this engine's backend makes from now on."""
    compiled = llm.model.compiled
    assert isinstance(compiled, NativeModel)
    timed: Any = Timed(compiled.library)
    compiled.library = compiled.statistics.library = timed
    return timed


@dataclass(frozen=True)
class Turn:
    """One measurement, as in `DEFINITIONS`."""

    step_ms: float
    kernels_ms: float
    others_cpu: float

    @property
    def outside(self) -> float:
        return 1 - self.kernels_ms / self.step_ms


def take_turn(llm: LLM, timed: Timed, batch: int, prompt: int, output: int, number: int) -> Turn:
    """Answer `batch` prompts, and time the steps after the last prefill."""
    params = SamplingParams(max_tokens=output, ignore_eos=True)
    prompts = PromptSource().make(llm, BatchShape(prompt, output, batch), number)
    requests = [llm.engine.submit(llm.request(one, params)) for one in prompts]
    while any(request.timings.ttft is None for request in requests):
        llm.engine.step()
    steps, kernels, others = list[float](), list[float](), Others()
    while not any(request.timings.finished for request in requests):
        timed.seconds, began = 0.0, time.perf_counter()
        llm.engine.step()
        steps.append(time.perf_counter() - began)
        kernels.append(timed.seconds)
    turn = Turn(1e3 * median(steps), 1e3 * median(kernels), others.cpu)
    llm.engine.finish(requests)
    return turn


def table(model: str, prompt: int, found: dict[int, list[Turn]]) -> str:
    """A Markdown table."""
    title = f"**{model}**: decode after {prompt} tokens; medians of {len(found[BATCHES[0]])} turns"
    rows: list[list[str]] = []
    for batch, turns in found.items():
        step, kernels = (median(getattr(turn, name) for turn in turns) for name in ("step_ms", "kernels_ms"))
        rows.append([str(batch), f"{step:.2f}", f"{kernels:.2f}", f"{median(turn.outside for turn in turns):.1%}"])
    columns = ("sequences", "step ms", "in kernels ms", "outside")
    cpus = [turn.others_cpu for turns in found.values() for turn in turns]
    return "\n".join([title, "", markdown(columns, rows, words=0), "", *doubt(cpus)])


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", action="append", help="may be repeated (default smollm2-135m)")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to take medians over (default 5)")
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default 512)")
    parser.add_argument("--output", type=int, default=64, help="tokens (default 64)")
    options = parser.parse_args()
    for model in options.model or ["smollm2-135m"]:
        llm = LLM(model, backend="native", prefix_index="off")
        timed = time_kernels(llm)
        found: dict[int, list[Turn]] = {batch: [] for batch in BATCHES}
        for number in range(options.rounds + 1):  # round 0 warms up
            for label in turn_order([str(batch) for batch in BATCHES], number):
                turn = take_turn(llm, timed, int(label), options.prompt, options.output, number)
                found[int(label)] += [turn] if number else []
        print(table(model, options.prompt, found), flush=True)
        rows = [{"sequences": batch, "turns": [asdict(turn) for turn in turns]} for batch, turns in found.items()]
        say(save("overhead", DEFINITIONS, model, {"prompt": options.prompt, "cases": rows}))


if __name__ == "__main__":
    main()
