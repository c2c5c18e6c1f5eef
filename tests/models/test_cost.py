"""Work counted by hand and by enumeration; prices and corrections that are robust to noise."""

from collections.abc import Callable
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from twostroke.api.llm import LLM
from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.cost import CostModel, SequenceRows, WorkAmounts
from twostroke.models.rope import Rope
from twostroke.models.step_predictor import StepCorrection, StepPredictor, nonnegative_least_squares


def config(windows: tuple[int | None, ...], max_position: int = 100, experts: Experts | None = None) -> ModelConfig:
    attention = Attention(2, 1, 4, 0.5, Rope(1e4), bias=True)
    layers = [Layer(replace(attention, window=window), experts or GatedMLP(12)) for window in windows]
    return ModelConfig("llama", 16, 8, max_position, 1e-6, tuple(layers))


CONFIG = config((None, 4))
BYTES = {"embed": 77, "layers.0.q": 400, "layers.1.down": 600, "head": 300}
COST = CostModel(CONFIG, BYTES, entry_bytes=64)
STEPS = st.lists(
    st.builds(SequenceRows, st.integers(1, 30), st.integers(0, 60), st.integers(0, 1)), min_size=1, max_size=4
)


def test_by_hand() -> None:
    # Three rows after five entries: they attend to 6, 7 and 8 keys in the first layer, and to 4 each in the second,
    # whose window has the last 6 of 8 entries.
    assert COST.work([SequenceRows(3, 5, 1)]) == WorkAmounts(
        weight_bytes=1000 + 300,
        kv_bytes=32 * 8 + 32 * 6,
        linear_flops=3 * 2 * 2 * (8 * 8 + 4 * 8 + 4 * 8 + 8 * 8 + 3 * 8 * 12),
        attention_flops=(21 + 12) * 4 * 2 * 4,
        head_flops=2 * 16 * 8,
    )
    assert COST.work([SequenceRows(1)]) == WorkAmounts(1000, 64, 1920, 2 * 32, 0)
    assert COST.work([]) == WorkAmounts(0, 0, 0, 0, 0)


@given(step=STEPS)
def test_against_enumeration(step: list[SequenceRows]) -> None:
    keys, seen = 0, 0
    for rows in step:
        for window in (None, 4):
            spans = [
                range(max(0, p + 1 - (window or p + 1)), p + 1) for p in range(rows.context, rows.context + rows.count)
            ]
            keys += sum(map(len, spans))
            seen += len(set().union(*spans))
    work = COST.work(step)
    assert work.attention_flops == keys * 4 * 2 * 4
    assert work.kv_bytes == seen * 32


@given(count=st.integers(2, 60), cut=st.integers(1, 59), context=st.integers(0, 30))
def test_chunks_compute_what_the_whole_does(count: int, cut: int, context: int) -> None:
    """FLOPs are the same for any pieces; weights are read for each piece."""
    cut = min(cut, count - 1)
    whole = COST.work([SequenceRows(count, context)])
    parts = [COST.work([SequenceRows(cut, context)]), COST.work([SequenceRows(count - cut, context + cut)])]
    assert whole.linear_flops == sum(part.linear_flops for part in parts)
    assert whole.attention_flops == sum(part.attention_flops for part in parts)
    assert 2 * whole.weight_bytes == sum(part.weight_bytes for part in parts)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_as_pytorch_counts_them(family: str, tiny_llm: Callable[..., LLM]) -> None:
    """FLOPs equal PyTorch's count for a token that fills a page, as the reference multiplies by whole pages."""
    llm = tiny_llm(family, prefix_index="off")
    before = llm.prefill([5] * 15)
    with FlopCounterMode(display=False) as counter:
        tail = llm.prefill([5], after=before).tail
        assert tail is not None
        assert tail.logits is not None  # computed when they are read
    work = llm.model.cost.work([SequenceRows(1, 15, 1)])
    assert counter.get_total_flops() == work.linear_flops + work.attention_flops + work.head_flops


