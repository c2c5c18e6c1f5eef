"""Sampling, against transformers' processors and naive formulas; test_randomness.py has the statistics."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from twostroke.backends.native import library
from twostroke.backends.native.backend import NativeBackend
from twostroke.sampling import sampler
from twostroke.sampling import statistics as summary
from twostroke.sampling.draw import Draw, Noise, Sampled
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.sampler import distribution, sample
from twostroke.sampling.statistics import NO_TOKEN, Statistics

INF = math.inf


def draw(index: int = 0, *, seed: bytes = b"seed", prompt: Sequence[int] = (), output: Sequence[int] = (), **rest: Any):
    own = {name: rest.pop(name) for name in ("banned", "stats", "keep_logits") if name in rest}
    params = SamplingParams(**rest)
    return Draw(
        params, Noise.of(params.temperature, seed, index), index, np.array(prompt, np.int32), list(output), **own
    )


def one(logits: Sequence[float] | np.ndarray, **options: Any) -> Sampled:
    return sample(np.asarray(logits, np.float32)[None], [draw(**options)])[0]


def noise(*shape: int, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)


def dense(row: np.ndarray, **params: Any) -> np.ndarray:
    """`distribution` over the whole vocabulary."""
    probabilities, ids = distribution(row, SamplingParams(**params))
    assert abs(float(probabilities.sum()) - 1) < 1e-12
    assert len(np.unique(ids)) == len(ids)
    whole = np.zeros(len(row))
    whole[ids] = probabilities
    return whole


# Few distinct values give ties; the others, neighbours that only double precision tells apart after division.
tied = st.sampled_from([-INF, -2.0, 0.0, 0.5, 0.5000001, 3.0])
rows = st.lists(tied | st.floats(-20, 20, width=32), min_size=1, max_size=40).map(lambda row: np.array(row, np.float32))
rows = rows.filter(lambda row: bool(row.max() > -INF))


@given(
    row=rows,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 45),
    top_p=st.just(1.0) | st.floats(0.01, 0.999),
    min_p=st.just(0.0) | st.floats(0, 1),
)
@settings(max_examples=400, deadline=None)
def test_distribution_is_that_of_transformers(
    row: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    no_ids: Any = None
    scores: Any = TemperatureLogitsWarper(temperature)(no_ids, torch.from_numpy(row).double()[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(no_ids, scores)
    before = scores.softmax(-1)[0]
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(no_ids, scores)
    middle = scores.softmax(-1)[0]
    if min_p:
        scores = MinPLogitsWarper(min_p)(no_ids, scores)
    expected = scores.softmax(-1)[0]
    got = torch.from_numpy(dense(row, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    falling = before.sort(descending=True).values.cumsum(0)
    edges = [falling - top_p] * (top_p < 1) + [middle / middle.max() - min_p] * (min_p > 0)
    if any(bool((edge.abs() < 1e-9).any()) for edge in edges):
        return  # rounding decides
    # Among equally likely ids transformers keeps any; we keep the lowest.
    torch.testing.assert_close(got.sort().values, expected.sort().values, rtol=1e-9, atol=1e-12)
    differ = (got - expected).abs() > 1e-9
    assert len(np.unique(row[differ.numpy()])) <= 1
    assert (not differ.any()) or top_p < 1


@given(row=rows, top_p=st.floats(0.01, 0.9999), temperature=st.floats(0.1, 3), few=st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_top_p_from_a_few_candidates_is_exactly_that_of_a_full_sort(
    row: np.ndarray, top_p: float, temperature: float, few: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "TOP_P_CANDIDATES", ())
        whole = distribution(row, params)
        patch.setattr(sampler, "TOP_P_CANDIDATES", (few, 2 * few))
        quick = distribution(row, params)
    assert whole[0].tolist() == quick[0].tolist()
    assert whole[1].tolist() == quick[1].tolist()
    values = row[whole[1]].tolist()
    assert sorted(zip([-v for v in values], whole[1].tolist(), strict=True)) == [
        (-v, i) for v, i in zip(values, whole[1].tolist(), strict=True)
    ]


@pytest.mark.parametrize("scale", [0.1, 3.0, 10.0])
def test_top_p_from_a_few_candidates_of_many(scale: float) -> None:
    row = (noise(20000, scale=scale) * 4).round() / 4  # many ties
    params = SamplingParams(temperature=1.0, top_p=0.9)
    quick = distribution(row, params)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampler, "TOP_P_CANDIDATES", ())
        whole = distribution(row, params)
    assert all(np.array_equal(a, b) for a, b in zip(quick, whole, strict=True))


@given(rows, st.lists(st.integers(0, 60), max_size=12), st.lists(st.integers(0, 60), max_size=12), st.floats(0.2, 5))
@settings(deadline=None)
def test_repetition_penalty_is_that_of_transformers(
    row: np.ndarray, prompt: list[int], output: list[int], penalty: float
) -> None:
    """Over prompt and output; ids outside the vocabulary have no effect."""
    options: dict[str, Any] = {"prompt": prompt, "output": output, "repetition_penalty": penalty}
    known: Any = torch.tensor([[id for id in prompt + output if id < len(row)]], dtype=torch.long)
    scores = torch.from_numpy(row)
    if known.numel():
        scores = RepetitionPenaltyLogitsProcessor(penalty)(known, scores[None])[0]
    shaped = row.copy()
    sampler.shape_logits(shaped, draw(**options))
    assert torch.equal(torch.from_numpy(shaped), scores)
    got = one(row, **options, logprobs=0)
    assert got.id == int(np.argmax(scores.numpy()))
    assert got.logprob == pytest.approx(float(torch.from_numpy(row).log_softmax(-1)[got.id]), abs=1e-5)


@given(rows, st.lists(st.integers(0, 50), max_size=12), st.floats(-2, 2), st.floats(-2, 2))
@settings(deadline=None)
def test_presence_and_frequency_penalties(
    row: np.ndarray, output: list[int], presence: float, frequency: float
) -> None:
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, where c counts only the output."""
    expected = row.astype(np.float64)
    for id in range(len(row)):
        count = output.count(id)
        expected[id] -= count * frequency + (count > 0) * presence
    options: dict[str, Any] = {"presence_penalty": presence, "frequency_penalty": frequency}
    shaped = row.copy()
    sampler.shape_logits(shaped, draw(prompt=range(len(row)), output=output, **options))
    np.testing.assert_allclose(shaped, expected, rtol=1e-5, atol=1e-5, equal_nan=False)
    assert one(row, output=output, **options).id == int(shaped.argmax())


