"""benchmarks/itl.py, overhead.py, speculation.py and wire.py: their figures, on tiny models."""

from collections.abc import Callable
from dataclasses import replace
from itertools import islice

import pytest

from benchmarks import itl, overhead, speculation, speculation_workloads, wire
from benchmarks.speculation_workloads import WORKLOADS, Workload
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.errors import InvalidRequest
from twostroke.methods import Plain, method

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
def test_speculation_takes_turns_and_counts_what_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    """On short prompts: each contender prefills each of them twice."""
    monkeypatch.setattr(speculation_workloads, "RANDOM_TOKENS", 24)
    llm = LLM("smollm2-135m", backend="native", student="int2", prefix_index="off", kv_bytes=64 << 20)
    chosen = speculation.contenders([3], "student int2", None)
    names = [
        "plain",
        "lookup, judged",
        "lookup, answered before",
        "lookup, 3",
        "student int2, judged",
        "student int2, 3",
    ]
    assert [contender.name for contender in chosen] == names
    again = "Write this text again word for word. Write nothing else.\n\n"
    texts = ("The mill at Harrow stands where the Tamble leaves the hills.", "It was built in 1784 by Jonas Keld.")
    asked = [[{"role": "user", "content": again + text}] for text in texts]
    copy, random = replace(WORKLOADS[0], conversations=lambda: asked), WORKLOADS[-1]
    results = [speculation.measure(llm, chosen, workload, 1, 1, 12, quiet) for workload in (copy, random)]
    assert llm.pool.num_used == 0
    for found in results:
        short, long = sorted(len(answer) for answer in found.answers)
        assert short == 6 < long <= 18
        plain, *others = [turns[0] for turns in found.turns.values()]
        assert (plain.tokens_per_pass, plain.acceptance, found.of_plain("plain")) == (1, None, 1)
        assert all(turn.tokens_per_pass >= 1 for turn in others)
    copied, noise = (found.turns["lookup, 3"][0] for found in results)
    assert copied.tokens_per_pass > noise.tokens_per_pass
    lines = speculation.table("m", results).splitlines()
    assert "| copy | 1 | plain |" in lines[4]
    assert sum(line.startswith("| random |") for line in lines) == 6
    assert len(speculation.facts(results, 12)["rows"]) == 12


@pytest.mark.parametrize("name", ["code", "agent"])
def test_conversations_for_many_streams(name: str) -> None:
    workload = next(one for one in WORKLOADS if one.name == name)
    assert workload.conversations is not None
    assert len({str(one) for one in islice(workload.conversations(), 32)}) == 32


def test_too_few_conversations(tiny_llm: Callable[..., LLM]) -> None:
    """Else a run of 16 streams would measure the one that there is."""
    one = Workload("one", "", lambda: [[{"role": "user", "content": "Why?"}]])
    assert len(one.prompts(tiny_llm(), 1)) == 1
    with pytest.raises(InvalidRequest, match="'one' has 1 prompts of at most 1024 tokens, not 2"):
        one.prompts(tiny_llm(), 2)


def test_speculation_that_changes_the_answer_ends_the_run(tiny_llm: Callable[..., LLM]) -> None:
    chosen = [speculation.Contender("plain", Plain()), speculation.Contender("twice", method("repeat"))]
    with pytest.raises(speculation.Differs, match="twice does not answer as plain does"):
        speculation.measure(tiny_llm(), chosen, WORKLOADS[-1], 2, 1, 8, quiet)
    with pytest.raises(InvalidRequest, match="'random' needs 3254 positions"):
        speculation.measure(tiny_llm(), chosen, WORKLOADS[-1], 1, 1, 1999, quiet)


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
def test_a_step_is_more_than_its_kernels() -> None:
    llm = LLM("smollm2-135m", backend="native", prefix_index="off", kv_bytes=64 << 20)
    timed = overhead.time_kernels(llm)
    for batch in (1, 3):
        turn = overhead.take_turn(llm, timed, batch, 20, 6, 0)
        assert 0 < turn.kernels_ms < turn.step_ms
        assert 0 < turn.outside < 1
    assert llm.pool.num_used == 0


def test_the_wire_moves_whole_values() -> None:
    pool = wire.pool_of("smollm2-135m", 16, 2)
    kv = wire.value_of(pool, 32)
    assert kv.table[:, :3].tolist() == [[0, 16, 0], [0, 16, 16]]
    assert len(kv.to("host")) == 32
