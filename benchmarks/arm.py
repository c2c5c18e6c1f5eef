"""What an ARM machine does: both strokes by model, weights, kernels and threads, and llama.cpp's beside them.

    python -m benchmarks.arm

Each row is `twostroke bench latency` in a process of its own, with one thread and with all. llama.cpp, which is
compiled for this processor the first time, runs in turns with our engine, over the same random tokens. The table is for
machines that the maintainers do not have: please send it back, with the JSON file. What they expect is in
`benchmarks/predicted_arm.py`.
"""

from __future__ import annotations

from typing import Any

from benchmarks.cores import Layout, nodes, run
from benchmarks.peer.engines import OURS
from benchmarks.peer.environments import WORK
from benchmarks.peer.figures import medians
from benchmarks.peer.turns import Workload, compare
from benchmarks.quiet import OTHERS_CPU, Others, doubt
from benchmarks.results_file import save
from benchmarks.terminal import command_line, head, row, say
from twostroke.backends.native import library

DEFINITIONS = {
    "prefill": "tokens per second of one prompt of 512 tokens, median",
    "decode": "tokens per second behind it, median",
    "weights": "int8 and int4: encoded from the model's file; stored: in the bits of the file, as peers have them",
    **OTHERS_CPU,
}
ROW = ("model", "weights", "kernels", "threads", "prefill", "decode", "others_cpu")
WEIGHTS = ("int8", "int4")
LOAD = Workload("single", 512, 64)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", default="smollm2-135m,qwen2.5-coder-0.5b")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peers", default="llama.cpp", help="engines of `make bench-peers`; empty for none")
    options = parser.parse_args()
    cores = tuple(cpu for node in nodes(1) for cpu in node)
    rows: list[dict[str, Any]] = []
    print(head(["model", "weights", "kernels", "threads", "prefill, tokens/s", "decode, tokens/s"], 3))

    def show(
        model: str, weights: str, kernels: str, threads: int, prefill: float, decode: float | None, cpu: float
    ) -> None:
        rows.append(dict(zip(ROW, (model, weights, kernels, threads, prefill, decode, cpu), strict=True)))
        print(row([model, weights, kernels, threads, f"{prefill:.1f}", f"{decode or 0:.1f}"]), flush=True)

    for model in options.models.split(","):
        for threads in sorted({1, len(cores)}):
            layout = Layout(f"{threads} threads", (cores[:threads],))
            for weights, variant in ((weights, variant) for weights in WEIGHTS for variant in library.variants()):
                others, kernels = Others(), f"native-{variant}"
                one = run(layout, model, options.rounds, "--weights", weights, "--backend", kernels)
                show(model, weights, kernels, threads, one["prefill"], one["decode"]["1"], others.cpu)
            engines = [OURS, *options.peers.split(",")] if options.peers else []
            for one in compare(model, LOAD, engines, options.rounds, threads, WORK, say):
                if one.turns:  # else `say` has told why
                    rates, cpu = medians(one.rounds), max(turn.others_cpu for turn in one.turns)
                    show(model, "stored", f"{one.engine} {one.version}", threads, rates.prefill, rates.decode, cpu)
    print("", *doubt([one["others_cpu"] for one in rows]), sep="\n")
    say(save("arm", DEFINITIONS, options.models, {"rows": rows}))


if __name__ == "__main__":
    main()