def test_logit_bias() -> None:
    row = [0.0, 3.0, -INF, 1.0]
    assert one(row, logit_bias={0: 100}).id == 0
    assert one(row, logit_bias={1: -100}).id == 3
    assert one(row, logit_bias={1: -INF, 3: -2, 2: 100}).id == 0, "no bias makes the impossible possible"
    assert one(row, logit_bias={4: 100, 10**12: 100}).id == 1, "ids of another model"
    assert one(row, logit_bias={0: 0.5, 3: 2.5}).id == 3
    assert {one(row, logit_bias={0: 100}, temperature=1, index=i).id for i in range(20)} == {0}
    assert one(row, logit_bias={0: 100}, logprobs=0).logprob == pytest.approx(-3.1698, abs=1e-3), (
        "of the model's own logits"
    )


def test_ending_ids_are_banned_before_min_tokens() -> None:
    row = [1.0, 9.0, 5.0]
    for temperature in (0, 1):
        ids = [one(row, index=i, min_tokens=3, banned=(1, 7, -1), temperature=temperature).id for i in range(5)]
        assert 1 not in ids[:3]
        assert ids[3:] == [1, 1]
    assert one(row, index=0, banned=(1,)).id == 1, "without min_tokens nothing is banned"


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 1e-300])
def test_greedy(temperature: float) -> None:
    logits = noise(20, 3000)
    got = sample(logits, [draw(i, temperature=temperature) for i in range(20)])
    assert [s.id for s in got] == logits.argmax(-1).tolist()
    assert one([1.0, 2.0, 2.0, -INF]).id == 1, "the lowest of equals"


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.99}, {"min_p": 0.01}, {"top_k": 4, "top_p": 0.99}])
def test_impossible_tokens_are_never_drawn(options: dict[str, Any]) -> None:
    row = [-INF, 0.0, -INF, 0.1, -INF, -INF]
    seen = {one(row, temperature=1, index=index, **options).id for index in range(200)}
    assert seen == {1, 3}


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 30}, {"top_k": 90, "top_p": 0.8}])
@pytest.mark.parametrize("size", [7, 1024, 5000])
def test_filters_leave_what_is_drawn_without_them(size: int, options: dict[str, Any]) -> None:
    """A token's noise is independent of others: the sample from all tokens is also that from a subset with it."""
    logits = noise(2, size, scale=2.0)
    logits[1, : size // 2] = -INF
    for row in logits:
        left = dense(row, temperature=0.8, **options) > 0
        free = [one(row, temperature=0.8, index=index).id for index in range(100)]
        filtered = [one(row, temperature=0.8, index=index, **options).id for index in range(100)]
        assert left[filtered].all()
        assert any(left[free])
        assert all(a == b for a, b in zip(free, filtered, strict=True) if left[a])


def every_statistics() -> list[Statistics]:
    return [summary, *([] if library.unavailable() else [NativeBackend(1).statistics])]


@pytest.mark.parametrize("row", [[-INF, -INF], [math.nan, 1.0], [INF, 1.0], [INF, INF], [1.0, math.nan, -INF]])
@pytest.mark.parametrize("statistics", every_statistics(), ids=["reference", "native"][: len(every_statistics())])
@pytest.mark.parametrize("width", [0, 2000])
def test_broken_logits_raise_nothing(row: list[float], statistics: Statistics, width: int) -> None:
    """They may be in a batch with other requests, whose tokens do not change."""
    logits = np.array([row + [0.0] * width, [0.0, 5.0] + [0.0] * (len(row) + width - 2)], np.float32)
    several: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.1}, {"logprobs": 2, "stats": True}]
    for options in several:
        for temperature in (0, 1):
            broken, sound = sample(logits, [draw(temperature=temperature, **options), draw()], statistics)
            finite = np.isfinite(logits[0].max())
            assert broken.id in (range(logits.shape[1]) if finite else [NO_TOKEN])
            if finite and options.get("stats"):
                assert all(
                    one is not None and math.isfinite(one)
                    for one in (broken.logprob, broken.entropy, broken.top_probability)
                )
            assert broken.id == sample(logits[:1], [draw(temperature=temperature, **options)], statistics)[0].id
            assert sound.id == 1


