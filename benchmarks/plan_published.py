"""Predictions of `twostroke plan` beside throughput that others published, of engines and on machines not ours.

python -m benchmarks.plan_published [--only mlperf-v5_1]

The fractions of the peaks that engines reach are each machine's own assumptions, and the range is the same for all
(`roofline.machines.SPREAD`): the least and the most of measured / predicted of `tensorrt-llm`. Rows that are
`held_out` had no part in any number of the plan. Prints a
table, and writes `benchmarks/results/plan-published.json`; `--only` keeps the rows of others there.
"""

import json
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from statistics import mean
from typing import Annotated, Any

import numpy as np
import typer

from benchmarks import terminal
from benchmarks.results_file import RESULTS
from twostroke.models.cost import SequenceRows
from twostroke.models.kv_formats import KV_FORMATS, KVFormat
from twostroke.study.plan.capacity import in_flight, pace
from twostroke.study.plan.loads import drawn_traffic
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.plan.service import LoadSimulator, fleet_of
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.weight_formats import weight_format
from twostroke.study.simulate.simulation import BegunRequest
from twostroke.study.simulate.trial import try_load
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.requests import PromptPiece, Replay, Traffic, TrafficRequest

BUDGET, MAX_RUNNING = 8192, 2048  # TensorRT-LLM's own defaults: max_num_tokens, max_batch_size
# 8 bits of KV as these engines have them: a scale for a tensor, not for an entry and head as this engine's int8.
KV_FORMATS["fp8"] = KVFormat("fp8", np.dtype(np.uint8), KV_FORMATS["bfloat16"].dtype)
HALVINGS = 5  # of the interval of rates
REQUESTS = 16  # that come in while as many decode as have room


def main(only: Annotated[str | None, typer.Option(help="One publication.")] = None) -> None:
    published = tomllib.loads((RESULTS / "published-throughput.toml").read_text())
    rows: list[dict[str, Any]] = []
    columns = ("measured", "predicted", "error", "range", "within")
    print(terminal.head(["source", "model", "machine", "tokens", *columns], 4))
    for row in (row for name, table in published.items() if only in (None, name) for row in rows_of(name, table)):
        rows.append(row)
        within = "yes" if row["low"] <= row["measured"] <= row["high"] else "no"
        machine = f"{row['devices']} x {row['machine']}, {row['scenario']}"
        cells = [row["from"], f"{row['model']} {row['weights']}", machine, row["tokens"], f"{row['measured']:,}"]
        bounds = f"{row['low']:,.0f} to {row['high']:,.0f}"
        cells += [f"{row['predicted']:,.0f}", f"{row['error']:+.0%}", bounds, within]
        print(terminal.row(cells), flush=True)
    for title in ("known", "held out"):
        if part := [row for row in rows if row["held_out"] == (title == "held out")]:
            inside = sum(row["low"] <= row["measured"] <= row["high"] for row in part)
            error = mean(abs(row["error"]) for row in part)
            print(f"\n{len(part)} cells, {title}: mean absolute error {error:.0%}; {inside} within the range")
    path = RESULTS / "plan-published.json"
    others = [row for row in json.loads(path.read_text())["rows"] if only is not None and row["from"] != only]
    path.write_text(json.dumps({"rows": others + rows}, indent=1) + "\n")


def rows_of(name: str, table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each cell of a publication."""
    for system in table["system"]:
        machine = find_machine(system["machine"])
        for tokens, measured in system["cells"].items():
            prompt, output = (int(part) for part in tokens.split("/"))
            model = replace(specifications()[system["model"]], stored=KV_FORMATS[system.get("kv", "fp8")])
            form = weight_format(system["weights"])
            plan = make_plan(model, machine, form, system["tp"], RequestProfile(prompt, output))
            plan = replace(plan, workers=system.get("workers", 1), budget=BUDGET)
            # No more run than have room at their full length: TensorRT-LLM evicts nothing by default.
            plan = replace(plan, max_running=max(1, min(MAX_RUNNING, plan.memory.users)))
            limits, batch = (system.get("ttft_ms"), system.get("tpot_ms")), system.get("batch")
            if batch is not None:
                predicted = of_batch(plan, batch)
            elif (users := system.get("users")) is not None:
                predicted = of_users(plan, users)
            else:
                predicted = throughput(plan) if limits == (None, None) else served(plan, *limits)
            low, high = (predicted * factor for factor in machine.spread)
            yield {
                "from": name,
                "model": system["model"],
                "weights": system["weights"],
                "machine": system["machine"],
                "devices": plan.devices,
                "scenario": system.get("scenario", "offline"),
                "held_out": system.get("held_out", False),
                "tokens": tokens,
                "measured": measured,
                "predicted": predicted,
                "error": predicted / measured - 1,
                "low": low,
                "high": high,
            }


def of_batch(plan: Plan, batch: int) -> float:
    """Output tokens a second of so many requests that begin together, with nothing before or behind them."""
    load = plan.workload
    first = plan.roofline.step({SequenceRows(load.prompt, 0, 1): batch})
    return batch * load.output / (first.seconds + (load.output - 1) * plan.decode(batch).seconds)


def of_users(plan: Plan, users: int) -> float:
    """Output tokens a second of so many users who ask again at once."""
    load = LoadSimulator(drawn_traffic(plan.workload, None, users, 1.0, False), Objectives())
    (trial,) = load.served(plan, 1).trials
    return trial.token_rate


def throughput(plan: Plan) -> float:
    """Output tokens a second of all workers, where requests never lack."""
    load = plan.workload
    under_way = in_flight(plan, pace(plan), 1e9)
    count = REQUESTS + under_way // 64
    asked = [TrafficRequest(0.0, (PromptPiece(i, load.prompt),), load.output) for i in range(count + under_way)]
    begun = [
        BegunRequest(one, 1 + (i * 7919) % (load.output - 1)) for i, one in enumerate(asked[count:])
    ]  # at places of their answers that are spread evenly
    waiting = Traffic(asked[:count], Replay((0.0,) * count))
    trial = try_load(fleet_of(plan), waiting, Objectives(), begun)
    return plan.workers * min(trial.token_rate, load.output * trial.first_token_rate)


def served(plan: Plan, ttft_ms: float, tpot_ms: float) -> float:
    """Output tokens a second of all workers at the highest rate of random arrivals that keeps MLPerf's limits: the 99th
    percentile of TTFT, and seconds per token of a mean answer (MLPerf takes the 99th percentile of such means)."""
    load = LoadSimulator(drawn_traffic(plan.workload, 1.0, None, 1.0, False), Objectives(ttft_ms / 1e3))
    low, high = 0.0, load.highest(plan)
    for _ in range(HALVINGS):
        rate = (low + high) / 2
        found = load.at(plan, rate)
        kept = found.tails and max(found.tails) <= ttft_ms / 1e3 and found.mean("gaps") <= tpot_ms / 1e3
        low, high = (rate, high) if kept else (low, rate)
    return low * plan.workload.output


if __name__ == "__main__":
    typer.run(main)
