"""How the cost of simulations grows: `python -m benchmarks.simulation_scale`.

Fleets of 1 to 1,000 workers serve 1,000 to 1,000,000 requests, each size in a process of its own. Printed are seconds
and requests a second of wall time, steps, and the process's peak memory. The rate grows with the fleet, so that each
worker has as much to do. Sizes are kept as they come. The last size takes about as long as ten of the others and about
ten gigabytes: `--least-requests 1000000 --most-requests 1000000` measures it alone.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import typer

from benchmarks.results_file import earlier, save
from twostroke.study.simulate.figures import SimulationFigures
from twostroke.study.simulate.fleet import Fleet
from twostroke.study.simulate.machine_setup import machine_setup
from twostroke.study.simulate.simulation import Simulation
from twostroke.study.traffic.arrivals import OpenLoop
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.workload_sampler import WorkloadSampler
from twostroke.system.machine import peak_rss_bytes

MODEL, MACHINE, RATE = "llama-3-8b", "h100", 10.0  # requests per second of each worker
PROMPT, PREFIX, ANSWER, GROUPS = TokenRange(64, 512), 256, TokenRange(16, 64), 50
SIZES = (
    (1, 1_000), (10, 1_000), (100, 1_000), (1, 10_000), (100, 10_000), (1_000, 10_000), (1_000, 100_000),
    (1_000, 1_000_000),
)  # fmt: skip  # workers and requests
STEM = "simulation-scale"
DEFINITIONS = {
    "wall_s": "seconds of one simulation, without making its requests",
    "requests_per_wall_second": "requests / wall_s",
    "peak_rss_bytes": "largest resident memory of the process, with all requests and figures",
}


def simulate(workers: int, requests: int, router: str) -> dict[str, Any]:
    """One simulation in this process."""
    workload = WorkloadSampler(requests, PROMPT, ANSWER, PREFIX, GROUPS, seed=1)
    traffic = workload.traffic(OpenLoop(RATE * workers))
    figures, began = SimulationFigures(Objectives()), time.perf_counter()
    fleet = Fleet(machine_setup(MODEL, MACHINE), workers, router=router)
    service = Simulation(fleet, traffic, figures.watch, figures.ended, keep=False)
    service.run()
    wall_s = time.perf_counter() - began
    found = figures.summary(service)
    return {
        "router": router,
        "workers": workers,
        "requests": requests,
        "wall_s": wall_s,
        "requests_per_wall_second": requests / wall_s,
        "steps": found["steps"],
        "hit_rate": found["hit_rate"],
        "ttft_p99_s": found["ttft_s"]["p99"],
        "peak_rss_bytes": peak_rss_bytes(),
    }


def alone(workers: int, requests: int, router: str) -> dict[str, Any]:
    """The same in a process of its own."""
    code = "import json; from benchmarks.simulation_scale import simulate"
    code += f"; print(json.dumps(simulate{workers, requests, router}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {workers} workers, {requests} requests: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--least-requests", type=int, default=0, help="sizes below it are left out")
    parser.add_argument("--most-requests", type=int, default=100_000, help="sizes beyond it are left out")
    parser.add_argument("--router", default="kv-aware")
    options = parser.parse_args()
    typer.echo(f"{'workers':>8}{'requests':>11}{'wall s':>9}{'requests/s':>12}{'steps':>12}{'peak MiB':>10}")
    for workers, requests in SIZES:
        if options.least_requests <= requests <= options.most_requests:
            one = alone(workers, requests, options.router)
            rss = one["peak_rss_bytes"] / (1 << 20)
            typer.echo(
                f"{workers:>8,}{requests:>11,}{one['wall_s']:>9.1f}{one['requests_per_wall_second']:>12,.0f}"
                f"{one['steps']:>12,}{rss:>10,.0f}"
            )
            typer.echo(f"kept in {keep(one)}", err=True)


def keep(row: dict[str, Any]) -> Path:
    """Keep a size beside those that were measured before on the same day."""
    known = {_key(one): one for one in (*earlier(STEM, MODEL).get("sizes", ()), row)}
    return save(STEM, DEFINITIONS, MODEL, {"machine": MACHINE, "sizes": [known[key] for key in sorted(known)]})


def _key(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["router"], row["requests"], row["workers"]


if __name__ == "__main__":
    main()