@pytest.mark.parametrize("statistics", every_statistics(), ids=["reference", "native"][: len(every_statistics())])
@pytest.mark.parametrize("temperature", [1e-300, 1e-7, 1.0])
def test_extremes(statistics: Statistics, temperature: float) -> None:
    """With the largest biases at the lowest temperatures, no overflow makes a tie with banned tokens."""
    row = np.array([[3.0, 2.0, 1.0, 0.0]], np.float32)
    low = draw(temperature=temperature, logit_bias=dict.fromkeys(range(4), -1e30), min_tokens=1, banned=(0,))
    assert sample(row, [low], statistics)[0].id != 0
    high = draw(temperature=temperature, logit_bias={1: 1e29, 2: 1e30})
    assert sample(row, [high], statistics)[0].id == 2


def test_who_needs_no_logits() -> None:
    simple: Any = ({}, {"temperature": 0.8}, {"top_p": 0.5, "top_k": 3, "min_p": 0.1}, {"temperature": 1, "seed": 3})
    for options in simple:
        assert SamplingParams(**options).simple
    filtering: Any = ({"top_p": 0.5}, {"top_k": 3}, {"min_p": 0.1})
    for options in filtering:
        assert SamplingParams(temperature=1, **options).filters
        assert not SamplingParams(temperature=1, **options).simple
    shaping: Any = ({"logprobs": 0}, {"repetition_penalty": 1.1}, {"logit_bias": {1: 2.0}}, {"min_tokens": 2})
    for options in shaping:
        assert not SamplingParams(**options).simple


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 50, "top_p": 0.9, "logprobs": 4},
    {"temperature": 1.3, "top_p": 0.8, "stats": True},
    {"temperature": 2.0, "min_p": 0.02, "prompt": range(100), "repetition_penalty": 1.2, "keep_logits": True},
    {"output": [1, 2, 2], "presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 1.0, "logit_bias": {3: 5.0}, "min_tokens": 9, "banned": (1, 2)},
]


