"""The comparison of servers in `benchmarks/serving.py`: medians, ratios, and the table."""

from typing import Any

from benchmarks.peer.engines import OURS
from benchmarks.serving import Turns, table


def report(ttft: float | None, rate: float, others_cpu: float = 0.0) -> dict[str, Any]:
    spread = {"p50": ttft, "p99": ttft}
    return {
        "ttft_s": spread,
        "itl_s": spread,
        "output_tokens_per_second": rate,
        "goodput": None,
        "others_cpu": others_cpu,
    }


def test_medians_and_ratios() -> None:
    ours = Turns(OURS, "x", [report(0.1, 10), report(0.3, 40), report(0.2, 30)])
    lines = table("x", ["--rate", "1"], [ours, Turns("vllm", "x", [report(0.4, 15)])]).splitlines()
    assert lines[0] == "**x**: `--rate 1`"
    assert f"| {OURS} | 200 | 200 | 200 | 200 | 30 |  |" in lines
    assert "| vllm | 400 | 400 | 400 | 400 | 15 |  |" in lines
    assert f"| {OURS} / vllm | 0.50 | 0.50 | 0.50 | 0.50 | 2.00 |  |" in lines
    assert "quiet" not in lines[-1]


def test_what_is_missing_or_disturbed_is_told() -> None:
    failed = Turns("vllm", "x", failure="it ended: no wheel")
    found = table("x", [], [Turns(OURS, "x", [report(None, 10, others_cpu=0.5)]), failed])
    assert f"| {OURS} |  |  |  |  | 10 |  |" in found
    assert "vllm: it ended: no wheel" in found
    assert "Not quiet: in 1 of 1 turns other processes took up to 50% of a core." in found
    assert f"{OURS} / vllm" not in found
