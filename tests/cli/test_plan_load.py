"""`twostroke plan` with a rate, users or a trace."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from twostroke.study.plan.load_report import advice, bindings

PLAN = ("plan", "llama-3-70b", "--on", "h100", "--tp", "4")


def test_a_rate(run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]) -> None:
    facts = run_json(*PLAN, "--rate", "1.5", "--ttft-ms", "1000", "--itl-ms", "60")
    load = facts["load"]
    assert load["verdict"] == "nothing to do"
    assert facts["workload"]["concurrency"] >= load["served"]["sequences"], "what the rate needs"
    assert load["served"]["ttft_ms"]["p50"] <= load["served"]["ttft_ms"]["p99"] <= 1000
    printed = run(*PLAN, "--rate", "1.5", "--ttft-ms", "1000", "--itl-ms", "60").stdout
    assert "binds" in printed
    assert "do not disaggregate" in printed
    assert "a hit in host memory pays" in printed
    assert "cannot be served: at most" in run(*PLAN, "--rate", "1000").stdout


def test_a_trace_and_users(tmp_path: Path, run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]) -> None:
    line = {"input_length": 1000, "output_length": 30, "hash_ids": [1, 2]}
    lines = [line | {"timestamp": 900 * i} for i in range(20)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    load = run_json(*PLAN, "--trace", path)["load"]
    assert load["requests_per_second"] == pytest.approx(1 / 0.9)
    assert load["lengths"]["requests"] == 20
    assert load["lengths"]["shared_part"] == pytest.approx(19 * 999 / 20_000), "one token is computed"
    assert run_json(*PLAN, "--trace", path, "--rate", "3")["load"]["requests_per_second"] == pytest.approx(3)
    closed = run_json(*PLAN, "--trace", path, "--users", "5")["load"]
    assert closed["closed"]["users"] == closed["users"] == 5
    path.write_text("".join(f"{json.dumps(line | {'timestamp': 0})}\n" for line in lines))
    assert run_json(*PLAN, "--trace", path, "--rate", "3")["load"]["requests_per_second"] == 3, "all at once"
    path.write_text(f"{json.dumps(lines[0])}\n{json.dumps(lines[1] | {'input_length': 9000})}\n")
    assert "the longest request has 9030 tokens" in run(*PLAN, "--trace", path).stderr
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert "5 users" in run(*PLAN, "--trace", path, "--users", "5").stdout


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (("--rate", "-1"), "--rate must be above 0"),
        (("--rate", "nan"), "--rate must be above 0"),
        (("--rate", "1", "--users", "2"), "not both"),
        (("--users", "1000000"), "--users must be at most 10,000"),
        (("--workload", "sharegpt"), "needs --rate or --users"),
        (("--workload", "poems", "--rate", "1"), "synthetic or sharegpt"),
        (("--rate", "1", "--percentile", "100"), "percentile"),
        (("--rate", "1", "--ttft-ms", "0"), "cannot be met"),
        (("--trace", "/dev/null"), "no request"),
        (("--rate", "1", "--method", "overfill"), "leave out --method"),
        (("--trace", "/dev/null", "--prompt-tokens", "100"), "leave out --prompt-tokens"),
        (("--trace", "/no/such/trace"), "cannot be read"),
        (("--percentile", "50"), "has no load: leave out --percentile"),
        (("--rate", "1", "--workload", "sharegpt", "--output-tokens", "9"), "leave out --output-tokens"),
    ],
)
def test_bad_input_is_one_line(wrong: tuple[str, ...], why: str, run: Callable[..., Result]) -> None:
    failed = run(*PLAN, *wrong)
    assert failed.exit_code == 1
    assert why in failed.stderr
    assert len(failed.stderr.strip().splitlines()) == 1


def test_what_binds_and_commands_that_run(run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]) -> None:
    """Waiting and prefill are TTFT; what is advised is printed as commands, and each runs."""
    asked = ("plan", "llama-3-8b", "--on", "h100", "--rate", "40", "--output-tokens", "16", "--ttft-ms", "100")
    load = run_json(*asked)["load"]
    assert load["binds"]["TTFT"] == "queueing"
    parts = load["parts_ms"]
    assert parts["ttft_waiting"] + parts["ttft_prefill"] == pytest.approx(load["served"]["ttft_ms"]["wanted"])
    assert load["advice"]["steps"][0]["bound_by"] == "queueing"
    assert load["advice"]["verdict"] == "nothing to do"
    assert "queueing binds" in bindings(load)[0]
    assert "queueing binds" in advice(load)[0]
    assert set(load["commands"]) == {"to simulate it", "to simulate what is advised"}
    for command in load["commands"].values():
        words = shlex.split(command)[1:]
        words[words.index("--requests") + 1] = "5"
        assert run(*words).exit_code == 0


@pytest.mark.parametrize("asked", [("--rate", "1"), ("--users", "3")])
def test_what_has_no_room_serves_nobody(asked: tuple[str, ...], run_json: Callable[..., dict[str, Any]]) -> None:
    """Weights that exceed the memory leave no room for a sequence: memory binds, and only what makes room helps."""
    facts = run_json("plan", "llama-3-70b", "--on", "h100", "--max-tp", "1", *asked)
    load = facts["load"]
    assert facts["verdict"] == "does not fit"
    assert (load["verdict"], load["binds"], load["served"], load["closed"]) == (
        "cannot be served", {"rate": "memory"}, None, None,
    )  # fmt: skip
    assert load["most_requests_per_second"] == 0
    assert load["apart"]["why"] == "not even one sequence has room"
    assert [step["lever"] for step in load["advice"]["steps"]][:1] == ["weights in int4"]
    assert "to simulate it" not in load["commands"]
