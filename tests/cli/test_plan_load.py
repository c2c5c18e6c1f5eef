"""`twostroke plan` with a rate, users or a trace."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.study.plan.conftest import trials_are_short

__all__ = ["trials_are_short"]  # a fixture of all tests here
PLAN = ("plan", "llama-3-70b", "--on", "h100", "--tp", "4", "--max-tp", "4")


def test_a_rate(run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]) -> None:
    asked = (*PLAN, "--output-tokens", "16", "--rate", "1.5", "--ttft-ms", "1000", "--itl-ms", "60")
    facts = run_json(*asked)
    load = facts["load"]
    assert facts["verdict"] == load["verdict"] == "nothing to do"
    spread = load["served"]["ttft_percentiles_ms"]
    assert spread["p50"] <= spread["p99"] == load["served"]["ttft_ms"] <= 1000
    printed = run(*asked).stdout
    assert printed.count("verdict: nothing to do") == 1
    assert "requests were simulated" in printed
    assert "a hit in host memory pays" in run(*asked, "--all").stdout
    lost = run(*PLAN, "--output-tokens", "16", "--rate", "1000").stdout
    assert "verdict: cannot be served: at most" in lost
    assert "nothing to do" not in lost


def test_a_trace_and_users(tmp_path: Path, run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]) -> None:
    line = {"input_length": 1000, "output_length": 8, "hash_ids": [1, 2]}
    lines = [line | {"timestamp": 900 * i} for i in range(20)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    load = run_json(*PLAN, "--trace", path)["load"]
    assert load["requests_per_second"] == pytest.approx(1 / 0.9)
    assert load["lengths"]["requests"] == 20
    assert load["lengths"]["shared_part"] == pytest.approx(19 * 999 / 20_000), "one token is computed"
    assert run_json(*PLAN, "--trace", path, "--rate", "3")["load"]["requests_per_second"] == pytest.approx(3)
    closed = run_json(*PLAN, "--trace", path, "--users", "5")["load"]
    assert closed["users"] == 5
    path.write_text("".join(f"{json.dumps(line | {'timestamp': 0})}\n" for line in lines))
    assert run_json(*PLAN, "--trace", path, "--rate", "3")["load"]["requests_per_second"] == 3, "all at once"
    path.write_text(f"{json.dumps(lines[0])}\n{json.dumps(lines[1] | {'input_length': 9000})}\n")
    assert "the longest request has 9008 tokens" in run(*PLAN, "--trace", path).stderr
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
        (("--rate", "1e8"), "at most 1,000,000 requests"),
        (("--rate", "1", "--burstiness", "1e-9"), "at least 0.01"),
        (("--rate", "1", "--concurrency", "3"), "leave out --concurrency"),
        (("--rate", "1", "--ttft-ms", "0"), "cannot be met"),
        (("--trace", "/dev/null"), "no request"),
        (("--rate", "1", "--method", "lookup"), "Leave out --method"),
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


def test_commands_that_run(run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]) -> None:
    """What is planned and what is advised are printed as commands, and each runs."""
    asked = ("plan", "llama-3-8b", "--on", "h100", "--rate", "40", "--output-tokens", "16", "--ttft-ms", "100")
    facts = run_json(*asked, "--max-tp", "2", "--prompt-tokens", "1024")
    assert facts["binds"]["TTFT"] == "queueing"
    commands = facts["load"]["commands"]
    assert set(commands) == {"to simulate it", "to simulate what is advised"}
    for command in commands.values():
        words = shlex.split(command)[1:]
        words[words.index("--requests") + 1] = "5"
        assert run(*words).exit_code == 0


def test_the_command_has_all_that_the_plan_has(
    run: Callable[..., Result], run_json: Callable[..., dict[str, Any]]
) -> None:
    """Technique, draft, share of guesses, efficiency and burstiness: what is simulated is what was planned."""
    asked = ("--draft", "mtp", "--acceptance", "0.9", "--efficiency", "0.5", "--kv-bits", "8")
    load = ("--rate", "2", "--burstiness", "0.5", "--output-tokens", "16", "--shared-prefix", "64")
    method = ("--method", "speculative-mtp")
    facts = run_json("plan", "qwen3.5-4b", "--on", "h100", *asked, *method, *load, "--max-tp", "1")
    words = shlex.split(facts["load"]["commands"]["to simulate it"])
    for option, value in zip((asked + method)[::2], (asked + method)[1::2], strict=True):
        assert words[words.index(option) + 1] == value
    assert words[words.index("--burstiness") + 1] == "0.5"
    assert words[words.index("--input-tokens") + 1] == str(512 - 64)
    words[words.index("--requests") + 1] = "3"
    assert "answers by speculation by its own head, 90% of guesses stand" in run(*words[1:]).output


@pytest.mark.parametrize("asked", [("--rate", "1"), ("--users", "3")])
def test_what_has_no_room_serves_nobody(asked: tuple[str, ...], run_json: Callable[..., dict[str, Any]]) -> None:
    """Weights that exceed the memory leave no room for a sequence: memory binds, and only what makes room helps."""
    few = ("--prompt-tokens", "512", "--output-tokens", "16")
    facts = run_json("plan", "llama-3-70b", "--on", "h100", "--max-tp", "1", *few, *asked)
    assert facts["verdict"] == facts["load"]["verdict"] == "does not fit"
    assert facts["binds"] == {"memory": "memory"}
    assert facts["load"]["most_requests_per_second"] == (0 if asked[0] == "--rate" else None)
    assert facts["ways_out"]["same_devices"]["weights"] in ("int4-w4a8", "int4-w4a16")
    assert "to simulate it" not in facts["load"]["commands"]
