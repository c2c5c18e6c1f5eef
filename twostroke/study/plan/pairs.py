"""Which weights prefill, which decode, and bits of KV, for a memory budget: by what was measured, and by nothing else.

KL to the best pair is measured (`strokes.toml`, docs/results/strokes.md) for three models of 0.1 to 1.5 B. Of other
models the mean of those with all rows orders the pairs, and the account says so. Two sets of weights take both their
bytes; weights of prefill alone may be streamed (`--stream-weights`), and then the head and a layer stay. This engine
keeps weights of 3 and 2 bits in 4, so that is what they are counted with.
"""

import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any

from twostroke.study.plan.plan import Plan
from twostroke.study.plan.report_blocks import Block, Cell, Grid, Line, Section, gigabytes
from twostroke.study.roofline.model_spec import KV_BITS
from twostroke.study.roofline.weight_formats import FORMATS

SOURCE = "docs/results/strokes.md"
FEW = FORMATS["int4-w4a8"]  # what weights of 3 and 2 bits are kept in
BEST = "stored"
Rows = dict[str, tuple[float, float, float]]  # KL by model: mean, low, high


@cache
def measured() -> Mapping[str, Any]:
    """For each model: `texts`, and `kl` by dtype of KV and by pair."""
    return tomllib.loads(files("twostroke.study.roofline").joinpath("data/strokes.toml").read_text())


def divergences(model: str, kv: str, pair: str) -> Rows:
    """KL of a pair, of the model itself if it was measured, or else of each model that was. By model."""
    every = measured()
    own = every.get(model, {"kl": {}})["kl"].get(kv, {})
    if pair in own:
        return {model: own[pair]}
    return {name: rows["kl"][kv][pair] for name, rows in every.items() if len(rows["kl"]) == len(KV_BITS)}


def pair_advice(plan: Plan, budget: int) -> dict[str, Any]:
    """The pair with the least KL in `budget` bytes, and all that lose less than any that takes no more, best first.

    `advised` is None where none fits. `measured` is false where KL is of other models.
    """
    kept: list[dict[str, Any]] = []
    for one in sorted(_pairs(plan), key=lambda one: (one["kl_mean"], one["bytes"])):
        kept += [] if kept and kept[-1]["bytes"] <= one["bytes"] else [one]
    advised = next((one for one in kept if one["bytes"] <= budget), None)
    return {"budget_bytes": budget, "advised": advised, "pairs": kept, "source": SOURCE}


def _pairs(plan: Plan) -> Iterator[dict[str, Any]]:
    model, load = plan.model, plan.workload
    outer = max((matrix.parameters for _, matrix in model.matrices), default=0)
    layer = plan.weights.total(model) // model.num_layers
    streamed = round(model.head.parameters * plan.weights.head + max(layer, outer * plan.weights.layer))
    sizes = {BEST: plan.weights.total(model)} | dict.fromkeys(("int3", "int2"), FEW.total(model))
    for (bits, kv), (first, second) in product(KV_BITS.items(), product(sizes, repeat=2)):
        found = divergences(model.name, kv, f"{first} {second}")
        held = load.concurrency * model.with_kv_bits(bits).kv_bytes(load.prompt + load.output)
        facts = {
            "prefill": first, "decode": second, "kv_bits": bits, "kl": found, "measured": list(found) == [model.name],
            "kl_mean": sum(mean for mean, _, _ in found.values()) / len(found),
        }  # fmt: skip
        both = sizes[second] + (0 if first == second else sizes[first])
        yield facts | {"streamed": False, "bytes": both + held}
        if first != second:
            yield facts | {"streamed": True, "bytes": sizes[second] + streamed + held}


def pair_report(pair: dict[str, Any]) -> Iterator[Block]:
    """The weights of both strokes and bits of KV that lose least in a budget, and all that were compared."""
    yield Section(f"Weights of the strokes in {gigabytes(pair['budget_bytes'])}")
    best = pair["advised"]
    if best is None:
        yield Line(
            f"none of the pairs that were measured fits: the least takes {gigabytes(pair['pairs'][-1]['bytes'])}",
            "warn",
        )
        return
    yield Line(f"{_named(best)}: {gigabytes(best['bytes'])}, KL to the best pair {_kl(best)}", "strong")
    if not best["measured"]:
        names = ", ".join(best["kl"])
        yield Line(f"not measured for this model: KL is that of {names}; its own may order pairs otherwise", "warn")
    yield Line(
        "KL in nats a token, on continued text: not answers to questions. Stored were files of 4 to 8 bits; 3 and 2 "
        "bits are kept in 4 here",
        "faint",
    )
    rows = [[Cell(_named(one)), Cell(gigabytes(one["bytes"])), Cell(_kl(one))] for one in pair["pairs"]]
    yield Grid(("pair", "bytes", "KL"), rows, left=("pair",))
    yield Line(f"measured: {pair['source']}", "source")


def _named(pair: dict[str, Any]) -> str:
    first, second = (
        name.replace("int", "") + " bits" if name != "stored" else name for name in (pair["prefill"], pair["decode"])
    )
    read = " (--stream-weights)" if pair["streamed"] else ""
    return f"prefill {first}{read}, decode {second}, KV of {pair['kv_bits']} bits"


def _kl(pair: dict[str, Any]) -> str:
    """Its interval for a model that was measured, or the means of others."""
    if pair["measured"]:
        ((mean, low, high),) = pair["kl"].values()
        return f"{mean:.3f} [{low:.3f}, {high:.3f}]"
    means = [mean for mean, _, _ in pair["kl"].values()]
    return f"{min(means):.3f} to {max(means):.3f}"
