"""`twostroke bench serve` against a real server: exact lengths, prefix hits, files, bad input, Ctrl-C."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.patience import PATIENCE_S
from tests.server.conftest import Serving, eventually, serving
from twostroke.api.llm import LLM

SMALL = ("--requests", 6, "--warmup", 2, "--input-tokens", "20-40", "--output-tokens", "5")


@pytest.fixture(scope="module")
def server(tiny_directory: Callable[[str], Path]) -> Iterator[Serving]:
    with serving(LLM(str(tiny_directory("llama")), kv_bytes=16 << 20, threads=1)) as running:
        yield running


def bench(*arguments: object) -> tuple[str, ...]:
    return ("bench", "serve", *map(str, arguments))


@pytest.mark.parametrize("load", [("--concurrency", 3), ("--rate", 200), ("--rate", 200, "--burstiness", 0.3)])
def test_json(load: tuple[object, ...], server: Serving, run_json: Callable[..., dict[str, Any]]) -> None:
    objectives = ("--slo-ttft-ms", 60_000, "--slo-itl-ms", 60_000)
    facts = run_json(*bench("--url", server.url, *load, *SMALL, *objectives))
    assert (facts["model"], facts["server"], facts["warmup"]) == ("tiny", "twostroke", 2)
    assert (facts["sent"], facts["completed"], facts["errors"], facts["short_answers"]) == (6, 6, {}, 0)
    assert facts["output_tokens"] == 30
    assert 6 * 20 <= facts["input_tokens"] <= 6 * 40
    assert facts["cached_tokens"] == 0, "every prompt is new"
    assert facts["goodput"] == facts["requests_per_second"] == pytest.approx(6 / facts["duration_s"])
    assert facts["ttft_s"]["p50"] >= facts["queue_s"]["p50"] >= 0
    assert facts["arrivals"]["loop"] == ("ClosedLoop" if load[0] == "--concurrency" else "OpenLoop")
    assert facts["definitions"]["tpot_s"] == "(last - first) / (n - 1), one figure an answer"
    assert facts["date"]


def test_every_token_is_timed(server: Serving, tmp_path: Path, run_json: Callable[..., dict[str, Any]]) -> None:
    """Also tokens whose text comes with a later one: a random model's bytes are seldom complete characters."""
    arguments = ("--concurrency", 2, *SMALL, "--output-tokens", 40, "--output", tmp_path / "run")
    facts = run_json(*bench("--url", f"{server.url}/v1/", *arguments))
    lines = [json.loads(line) for line in (tmp_path / "run" / "requests.jsonl").read_text().splitlines()]
    assert [len(line["tokens_s"]) for line in lines] == [40] * 6
    assert max(len(set(line["tokens_s"])) for line in lines) > 20, "not all at once"
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == facts
    plot = (tmp_path / "run" / "latency.svg").read_text()
    assert all(name in plot for name in ("</svg>", "TTFT", "ITL"))


def test_a_shared_prefix_is_hit(server: Serving, run_json: Callable[..., dict[str, Any]]) -> None:
    shared = ("--prefix-tokens", 64, "--groups", 2, "--concurrency", 1, "--seed", 5)
    facts = run_json(*bench("--url", server.url, *SMALL, *shared, "--requests", 10))
    assert facts["cached_tokens"] == 64 * (10 - 2), "all but the first of each group"
    again = run_json(*bench("--url", server.url, *SMALL, "--concurrency", 1, "--seed", 6))
    assert again["cached_tokens"] == 0


