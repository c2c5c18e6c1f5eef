"""Pairs of models that are closed at the end of a test."""

import faulthandler
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.wire.pairs import Pair
from tests.cluster.wire.small import TRANSPORTS, Ends, nothing_is_held
from twostroke.api.llm import LLM


@pytest.fixture(autouse=True)
def nothing_hangs_and_no_thread_stays() -> Iterator[None]:
    """A test that hangs ends the run, and shows where every thread is."""
    faulthandler.dump_traceback_later(120, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("wire")]


@pytest.fixture
def pair(tiny_llm: Callable[..., LLM]) -> Iterator[Callable[..., Pair]]:
    """A function that opens two models of the same weights, exact, and a wire between them."""
    pairs: list[Pair] = []

    def opened(first: dict[str, Any] | None = None, second: dict[str, Any] | None = None, **both: Any) -> Pair:
        exact: dict[str, Any] = {"family": "qwen3", "weights": "bf16", "kv_bytes": 4 << 20} | both
        pairs.append(Pair(tiny_llm(**exact | (first or {})), tiny_llm(**exact | (second or {}))))
        return pairs[-1]

    yield opened
    for one in pairs:
        one.close()


@pytest.fixture(params=TRANSPORTS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """Small pools with a wire between them, of each transport; afterwards neither holds a page."""
    ends = Ends(request.param)
    yield ends
    ends.close()
    nothing_is_held(ends.here, ends.there)
