"""Predictions beside measurements. No accuracy is asserted: that is a measurement, not a test."""

from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.api.llm import LLM
from twostroke.models.cost import SequenceRows
from twostroke.models.step_predictor import StepPredictor
from twostroke.study.plan.verification_cells import CELLS, QUICK, VerificationCell
from twostroke.study.plan.verify import CellResult as Figure
from twostroke.study.plan.verify import Verification, predict, verify
from twostroke.study.simulate import model_timing as timed
from twostroke.study.simulate.model_timing import LatencyModel

SMALL = (
    VerificationCell("prefill", 40, 16),
    VerificationCell("decode", batch=3, context=21),
    VerificationCell("mixed", 40, 16, 2, 20),
    VerificationCell("prefill", 5000),
)


def test_cells_cover_what_is_promised() -> None:
    prompts = [one.prompt for one in CELLS if one.kind == "prefill"]
    assert (min(prompts), max(prompts)) == (128, 7900)
    assert {one.batch for one in CELLS if one.kind == "decode"} >= {1, 2, 8, 16}
    assert max(one.context for one in CELLS) == 7900
    assert {one.budget for one in CELLS} == {128, 256, 512, 2048}
    assert len({one.name for one in CELLS}) == len(CELLS)
    assert {one.kind for one in QUICK} == {"prefill", "decode", "mixed"}


def test_no_cell_is_one_that_was_timed() -> None:
    """No step of a decode cell, and no length of a prefill, is among those that calibration times."""
    steps = {(batch, context) for batch, context in timed.BATCHES} | {(batch, 16) for batch in timed.DECODES}
    for cell in (*CELLS, *QUICK):
        assert cell.prompt not in timed.PROMPTS
        assert (cell.batch, cell.context) not in steps
        assert cell.context not in timed.CONTEXTS


@pytest.fixture(scope="module")
def directory(tiny_directory: Callable[[str], Path]) -> str:
    return str(tiny_directory("llama"))


def test_a_tiny_model_is_measured_at_every_cell_that_fits(directory: str) -> None:
    seen: list[str] = []
    found = verify(directory, SMALL, seconds=4.0, threads=1, progress=seen.append)
    assert list(found.left_out.values()) == ["longer than the model's context"]
    assert [(one.cell.kind, one.figure) for one in found.results] == [
        ("prefill", "TTFT"),
        ("decode", "ITL"),
        ("mixed", "TTFT"),
        ("mixed", "ITL"),
    ]
    assert all(len(one.measured) >= 1 and min(one.measured) > 0 for one in found.results)
    assert all(one.predicted > 0 for one in found.results)
    assert seen[0] == "opening"
    assert found.others >= 0


def test_predictions_add_up_steps(tiny_llm: Callable[..., LLM]) -> None:
    """A prefill is the sum of its chunks; beside others, each step makes a token for each of them."""
    cost = tiny_llm("llama").model.cost
    prices = [1e-9 * (i + 1) for i in range(9)]
    made = LatencyModel(StepPredictor(cost, prices), step_s=1.0, token_s=0.1, entered_s=0.01, request_s=5.0)
    kernels = made.predictor.seconds
    assert predict(made, VerificationCell("prefill", 40, 16))["TTFT"] == pytest.approx(
        5
        + 3
        + 0.1
        + 39 * 0.01
        + kernels([SequenceRows(16)])
        + kernels([SequenceRows(16, 16)])
        + kernels([SequenceRows(8, 32, 1)])
    )
    others = [[SequenceRows(1, 23 + i, 1)] * 2 for i in range(3)]
    chunks = [SequenceRows(14), SequenceRows(14, 14), SequenceRows(12, 28, 1)]
    steps = [kernels([chunk, *rest]) for chunk, rest in zip(chunks, others, strict=True)]
    beside = predict(made, VerificationCell("mixed", 40, 16, 2, 20))
    assert beside["TTFT"] == pytest.approx(5 + 3 + sum(steps) + 0.1 * 7 + 0.01 * 39)
    assert beside["ITL"] == pytest.approx((beside["TTFT"] - 5) / 3)


def test_what_holds() -> None:
    cell, other = CELLS[0], CELLS[8]
    made = Verification(
        "m", [Figure(cell, "TTFT", 1.1, [1.0, 5.0, 0.5]), Figure(other, "ITL", 0.95, [1.0])], _nothing()
    )
    assert made.error("TTFT") == pytest.approx(0.1)
    assert made.error("ITL") == pytest.approx(0.05)
    made.results[0].predicted = 1.09
    assert made.holds
    made.results[1].predicted = 0.8
    assert not made.holds
    made.results[1].measured.clear()
    assert made.error("ITL") is None
    assert not made.holds, "what was not measured does not hold"


def _nothing() -> LatencyModel:
    return LatencyModel(StepPredictor.__new__(StepPredictor))
