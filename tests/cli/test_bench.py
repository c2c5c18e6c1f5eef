"""`twostroke bench latency`: fields, definitions, and no caching between repeats."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import Result

from twostroke.api.llm import LLM
from twostroke.engine.timings import percentile
from twostroke.study.bench.latency import BatchShape, PromptSource, measure

SMALL = ("--repeats", 2, "--warmup", 1)
FIELDS = {"model", "backend", "dtype", "threads", "prompt_tokens", "output_tokens", "batch", "repeats",
          "prefill_tokens_per_second", "decode_tokens_per_second", "ttft_s", "itl_mean_s", "itl_p99_s", "tpot_s",
          "kv_bytes", "peak_rss_bytes", "load_s", "raw", "date", "machine", "definitions"}  # fmt: skip


def test_json(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    facts = run_json("bench", "latency", "-m", tiny, "--prompt-tokens", 40, "--output-tokens", 5, *SMALL)
    assert set(facts) >= FIELDS
    assert (facts["prompt_tokens"], facts["output_tokens"], facts["batch"], facts["repeats"]) == (40, 5, 1, 2)
    assert facts["kv_bytes"] == 44 * 3 * 2 * 2 * 16 * 4
    assert facts["cached_tokens"] == 0
    assert len(facts["raw"]) == 2
    for one in facts["raw"]:
        assert one["prefill_tokens_per_second"] == pytest.approx(40 / one["ttft_s"])
        assert one["decode_tokens_per_second"] == pytest.approx(1 / one["tpot_s"])
        assert one["itl_mean_s"] == pytest.approx(one["tpot_s"])
    assert facts["machine"]["cores"] >= 1
    assert facts["peak_rss_bytes"] > 10_000_000
    assert "results" not in facts


def test_several_workloads(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    lengths = ("--prompt-tokens", "8,24", "--output-tokens", "3", "--batch", "1,4")
    facts = run_json("bench", "latency", "-m", tiny, *lengths, *SMALL)
    shapes = [(one["prompt_tokens"], one["batch"]) for one in facts["results"]]
    assert shapes == [(8, 1), (8, 4), (24, 1), (24, 4)]
    assert facts["prompt_tokens"] == 8
    assert facts["results"][3]["kv_bytes"] == 4 * facts["results"][2]["kv_bytes"]


def test_a_shared_prefix_is_cached(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    lengths = ("--prompt-tokens", 48, "--output-tokens", 2, "--shared-prefix", 32)
    assert run_json("bench", "latency", "-m", tiny, *lengths, *SMALL)["cached_tokens"] == 32


def test_a_text(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    facts = run_json("bench", "latency", "-m", tiny, "--prompt", "the quick fox", "--output-tokens", 2, *SMALL)
    assert facts["prompt_tokens"] == len(LLM(tiny, threads=1).encode("the quick fox"))


def test_a_table_for_people(run: Callable[..., Result], tiny: str) -> None:
    result = run("bench", "latency", "-m", tiny, "--prompt-tokens", "8,16", "--output-tokens", 1, *SMALL)
    assert result.exit_code == 0
    assert "prefill" in result.stdout
    assert "medians of 2" in result.stdout
    with pytest.raises(json.JSONDecodeError):
        json.loads(result.stdout.splitlines()[-1])


def test_fresh_tokens_for_every_repeat(tiny: str) -> None:
    llm, prompts = LLM(tiny, threads=1), PromptSource(seed=1)
    shape = BatchShape(20, 2, batch=2)
    rounds = [prompts.make(llm, shape, number) for number in range(3)]
    assert len({tuple(row) for made in rounds for row in made}) == 6
    assert rounds[0] == PromptSource(seed=1).make(llm, shape, 0)
    assert not {token for made in rounds for row in made for token in row} & llm.tokenizer.special_ids


def test_workloads_are_interleaved(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    llm, lengths = LLM(tiny, threads=1, prefix_index="off"), []
    generate = llm.generate
    monkeypatch.setattr(llm, "generate", lambda p, params: (lengths.append(len(p[0])), generate(p, params))[1])
    results = measure(llm, [BatchShape(4, 2), BatchShape(6, 2)], repeats=2, warmup=1, prompts=PromptSource())
    assert lengths == [4, 6] * 3
    assert [len(result.repeats) for result in results] == [2, 2]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--prompt-tokens", "4,x"), 2, "not a number"),
        (("--prompt-tokens", "0"), 2, "at least 1"),
        (("--repeats", "0"), 2, "--repeats"),
        (("--prompt-tokens", "9000"), 1, "9000 prompt and 64 output tokens are 9064; model "),
        (("--prompt", ""), 1, "empty"),
    ],
)
def test_bad_input(run: Callable[..., Result], tiny: str, arguments: tuple[str, ...], code: int, message: str) -> None:
    result = run("bench", "latency", "-m", tiny, *arguments)
    assert result.exit_code == code
    assert message in result.stderr


def test_percentile_is_by_nearest_rank() -> None:
    assert percentile([], 99) is None
    assert percentile([3.0], 99) == 3.0
    assert percentile([float(i) for i in range(1, 101)], 99) == 99.0
    assert percentile([1.0, 2.0, 3.0], 50) == 2.0
