"""How both strokes grow with cores, and whether one engine, ranks, or a replica for each NUMA node is best.

    python -m benchmarks.cores --model qwen2.5-coder-1.5b

Each row is `twostroke bench latency` in processes of their own, on given processors: one core, two, four and so on to
all, node by node, as threads of one engine; then all cores as a rank for each node, and as an engine for each node.
The engines of the last row run at the same time, and their rates are added. The table is for machines that the
maintainers do not have: please send it back, with the JSON file. `--nodes` divides the cores of a machine with one
node, which shows that everything runs, not how fast.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.quiet import OTHERS_CPU, Others, doubt
from benchmarks.results_file import save
from benchmarks.terminal import command_line, head, row, say
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.system.limits import usable_cores

DEFINITIONS = {
    "prefill": "tokens per second of one prompt of 512 tokens, median; of several engines the sum",
    "decode": "tokens per second behind it, by the sequences at once, median; of several engines the sum",
    "gbps": "bytes of all matrices * decode of one sequence, in GB/s: near what memory gives if that binds",
    "processors": "those of each engine",
    **OTHERS_CPU,
}
BATCHES = (1, 8)
NODES = Path("/sys/devices/system/node")
CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Layout:
    """Engines that run at the same time, each on some processors, as one process or as `tp` ranks."""

    name: str
    engines: tuple[tuple[int, ...], ...]
    tp: int = 1


def numbers(text: str) -> list[int]:
    """Linux's lists of numbers: 0-3,8,10-11."""
    spans = (part.partition("-") for part in text.strip().split(",") if part)
    return [number for first, _, last in spans for number in range(int(first), int(last or first) + 1)]


def nodes(divided: int) -> list[list[int]]:
    """The processors of each NUMA node that this process may use, one for each core; `divided` makes nodes of one."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    siblings = {cpu: CPUS / f"cpu{cpu}/topology/thread_siblings_list" for cpu in allowed}
    cores = [cpu for cpu, file in siblings.items() if not file.exists() or numbers(file.read_text())[0] == cpu]
    cores = (cores or allowed)[: usable_cores()]
    if divided > 1:
        size = -(-len(cores) // divided)
        return [cores[i : i + size] for i in range(0, len(cores), size)]
    found = [numbers(file.read_text()) for file in sorted(NODES.glob("node[0-9]*/cpulist"))]
    own = [[cpu for cpu in cores if cpu in node] for node in found]
    return [node for node in own if node] or [cores]


def layouts(by_node: list[list[int]]) -> list[Layout]:
    """What is measured."""
    cores, count = tuple(cpu for node in by_node for cpu in node), 1
    made: list[Layout] = []
    while count < len(cores):
        made.append(Layout(f"{count} threads", (cores[:count],)))
        count *= 2
    made.append(Layout(f"{len(cores)} threads", (cores,)))
    if len(by_node) > 1:
        made.append(Layout(f"{len(by_node)} ranks", (cores,), len(by_node)))
        made.append(Layout(f"{len(by_node)} engines", tuple(map(tuple, by_node))))
    return made


def run(layout: Layout, model: str, rounds: int, *options: str) -> dict[str, Any]:
    """One row, with options of `bench latency`. Ends the program with the engine's words if one fails."""
    processes: list[subprocess.Popen[str]] = []
    for cpus in layout.engines:
        command = [sys.executable, "-m", "twostroke", "bench", "latency", "--model", model, "--json"]
        command += ["--batch", ",".join(map(str, BATCHES)), "--repeats", str(rounds)]
        command += ["--threads", str(max(1, len(cpus) // layout.tp)), "--tp", str(layout.tp), *options]
        pin = partial(os.sched_setaffinity, 0, cpus) if hasattr(os, "sched_setaffinity") else None
        processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=pin))
    outputs = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        sys.exit(f"{layout.name}: an engine has failed; see above")
    found = [json.loads(output)["results"] for output in outputs]
    decode = {str(batch): sum(one[i]["decode_tokens_per_second"] for one in found) for i, batch in enumerate(BATCHES)}
    prefill = sum(one[0]["prefill_tokens_per_second"] for one in found)
    return {"layout": layout.name, "processors": layout.engines, "prefill": prefill, "decode": decode}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--model", default="qwen2.5-coder-1.5b")
    parser.add_argument("--nodes", type=int, default=1, help="divide the cores into so many")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = sum(tensor.nbytes for tensor in open_checkpoint(options.model).matrices().values())
    rows: list[dict[str, Any]] = []
    print(head(["layout", "prefill, tokens/s", "of the first", "decode", "of the first", "GB/s", "decode of 8"]))
    for layout in layouts(nodes(options.nodes)):
        others = Others()
        found = run(layout, options.model, options.rounds)
        prefill, (one, eight) = found["prefill"], found["decode"].values()
        rows.append(found | {"gbps": one * size / 1e9, "others_cpu": others.cpu})
        ratios = prefill / rows[0]["prefill"], one / rows[0]["decode"]["1"]
        cells = f"{prefill:.0f}", f"{ratios[0]:.2f}", f"{one:.1f}", f"{ratios[1]:.2f}", f"{rows[-1]['gbps']:.1f}"
        print(row([layout.name, *cells, f"{eight:.1f}"]), flush=True)
    print("", *doubt([one["others_cpu"] for one in rows]), sep="\n")
    say(save("cores", DEFINITIONS, options.model, {"rows": rows}))


if __name__ == "__main__":
    main()
