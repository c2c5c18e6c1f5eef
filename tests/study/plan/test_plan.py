"""The three answers of a plan, its memory, and the command."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from twostroke.cli.app import app
from twostroke.errors import InvalidRequest, TwostrokeError
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.weight_formats import FORMATS


def llama(tp: int = 1, weights: str = "bf16", **load: Any) -> Plan:
    workload = RequestProfile(**({"prompt": 4096, "output": 256} | load))
    return make_plan(specifications()["llama-3-70b"], find_machine("h100"), FORMATS[weights], tp, workload)


def test_three_answers() -> None:
    assert llama().verdict == "does not fit"  # 141 GB in 80
    assert llama(4, ttft_ms=200).verdict == "misses the objective"
    assert llama(4, ttft_ms=2000, itl_ms=50).verdict == "nothing to do"


def test_memory_by_hand() -> None:
    memory = llama(4).memory
    assert memory.weights == 2 * specifications()["llama-3-70b"].parameters
    assert memory.kv_per_user == 327_680 * (4096 + 256)
    assert memory.users == (int(4 * 80e9 * 0.9) - memory.weights) // memory.kv_per_user


def test_kv_heads_are_copied_to_more_devices() -> None:
    model = specifications()["qwen2.5-7b"]  # 4 KV heads
    load = RequestProfile(100, 100)
    plans = [Plan(model, find_machine("h100"), FORMATS["bf16"], tp, load) for tp in (4, 28)]
    assert plans[1].memory.kv_per_user == 7 * plans[0].memory.kv_per_user


def test_snapshots_of_recurrent_layers() -> None:
    """A sequence has two; the room beside all sequences is for others. Devices share states and copy KV heads."""
    model, load = specifications()["qwen3.5-27b"], RequestProfile(4096, 256, concurrency=8)
    made = make_plan(model, find_machine("h100"), FORMATS["bf16"], 1, load)
    memory, entry = made.memory, 65_536
    assert memory.kv_per_user == 4352 * entry + model.state_bytes(4352)
    assert memory.users == memory.room // memory.kv_per_user
    left = memory.room - 8 * memory.kv_per_user
    assert memory.snapshots(8) == left // model.snapshot_bytes > 0
    assert memory.snapshots(memory.users + 1) == 0
    eight = Plan(model, find_machine("h100"), FORMATS["bf16"], 8, load)
    assert eight.memory.kv_per_user == 2 * 4352 * entry + model.state_bytes(4352)
    assert made.context % 64 == 32  # the mean of a chunk's rows are open


def test_a_chunk_of_everything_is_the_prefill() -> None:
    assert llama(4).chunked_ttft(4096) == llama(4).prefill.seconds
    assert llama(4).chunked_ttft(128) > llama(4).prefill.seconds  # weights are read again


def test_break_even_bandwidth() -> None:
    """Reading at that rate takes as long as the prefill, and what is shared already does not matter."""
    made = llama(4)
    assert made.break_even_bandwidth * made.prefill.seconds == pytest.approx(4096 * 327_680)
    assert llama(4, shared=100).break_even_bandwidth == made.break_even_bandwidth


def test_the_largest_chunk_keeps_the_objective() -> None:
    made = llama(4, concurrency=32, itl_ms=50)
    chunk = made.largest_chunk()
    assert chunk is not None
    assert 1e3 * made.mixed(chunk).seconds <= 50 < 1e3 * made.mixed(chunk + 16).seconds
    assert llama(4, concurrency=32, itl_ms=1).largest_chunk() is None
    assert llama(4, itl_ms=1).largest_chunk() == 4096  # nobody else decodes


@pytest.mark.parametrize(
    ("load", "text"),
    [
        ({"prompt": 0}, "at least 1 of prompt tokens"),
        ({"prompt": 9000}, "exceed the 8192 positions"),
        ({"ttft_ms": -1}, "cannot be met"),
        ({"shared": 4096}, "shared tokens must be"),
    ],
)
def test_bad_workloads(load: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        llama(**load)


def test_the_command() -> None:
    wanted = ["plan", "llama-3-70b", "--on", "h100", "--prompt-tokens", "4096", "--output-tokens", "256"]
    done = CliRunner().invoke(app, [*wanted, "--ttft-ms", "500", "--itl-ms", "50"])
    assert done.exit_code == 0, done.output
    assert "verdict: does not fit" in done.output
    assert "with more devices: tensor parallelism of 4\n" in done.output
    assert len(done.output.splitlines()) <= 24
    assert len(CliRunner().invoke(app, [*wanted, "--all"]).output.splitlines()) > 40


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["llama-3-70b", "--on", "h10"], "unknown machine 'h10': did you mean h100"),
        (["llama-3-70b", "--on", "slow.toml"], "machine slow has no bandwidth_tbs"),
        (["llama-3-70b", "--on", "absent.toml"], "there is no file absent.toml"),
        (["llama-3-70b", "--on", "untyped.toml"], "machine untyped needs tflops, a table of numbers by dtype"),
        (["bert", "--on", "h100"], "a plan needs a decoder of a family that the engine knows"),
        (["llama-3-70b", "--on", "h100", "--ttft-ms", "inf"], "an objective of inf ms for TTFT cannot be met"),
        (["llama-3-70b", "--on", "h100", "--weights", ""], "weights must be one of"),
        (["llama-3-70b", "--on", "h100", "--measure"], "leave out the model"),
        (["llama-3-70b", "--on", "h100", "--quick"], "--quick belongs to --verify: leave it out"),
        (["llama-3-70b", "--on", "h100", "--threads", "2"], "--threads belongs to --verify or --measure"),
        (["llama-3-70b", "--on", "h100", "--threads", "0"], "--threads belongs to --verify or --measure"),
        (["llama-3-70b", "--on", "h100", "--seconds", "0"], "--seconds belongs to --verify: leave it out"),
        (["llama-3-70b", "--on", "h100", "--ttft-ms", "0"], "an objective of 0 ms for TTFT cannot be met"),
        (["llama-3-70b", "--on", "h100", "--method", "magic"], "there is no plan for the method 'magic'"),
        (["llama-3-70b", "--on", "h100", "--acceptance", "1"], "from 0 to below 1, not 1"),
        (["llama-3-70b", "--on", "h100", "--tp", "3"], "cannot be divided among 3 devices"),
        (["llama-3-70b", "--on", "h100", "--concurrency", "0"], "at least 1 of concurrency, not 0"),
        (["llama-3-70b", "--on", "h100", "--method", "pdto"], "did you mean ptdo"),
        (["llama-3-70b", "--on", "h100", "--method", "compress"], "needs a draft: say --draft MODEL"),
        (["llama-3-70b", "--on", "h100", "--draft", "mtp"], "llama-3-70b has no head of multi-token prediction"),
        (["qwen3.5-9b", "--on", "h100", "--method", "speculative-mtp"], "needs a draft: say --draft mtp"),
        (["llama-3-70b", "--on", "h100", "--draft", "qwen2.5-0.5b"], "a draft needs the model's tokenizer"),
        (["llama-3-70b", "--on", "unlinked.toml", "--tp", "2"], "machine unlinked needs a positive link_gbs, not 0"),
        (["llama-3-70b", "--on", "silent.toml", "--tp", "2"], "machine silent has no link_us: tensor parallelism"),
        (["llama-3-70b", "--on", "graviton-4", "--tp", "2"], "machine graviton-4 has no link_gbs: tensor parallelism"),
        (["llama-3-70b", "--on", "h100", "--kv-bits", "4"], "16, 8 or 6 bits (K of 8 and V of 4), not 4"),
        (["llama-3-70b", "--on", "h100", "--weights", "int3"], "weights must be one of bf16, fp8-w8a8"),
        (["llama-3-70b", "--on", "early.toml"], "machine early needs link_us of 0 or more, not -5"),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "memory_gb = 80\ntflops = { bf16 = 1 }\ncompute = 1\nmemory = 1\n"
    Path("slow.toml").write_text(sizes)
    Path("early.toml").write_text(f"{sizes}bandwidth_tbs = 1\nlink_us = -5\n")
    Path("untyped.toml").write_text("memory_gb = 80\ntflops = { bf16 = true }\n")
    Path("unlinked.toml").write_text(f"{sizes}bandwidth_tbs = 1\nlink_gbs = 0\n")
    Path("silent.toml").write_text(f"{sizes}bandwidth_tbs = 1\nlink_gbs = 1\n")
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"model_type": "bert", "architectures": ["BertModel"]}')
    refused = CliRunner().invoke(app, ["plan", *arguments])
    assert refused.exit_code == 1
    assert isinstance(refused.exception, SystemExit | TwostrokeError)
    assert message in (refused.output + str(refused.exception)).replace("\n", " ")


def test_the_command_in_json(run_plan: Callable[..., dict[str, Any]]) -> None:
    facts = run_plan("llama-3-8b", "--on", "l4", "--concurrency", 4, "--weights", "int4-g128")
    assert facts["verdict"] == "nothing to do"
    assert facts["memory"]["kv_bytes_per_token"] == 131_072


@pytest.fixture
def run_plan() -> Callable[..., dict[str, Any]]:
    def invoke(*arguments: object) -> dict[str, Any]:
        import json

        done = CliRunner().invoke(app, ["plan", *map(str, arguments), "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    return invoke


def test_one_worker_is_told_where_many_were_asked_for() -> None:
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", "--on", "h100", "--workers", "9"])
    assert "with the fewest devices: one worker\n" in done.output