def test_bytes_are_those_computed_on(tiny_llm: Callable[..., LLM]) -> None:
    wide, narrow = (tiny_llm("qwen2", dtype=dtype).model.cost for dtype in ("float32", "bfloat16"))
    assert wide.head_bytes == wide.config.vocab_size * wide.config.hidden_size * 4
    assert wide.layer_bytes(1) == wide.dense_bytes == wide.row_flops // 2 * 4
    assert (narrow.dense_bytes, narrow.head_bytes) == (wide.dense_bytes // 2, wide.head_bytes // 2)


def test_experts_that_a_step_is_expected_to_read() -> None:
    """For one row the chosen experts, for very many rows all; in between the expectation of random choices."""
    count, chosen = 16, 3
    mixture = config((None, None), experts=Experts(count, chosen, 12))
    sizes = {f"layers.1.experts.{e}.{part}": 10 for e in range(count) for part in ("gate", "up", "down")}
    cost = CostModel(mixture, sizes | {"layers.0.q": 7, "embed": 1, "head": 1}, 64)
    always = 7 + 2 * count * 8 * 4  # of two layers' routers in float32
    assert cost.layer_bytes(1) == pytest.approx(always + 30 * chosen)
    assert cost.layer_bytes(1000) == pytest.approx(always + 30 * count)
    random = np.random.default_rng(0)
    for rows in (2, 5, 12):
        drawn = [len({e for _ in range(rows) for e in random.permutation(count)[:chosen]}) for _ in range(2000)]
        assert cost.layer_bytes(rows) == pytest.approx(always + 30 * np.mean(drawn), rel=0.02)
    dense = CostModel(config((None, None)), BYTES, 64)
    router, mlp = 2 * 8 * count, 6 * 8 * 12
    assert cost.row_flops - dense.row_flops == 2 * (router + (chosen - 1) * mlp)


SHAPES = [
    *([SequenceRows(count, context)] for count in (1, 4, 64) for context in (0, 500)),
    [SequenceRows(16)],
    [SequenceRows(1, 0, 1)],
    [SequenceRows(1, 0, 1)] * 8,
]
LONG = CostModel(config((None, None), 10_000), BYTES, 64)


def test_prices_are_found_again() -> None:
    truth = StepPredictor(LONG, (2e-6, 3e-6, 1e-7, 3e-9, 2e-9, 1e-9, 1e-9, 2e-9, 4e-7))
    found = StepPredictor.fit(LONG, [(shape, truth.seconds(shape)) for shape in SHAPES])
    assert found.prices == pytest.approx(truth.prices, rel=1e-6)


def test_nonnegative_least_squares_against_all_sets_of_columns() -> None:
    random = np.random.default_rng(3)
    for _ in range(200):
        a, b = random.standard_normal((7, 5)), random.standard_normal(7)
        best = float(b @ b)
        for size in range(1, 6):
            for chosen in map(list, combinations(range(5), size)):
                found = np.linalg.lstsq(a[:, chosen], b, rcond=None)[0]
                if (found >= 0).all():
                    best = min(best, float(np.sum((a[:, chosen] @ found - b) ** 2)))
        x = nonnegative_least_squares(a, b)
        assert (x >= 0).all()
        assert float(np.sum((a @ x - b) ** 2)) == pytest.approx(best, rel=1e-9)


@given(
    seconds=st.lists(st.floats(0, 10), min_size=len(SHAPES), max_size=len(SHAPES)), step=STEPS, more=st.integers(1, 50)
)
def test_whatever_was_measured_more_work_takes_no_less_time(
    seconds: list[float], step: list[SequenceRows], more: int
) -> None:
    predictor = StepPredictor.fit(LONG, list(zip(SHAPES, seconds, strict=True)))
    longer = [replace(step[0], count=step[0].count + more), *step[1:]]
    assert 0 <= predictor.seconds(step) <= predictor.seconds(longer) < float("inf")


@pytest.mark.parametrize("spread", [0.02, 0.2])
def test_most_steps_stay_below_the_correction(spread: float) -> None:
    """Steps take twice the predicted time, with variation; then the machine becomes three times as fast."""
    rng, correction = np.random.default_rng(0), StepCorrection()
    for level in (2.0, 2.0 / 3):
        late = []
        for _ in range(3000):
            measured = level * rng.lognormal(0, spread)
            late.append(measured > correction.factor)
            correction.observe(correction.factor, measured)
        assert 0.01 < np.mean(late[60:]) < 0.1
        assert level < correction.factor < level * np.exp(3 * spread)


def test_one_step_that_was_held_up_counts_as_twice_as_slow() -> None:
    doubled, held_up = StepCorrection(), StepCorrection()
    doubled.observe(1.0, 2.0)
    held_up.observe(1.0, 1e6)
    assert held_up.factor == doubled.factor < 1.25 * StepCorrection().factor
    for _ in range(40):
        held_up.observe(held_up.factor, 1.0)
    assert held_up.factor < 1.1


def test_clocks_and_predictions_of_nothing() -> None:
    correction = StepCorrection()
    for predicted, measured in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0)):
        correction.observe(predicted, measured)
    assert 0.3 < correction.factor < 3
