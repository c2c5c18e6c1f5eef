"""Native attention over all kinds of values: pages cut anywhere, gaps in positions, windows, any number of rows."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.thinning import examples
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

LENGTH = 300  # more than two splits of keys
Models = Callable[[str], tuple[LLM, LLM]]


@pytest.fixture(scope="module", params=library.VARIANTS)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Models:
    """A family's tiny model, on the native and the reference backend."""
    if request.param not in library.variants():
        pytest.skip(f"the {request.param} kernels cannot run here")

    @functools.cache
    def opened(family: str) -> tuple[LLM, LLM]:
        path = write_model(family, tmp_path_factory.mktemp(family), hidden_size=96, head_dim=32, num_attention_heads=6)
        options: dict[str, Any] = {"weights": "bf16", "prefix_index": "off", "kv_bytes": 16 << 20, "page_size": 16}
        mine, theirs = (LLM(str(path), backend=b, **options) for b in (f"native-{request.param}", "reference"))
        return mine, theirs

    return opened


def logits_after(llm: LLM, cuts: list[tuple[int, int]], rows: int) -> np.ndarray:
    """Logits [rows, vocab] of `rows` tokens after these slices of a prompt's value, joined."""

    def program() -> Program:
        # With the queries of all tokens it keeps all entries, also of windowed layers.
        whole = yield Prefill([3 + i * 7 % 90 for i in range(LENGTH)], queries=LENGTH)
        first, *others = (whole.kv[start:stop] for start, stop in cuts)
        joined = sum(others, first)
        return (yield Prefill([7 + i * 5 % 90 for i in range(rows)], after=joined, logits="all"))  # pyright: ignore[reportArgumentType]

    request = Request(program, SamplingParams(), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    return request.result.logits


@st.composite
def slices(draw: st.DrawFn) -> list[tuple[int, int]]:
    """One to four ascending slices at random places."""
    ends = sorted(draw(st.sets(st.integers(0, LENGTH), min_size=2, max_size=8)))
    return list(zip(ends[::2], ends[1::2], strict=False))


@settings(max_examples=examples(15))
@given(cuts=slices(), rows=st.sampled_from([1, 2, 7, 33, 70]), family=st.sampled_from(["llama", "mistral", "gemma3"]))
def test_any_value(cuts: list[tuple[int, int]], rows: int, family: str, models: Models) -> None:
    found, expected = (logits_after(llm, cuts, rows) for llm in models(family))
    assert np.linalg.norm(found - expected) < 0.04 * np.linalg.norm(expected)
