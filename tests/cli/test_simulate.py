"""`twostroke simulate`: figures, replays, and bad input in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from twostroke.study.simulate import simulation

SMALL = ("--requests", "30", "--input-tokens", "50-200", "--output-tokens", "5", "--seed", "3")


def simulate(*arguments: object) -> tuple[str, ...]:
    return ("simulate", *map(str, arguments))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three blocks of 512 tokens, the first two shared by all."""
    lines = [
        {"timestamp": 200 * i, "input_length": 1300, "output_length": 4, "hash_ids": [1, 2, 100 + i]} for i in range(6)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def test_json(run_json: Callable[..., dict[str, Any]]) -> None:
    objectives = ("--slo-ttft-ms", 10_000, "--slo-itl-ms", 10_000)
    facts = run_json(*simulate("llama-3-8b", "--on", "h100", "--rate", 50, *SMALL, *objectives))
    assert (facts["sent"], facts["completed"], facts["output_tokens"]) == (30, 30, 150)
    assert 30 * 50 <= facts["input_tokens"] <= 30 * 200
    assert facts["goodput"] == facts["requests_per_second"] == pytest.approx(30 / facts["duration_s"])
    assert facts["ttft_s"]["p50"] <= facts["ttft_s"]["p99"] <= facts["e2e_s"]["p99"]
    assert facts["engine"]["in_flight"]
    assert facts["requests_per_wall_second"] > 0
    decoded = sum(one["decode_tokens_per_second"] for one in facts["over_time"]) * facts["over_time"][1]["at_s"]
    assert decoded == pytest.approx(30 * 4)  # the first token of an answer comes with the prefill
    assert all(0 <= one["busy"] <= 1.0001 for one in facts["over_time"])


def test_the_same_seed_gives_the_same_figures(run_json: Callable[..., dict[str, Any]]) -> None:
    fleet = ("--prefill-workers", 1, "--decode-workers", 2, "--link-gbs", 5, "--worker-life-s", 1, "--fault-seed", 4)
    command = simulate("llama-3-8b", "--on", "h100", "--rate", 50, *SMALL, *fleet)
    found = [run_json(*command) for _ in range(2)]
    for one in found:
        del one["wall_s"], one["requests_per_wall_second"]
    assert found[0] == found[1]
    assert found[0]["completed"] == 30
    assert found[0]["moved_bytes"] > 0


def test_a_trace_shares_its_prefixes(trace: Path, run_json: Callable[..., dict[str, Any]]) -> None:
    facts = run_json(*simulate("llama-3-8b", "--on", "h100", "--trace", trace))
    assert facts["hit_rate"] == pytest.approx(5 * 1024 / (6 * 1300))
    assert facts["duration_s"] > 1.0


def test_tables(run: Callable[..., Result]) -> None:
    found = run(*simulate("llama-3-70b", "--on", "h100", "--tp", 4, "--concurrency", 4, *SMALL)).output
    for part in ("TTFT", "over time", "30 of 30 requests", "requests a second of wall time", "seed 3"):
        assert part in found


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama-9", "--on", "h100", "--rate", 1), "unknown model"),
        (("llama-3-8b", "--on", "z80", "--rate", 1), "unknown machine"),
        (("llama-3-70b", "--on", "h100", "--rate", 1), "leave no room for KV"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--page-size", 1_000_000), "make pages smaller"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--kv-bytes", 1), "or give more (--kv-bytes)"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--input-tokens", 90_000), "the longest request"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--router", "best"), "the router must be one of"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--prefill-workers", 1), "at least one worker each"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--prefix-index", "tree"), "the prefix index must be one of"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--weights", "int3"), "weights must be one of"),
        (("smollm2-135m", "--on", "here", "--rate", 1, "--kv-bits", 4), "16, 8 or 6 bits (K of 8 and V of 4), not 4"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--weights", ""), "weights must be one of"),
        (("llama-3-8b", "--on", "h100", "--rate", 1, "--kv-bytes", "9999TiB"), "67,108,864 at most"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[object, ...], message: str, run: Callable[..., Result]) -> None:
    result = run(*simulate(*arguments))
    assert message in result.stderr
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (1, "", 1)


def test_what_would_never_end_is_refused(run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that die before they have made a token."""
    monkeypatch.setattr(simulation, "MAX_DEATHS", 20)
    result = run(*simulate("llama-3-8b", "--on", "h100", "--rate", 1, "--worker-life-s", 0.001))
    assert "would never end: 20 workers died" in result.stderr
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)


def test_a_machine_must_be_named(run: Callable[..., Result]) -> None:
    result = run(*simulate("llama-3-8b", "--rate", 1))
    assert (result.exit_code, "Missing option '--on'" in result.stderr) == (2, True)


COUNTED = ("--requests", "--groups", "--workers", "--prefill-workers", "--decode-workers")


@pytest.mark.parametrize("option", [*COUNTED, "--page-size", "--max-step-tokens", "--max-running"])
def test_counts_that_nothing_could_hold(option: str, run: Callable[..., Result]) -> None:
    """Refused before anything is made of them."""
    for count in ("-1", "99999999999999999999") if option in COUNTED else ("-1", "0"):
        result = run(*simulate("llama-3-8b", "--on", "h100", "--rate", 1, option, count))
        told = " ".join(result.stderr.replace("│", " ").split())
        assert (result.exit_code, f"Invalid value for '{option}'" in told) == (2, True)
        assert any(words in told for words in ("or equal to 0", "or equal to 1", "at least 1")), told


@pytest.mark.parametrize("option", ["--host-us", "--link-latency-ms", "--worker-down-s"])
@pytest.mark.parametrize("seconds", ["-1", "nan", "inf"])
def test_times_are_numbers_of_at_least_0(option: str, seconds: str, run: Callable[..., Result]) -> None:
    result = run(*simulate("llama-3-8b", "--on", "h100", "--rate", 1, option, seconds))
    assert (result.exit_code, "must be a number of at least 0" in result.stderr) == (2, True)


def test_what_was_simulated_is_told(run: Callable[..., Result], trace: Path) -> None:
    """Model, formats, machine, lengths, and arrivals."""

    def told(*options: object) -> str:
        return " ".join(run(*simulate("llama-3-8b", "--on", "h100", *options)).output.split())

    found = told("--weights", "int4", "--kv-bits", 8, "--workers", 2, "--rate", 50, *SMALL)
    machine = "NVIDIA H100 SXM5 80 GB"
    assert f"llama-3-8b (int4 weights, int8 products, KV in 8 bits) on 2 workers of 1 x {machine}" in found
    assert "30 requests, 50 a second: 50-200 prompt and 5 answer tokens" in found
    assert "bandwidth" in found
    lengths = "trace.jsonl: 1,300 prompt and 4 answer tokens on average"
    assert f"6 requests, in 1.0 s, at the times of the trace: {lengths}" in told("--trace", trace)
    assert f"in 2.5 s, at the times of the trace, stretched to 2 a second: {lengths}" in told(
        "--trace", trace, "--rate", 2
    )
    assert f"6 requests, 2 at once: {lengths}" in told("--trace", trace, "--concurrency", 2)
    drawn = ("--workload", "sharegpt", "--requests", 3, "--rate", 9, "--seed", 1)
    assert "3 requests, 9 a second, in bursts (burstiness 0.5): lengths of sharegpt: " in told(
        *drawn, "--burstiness", 0.5
    )
    assert "more evenly than random (burstiness 4)" in told(*drawn, "--burstiness", 4)


TRACES = {
    "conversation_trace.jsonl": '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}',
    "AzureLLMInferenceTrace_conv.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,4",
    "AzureLLMInferenceTrace_code_1week.csv": "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:02+00:00,76,5",
    "BurstGPT_1.csv": "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,472,8,480,API log",
}


@pytest.mark.parametrize("name", TRACES)
def test_public_traces_by_one_command(name: str, tmp_path: Path, run: Callable[..., Result]) -> None:
    """As they are published; a line that is none is named by its number."""
    path = tmp_path / name
    path.write_text(f"{TRACES[name]}\n")
    command = simulate("llama-3-8b", "--on", "h100", "--trace", path)
    assert "1 of 1 requests" in run(*command).output
    path.write_text(f"{TRACES[name]}\n{TRACES[name].splitlines()[-1][:9]}\n")
    failed = run(*command)
    assert (failed.exit_code, len(failed.stderr.splitlines())) == (1, 1)
    assert f"{name}, line {2 if name.endswith('jsonl') else 3}: " in failed.stderr


def test_several_models(run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]) -> None:
    """Each has workers of its own and its share of the requests; figures are those of all and of each."""
    asked = simulate("llama-3-70b", "--on", "h100", "--tp", 4, "--rate", 50, *SMALL)
    also = ("--also", "llama-3-8b,share=0.4,workers=2,tp=1")
    facts = run_json(*asked, *also)
    large, small = facts["fleets"]
    assert (large["devices"], large["workers_in_all"], small["devices"], small["workers_in_all"]) == (4, 1, 1, 2)
    assert facts["completed"] == large["completed"] + small["completed"] == 30
    assert small["ttft_s"]["p50"] < facts["ttft_s"]["p50"] < large["ttft_s"]["p50"]
    found = run(*asked, *also).output
    assert "llama-3-8b (bf16 weights, bf16 products, KV in 16 bits) on 2 workers of 1 x NVIDIA H100" in found
    assert "over time, llama-3-70b alone" in found
    apart = ("--prefill-workers", 1, "--decode-workers", 1, "--link-gbs", 50)
    assert "workers of llama-3-70b: 1 that prefill, 1 that decode" in run(*asked, *apart, *also).output
    assert f"llama-3-70b: {large['completed']} requests, TTFT p99 " in found
    for wrong in ("llama-3-8b", "llama-3-8b,share=2", "llama-3-8b,share=0.2,color=red"):
        failed = run(*asked, "--also", wrong)
        assert (failed.exit_code, "write MODEL,share=0.3" in failed.stderr.replace("\n", " ")) == (2, True)


def test_thrashing_is_told(run: Callable[..., Result]) -> None:
    """A pool for a few sequences under many: choices are preempted, wait in the queue, and are computed again."""
    small = ("--kv-bytes", 80 << 20, "--input-tokens", 200, "--output-tokens", 60, "--requests", 30, "--seed", 3)
    result = run(*simulate("llama-3-8b", "--on", "h100", "--rate", 500, *small))
    assert "thrashing: " in result.output
    assert "thrashing" not in run(*simulate("llama-3-8b", "--on", "h100", "--rate", 5, *SMALL)).output


def test_a_technique(run_json: Callable[..., dict[str, Any]], run: Callable[..., Result]) -> None:
    facts = run_json(*simulate("llama-3-8b", "--on", "h100", "--rate", 50, *SMALL, "--method", "ptdo"))
    assert facts["completed"] == 30
    assert facts["engine"]["technique"].startswith("PTDO")
    failed = run(*simulate("llama-3-8b", "--on", "h100", "--rate", 50, *SMALL, "--method", "lookup"))
    assert (failed.exit_code, len(failed.stderr.strip().splitlines())) == (1, 1)
