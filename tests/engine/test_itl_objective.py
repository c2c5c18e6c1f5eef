"""The ITL objective that is chosen from a decode step."""

import pytest

from twostroke.engine.scheduler import comfortable_itl_ms


@pytest.mark.parametrize(
    ("step_ms", "objective_ms"), [(0.1, 100), (9.5, 100), (12.5, 100), (25, 200), (26.3, 210), (70, 560), (1000, 8000)]
)
def test_eight_steps_or_a_tenth_of_a_second(step_ms: float, objective_ms: float) -> None:
    assert comfortable_itl_ms(step_ms / 1e3) == objective_ms
