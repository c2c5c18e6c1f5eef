"""Trials of few requests."""

from collections.abc import Generator
from contextlib import contextmanager

import pytest

from twostroke.study.plan import loads


@contextmanager
def short_trials() -> Generator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loads, "MAX_REQUESTS", 24)
        yield


@pytest.fixture(autouse=True)
def trials_are_short() -> Generator[None]:
    with short_trials():
        yield
