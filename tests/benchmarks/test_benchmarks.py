"""benchmarks/itl.py, hit_rate.py, overhead.py, page_tiers.py and speculation.py: their figures, on tiny models."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import hit_rate, itl, overhead, page_tiers, speculation
from benchmarks.speculation_workloads import WORKLOADS
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.errors import InvalidRequest
from twostroke.methods import Plain, method
from twostroke.study.bench.latency import PromptSource

LOAD = itl.Load(streams=3, stream_prompt=5, output_tokens=60, prompt=200, answer=4)


def quiet(_: str) -> None:
    """Ignores progress."""


def test_policies_take_turns_on_the_same_tokens(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm(prefix_index="off")
    chosen = itl.policies(LOAD, [16, 64], [5.0])
    assert [(policy.max_step_tokens, policy.itl_ms) for policy in chosen] == [
        (203, None),
        (16, None),
        (64, None),
        (203, 5.0),
    ]
    found = itl.measure(llm, chosen, LOAD, 2, quiet)
    assert llm.pool.num_used == 0
    # Each step of the prompt's prefill is a gap of each stream: 200 tokens in one step, in 13 each, in 61 each.
    gaps = {name: [len(turn.gaps_s) for turn in turns] for name, turns in found.items()}
    assert gaps["no chunking"] == [3, 3]
    assert gaps["budget 16"] == [3 * 16] * 2
    assert gaps["budget 64"] == [3 * 4] * 2
    for turn in found["budget 16"]:
        assert turn.outlasted
        assert turn.itl_p50_s <= turn.itl_p99_s <= turn.itl_max_s == max(turn.gaps_s)


def turn(itl_s: float, ttft_s: float, rate: float, outlasted: bool = True, others_cpu: float = 0.0) -> itl.Turn:
    return itl.Turn(itl_s / 2, itl_s, itl_s, ttft_s, rate, outlasted, others_cpu, [itl_s])


def test_table_of_the_trade_off() -> None:
    whole, fixed, paced = itl.policies(LOAD, [64], [50])
    found = {
        whole.name: [turn(3, 3, 1000), turn(4, 4, 900), turn(5, 5, 800)],
        fixed.name: [turn(0.09, 6, 855)],
        paced.name: [turn(0.06, 8, 810, outlasted=False, others_cpu=0.6)],
    }
    lines = itl.table("m", LOAD, [whole, fixed, paced], found).splitlines()
    assert "| no chunking | 2000.0 | 4000.0 | 4000.0 |  | 4.00 | 900 | 100.0% |" in lines
    assert "| budget 64 | 45.0 | 90.0 | 90.0 |  | 6.00 | 855 | 95.0% |" in lines
    assert "| objective 50 ms | 30.0 | 60.0 | 60.0 | 1.20 | 8.00 | 810 | 90.0% |" in lines
    assert "Not quiet: in 1 of 5 turns other processes took up to 60% of a core." in lines
    assert any(line.startswith("Streams ended before the prompt's first token: objective 50 ms.") for line in lines)


def test_a_load_that_does_not_fit(tiny_llm: Callable[..., LLM]) -> None:
    load = replace(LOAD, prompt=2045)
    with pytest.raises(InvalidRequest, match="2049 positions"):
        itl.measure(tiny_llm(), itl.policies(load, [], []), load, 1, quiet)


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
def test_hit_rates_are_those_asked_for() -> None:
    options: Any = {"backend": "native", "kv_bytes": 64 << 20}
    llms = {index: LLM("smollm2-135m", prefix_index=index, **options) for index in hit_rate.INDEXES}
    chosen = hit_rate.cases(128, 64, 20)
    found = hit_rate.measure(llms, chosen, 1, 3, quiet)
    computed = {case.name: [found[index, case.name][0].computed for index in llms] for case in chosen}
    assert computed == {
        "0%": [128] * 2,
        "25%": [96] * 2,
        "50%": [64] * 2,
        "75%": [32] * 2,
        "100%": [16] * 2,  # whole pages of 16, and the last token is always computed
        "system prompt, cold": [84] * 2,
        "system prompt, warm": [20] * 2,
    }
    rates = [found["hash", f"{rate}%"][0].hit_rate for rate in hit_rate.RATES]
    assert rates == [0, 32 / 127, 64 / 127, 96 / 127, 112 / 127]


def test_a_start_that_is_not_cold_ends_the_run(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm()
    kept = llm.prefill([5] * 40)
    with pytest.raises(hit_rate.Differs, match="3 in use after a reset"):
        hit_rate.take_turn(llm, hit_rate.Case("0%", 64, 0), PromptSource(), 0, 2)
    assert len(kept) == 40


def test_an_answer_that_differs_ends_the_run(tiny_llm: Callable[..., LLM]) -> None:
    llms = {"radix": tiny_llm(), "hash": tiny_llm("qwen2", prefix_index="hash")}  # not the same model
    with pytest.raises(hit_rate.Differs, match="hash, 0% and radix, 0% answer the same prompt differently"):
        hit_rate.measure(llms, hit_rate.cases(64, 32, 8), 1, 3, quiet)


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
def test_speculation_takes_turns_and_counts_what_stood() -> None:
    llm = LLM("smollm2-135m", backend="native", student="int2", prefix_index="off", kv_bytes=64 << 20)
    chosen = speculation.contenders([3], "student int2", None)
    names = ["plain", "lookup, adaptive", "lookup, 3", "student int2, adaptive", "student int2, 3"]
    assert [contender.name for contender in chosen] == names
    copy, random = WORKLOADS[0], WORKLOADS[-1]
    results = [speculation.measure(llm, chosen, workload, 1, 12, quiet) for workload in (copy, random)]
    assert llm.pool.num_used == 0
    for found in results:
        assert [len(answer) for answer in found.answers] == [12, 12]
        plain, *others = [turns[0] for turns in found.turns.values()]
        assert (plain.tokens_per_pass, plain.acceptance, found.of_plain("plain")) == (1, None, 1)
        assert all(turn.tokens_per_pass >= 1 for turn in others)
    copied, noise = (found.turns["lookup, 3"][0] for found in results)
    assert copied.tokens_per_pass > noise.tokens_per_pass
    lines = speculation.table("m", results).splitlines()
    assert "| copy | plain |" in lines[4]
    assert sum(line.startswith("| random |") for line in lines) == 5
    assert len(speculation.facts(results, 12)["rows"]) == 10


def test_speculation_that_changes_the_answer_ends_the_run(tiny_llm: Callable[..., LLM]) -> None:
    chosen = [speculation.Contender("plain", Plain()), speculation.Contender("twice", method("repeat"))]
    with pytest.raises(speculation.Differs, match="twice does not answer as plain does"):
        speculation.measure(tiny_llm(), chosen, WORKLOADS[-1], 1, 8, quiet)
    with pytest.raises(InvalidRequest, match="'random' needs 2255 positions"):
        speculation.measure(tiny_llm(), chosen, WORKLOADS[-1], 1, 1999, quiet)


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the development environment has it")
    from benchmarks.itl_plot import plot

    medians = {"itl_p99_s": 0.06, "ttft_s": 5.0, "tokens_per_second": 800.0}
    plot(tmp_path / "results" / "a.svg", "model", [("budget 64", None, medians), ("objective 50 ms", 50, medians)])
    picture = (tmp_path / "results" / "a.svg").read_text()
    assert picture.count("budget 64") == picture.count("objective 50 ms") == 2  # one in each panel


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
def test_a_step_is_more_than_its_kernels() -> None:
    llm = LLM("smollm2-135m", backend="native", prefix_index="off", kv_bytes=64 << 20)
    timed = overhead.time_kernels(llm)
    for batch in (1, 3):
        turn = overhead.take_turn(llm, timed, batch, 20, 6, 0)
        assert 0 < turn.kernels_ms < turn.step_ms
        assert 0 < turn.outside < 1
    assert llm.pool.num_used == 0


def test_a_preempted_request_comes_back_in_three_ways(tiny_llm: Callable[..., LLM]) -> None:
    llms = tiny_llm(prefix_index="off"), tiny_llm()
    turns = [page_tiers.measure(llms, name, page_tiers.techniques(64)[name], 64, 16, 1) for name in ("plain", "repeat")]
    assert [llm.pool.num_used for llm in llms] == [0, 0]
    assert [llm.engine.preemptions for llm in llms] == [2, 2]
    # The latter also has a page of sinks.
    assert [turn.bytes / llms[0].pool.page_bytes for turn in turns] == [5, 6]
    assert all(turn.copied_s > 0 for turn in turns)
    assert page_tiers.translation(llms[0], 8, 1) > 0
    assert llms[0].pool.num_used == 0
    lines = page_tiers.report("m", 64, 16, turns, {8: 1.0}).splitlines()
    assert sum(line.startswith(("| plain |", "| repeat |")) for line in lines) == 2