def test_a_row_is_the_same_alone_and_in_any_batch_and_order() -> None:
    """All results are bitwise equal, with enough logits for sums in chunks."""
    logits = noise(42, 50000, seed=5)
    draws = [draw(i, seed=bytes([i]), **KINDS[i % len(KINDS)]) for i in range(42)]
    alone = [sample(logits[i : i + 1], [draws[i]])[0] for i in range(42)]
    kept = logits.copy()
    for order in (np.arange(42), np.arange(41, -1, -1), np.random.default_rng(0).permutation(42)[:17]):
        got = sample(logits[order], [draws[i] for i in order])
        for i, s in zip(order.tolist(), got, strict=True):
            fields = ("id", "logprob", "entropy", "top_probability", "top")
            assert [getattr(s, f) for f in fields] == [getattr(alone[i], f) for f in fields]
            assert (s.logits is None) == (alone[i].logits is None)
            assert s.logits is None or np.array_equal(s.logits, logits[i])
    assert np.array_equal(logits, kept), "the caller's logits are left alone"


def test_reports_are_of_the_models_own_logits() -> None:
    row = noise(500, seed=2)
    logprobs = torch.from_numpy(row).double().log_softmax(-1)
    got = one(row, temperature=0.3, logit_bias={7: 90.0}, logprobs=10, stats=True, keep_logits=True)
    assert got.id == 7
    assert got.logprob == pytest.approx(float(logprobs[7]), abs=1e-5)
    best = logprobs.sort(descending=True)
    assert got.top is not None
    assert [id for id, _ in got.top] == best.indices[:10].tolist()
    assert [value for _, value in got.top] == pytest.approx(best.values[:10].tolist(), abs=1e-5)
    assert got.entropy == pytest.approx(float(-(logprobs.exp() * logprobs).sum() / math.log(2)), rel=1e-5)
    assert got.top_probability == pytest.approx(float(best.values[0].exp()), rel=1e-5)
    assert got.logits is not None
    assert np.array_equal(got.logits, row)
    pair = sample(noise(2, 500), [draw(keep_logits=True), draw()])
    assert pair[0].logits is not None
    assert pair[0].logits.base is None, "the batch is not held on to"
    assert pair[0].logits.nbytes == 4 * 500


def test_reports_at_the_edges() -> None:
    plain = one([0.0, 1.0])
    assert (plain.top, plain.entropy, plain.top_probability, plain.logits) == (None, None, None, None)
    certain = one([-INF, 3.0, -INF], stats=True, logprobs=3)
    assert (certain.entropy, certain.top_probability, certain.logprob) == (0.0, 1.0, 0.0)
    assert certain.top == ((1, 0.0), (0, -INF), (2, -INF))
    assert one([0.0] * 8, stats=True).entropy == pytest.approx(3.0)
    assert one([0.0, 0.0, -INF], stats=True).entropy == pytest.approx(1.0)
    assert one([1.0, 2.0], logprobs=0).top == ()
    assert [id for id, _ in one([1.0, 2.0, 2.0], logprobs=1000).top or ()] == [1, 2, 0], "all there are; equals by id"