def test_a_trace_is_replayed(server: Serving, tmp_path: Path, run_json: Callable[..., dict[str, Any]]) -> None:
    lines = [{"timestamp": 10 * i, "input_length": 600, "output_length": 3, "hash_ids": [1, 2 + i]} for i in range(4)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    facts = run_json(*bench("--url", server.url, "--trace", trace, "--warmup", 1, "--seed", 7))
    assert (facts["completed"], facts["input_tokens"], facts["output_tokens"]) == (4, 2400, 12)
    assert facts["shared_tokens"] == 3 * 512
    assert facts["arrivals"] == {"loop": "Replay", "seconds": pytest.approx(0.03)}
    closed = run_json(*bench("--url", server.url, "--trace", trace, "--warmup", 0, "--seed", 8, "--concurrency", 1))
    assert closed["cached_tokens"] == 3 * 512


def test_prompts_that_were_seen_before_are_told(server: Serving, run: Callable[..., Result]) -> None:
    arguments = bench("--url", server.url, *SMALL, "--concurrency", 2, "--seed", 11)
    first, second = run(*arguments), run(*arguments)
    assert "not new" not in first.stdout
    assert "these prompts were not new to the server" in second.stdout
    for word in ("TTFT", "ITL", "TPOT", "E2E", "QUEUE", "requests/s", "seed 11", "after 2 requests to warm up"):
        assert word in first.stdout


def test_errors_are_counted_by_kind(
    tiny_directory: Callable[[str], Path],
    run_json: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=16 << 20, threads=1, max_running=1)
    with serving(llm, max_queued=1, timeout_s=60) as running:
        arguments = ("--concurrency", 6, *SMALL, "--warmup", 1, "--output-tokens", 200)
        facts = run_json(*bench("--url", running.url, *arguments))
        assert facts["completed"] >= 1
        assert facts["errors"] == {"status 429 queue_full": 6 - facts["completed"]}
        monkeypatch.setattr(llm.engine, "before_step", lambda _: time.sleep(0.05))  # ten seconds for an answer
        slow = run_json(*bench("--url", running.url, *arguments, "--warmup", 0, "--timeout", 2))
        assert slow["errors"]["timeout"] >= 1
        eventually(lambda: running.http().get("/health").json()["in_flight"] == 0)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--rate", "0"), 2, "above 0"),
        (("--rate", "nan"), 2, "above 0"),
        (("--rate", "1", "--concurrency", "1"), 2, "either --rate"),
        ((), 2, "either --rate"),
        (("--concurrency", "1", "--input-tokens", "9-3"), 2, "upwards"),
        (("--concurrency", "1", "--output-tokens", "0"), 2, "1 or more"),
        (("--concurrency", "1", "--workload", "sharegpt", "--input-tokens", "9"), 2, "sets the lengths"),
        (("--concurrency", "1", "--model", "gpt-9"), 1, "no model 'gpt-9'; it has tiny"),
        (("--concurrency", "1", "--input-tokens", "4000"), 1, "has room for 2048"),
        (("--concurrency", "1", "--token-ids", "9000-9100"), 1, "does not take a list of token ids"),
    ],
)
def test_bad_input(
    arguments: tuple[str, ...], code: int, message: str, server: Serving, run: Callable[..., Result]
) -> None:
    result = run(*bench("--url", server.url, *arguments))
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert message in result.stderr


def test_no_server(run: Callable[..., Result]) -> None:
    result = run(*bench("--url", "http://127.0.0.1:9", "--rate", 1))
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "no server answers at http://127.0.0.1:9" in result.stderr


def test_a_key_is_sent(tiny_directory: Callable[[str], Path], run: Callable[..., Result], monkeypatch: Any) -> None:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=16 << 20, threads=1)
    with serving(llm, api_key="secret") as running:
        arguments = bench("--url", running.url, "--concurrency", 1, *SMALL)
        result = run(*arguments)
        assert result.exit_code == 1
        assert "TWOSTROKE_API_KEY" in result.stderr
        monkeypatch.setenv("TWOSTROKE_API_KEY", "secret")
        assert run(*arguments).exit_code == 0


def test_files_are_not_replaced(tmp_path: Path, run: Callable[..., Result]) -> None:
    arguments = bench("--url", "http://127.0.0.1:9", "--rate", 1, "--output", tmp_path)
    (tmp_path / "summary.json").write_text("{}")
    assert "has a summary.json already" in run(*arguments).stderr


def test_ctrl_c_gives_the_report_so_far(server: Serving) -> None:
    """As a process: the results so far on the last line, and the exit status that shells expect."""
    arguments = ("--concurrency", 2, "--requests", 100_000, "--input-tokens", 8, "--output-tokens", 8, "--json")
    command = [sys.executable, "-m", "twostroke", *bench("--url", server.url, *arguments)]
    before = read_done(server)
    # A test run in the background inherits SIGINT as ignored.
    default: Any = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.default_int_handler)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, **default) as process:
        try:
            eventually(lambda: read_done(server) > before + 20)
            os.kill(process.pid, signal.SIGINT)
            out, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()  # else a failing test would wait for 100,000 requests
    assert process.returncode == 130, errors
    facts = json.loads(out.splitlines()[-1])
    assert facts["cut_short"]
    assert facts["completed"] > 10
    assert facts["errors"] == {}
    assert facts["interrupted"] <= 2


def read_done(server: Serving) -> float:
    with server.http() as http:
        lines = http.get("/metrics").text.splitlines()
    done = [line for line in lines if line.startswith('twostroke_finished_requests_total{outcome="done"}')]
    return float(done[0].split()[-1]) if done else 0.0
