"""Rows without a wanted result leave the last block after their keys and values; nothing else may change."""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import VOCAB, write_model
from twostroke.api.llm import LLM
from twostroke.backends.interface import RaggedBatch
from twostroke.backends.lazy_logits import HiddenRows
from twostroke.backends.native import library

# Rows of each sequence, and the entries before them: few, so that keys are prefetched, some, and so many that blocks
# share one memory.
STEPS = {"few": ([1, 2, 3], [20, 0, 40]), "some": ([1, 40, 16, 3], [20, 0, 0, 5]), "many": ([1, 1100, 3], [20, 0, 5])}
BACKENDS = ["reference", *(f"native-{variant}" for variant in library.VARIANTS)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], LLM]:
    models: dict[tuple[str, str], LLM] = {}

    def open_model(family: str, backend: str) -> LLM:
        if backend != "reference" and (reason := library.unavailable(backend.removeprefix("native-"))):
            pytest.skip(reason)
        if (family, backend) not in models:
            directory = write_model(family, tmp_path_factory.mktemp(family), head_dim=64)
            weights: dict[str, Any] = {} if backend == "reference" else {"weights": "int8"}
            models[family, backend] = LLM(str(directory), backend=backend, threads=2, kv_bytes=16 << 20, **weights)
        return models[family, backend]

    return open_model


def results(llm: LLM, step: str, wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The results of a pass over all sequences, and all keys and values that it stores."""
    size, (counts, befores) = llm.pool.page_size, STEPS[step]
    groups = llm.pool.num_groups
    columns: list[list[int]] = []  # positions, slots, a page for each group
    tables: list[np.ndarray] = []
    page = 0
    for count, before in zip(counts, befores, strict=True):
        ends = before + count
        blocks = [range(first, first + groups) for first in range(page, page + groups * -(-ends // size), groups)]
        columns += [[i, i % size, *blocks[i // size]] for i in range(before, ends)]
        spans = [(0, min(size, ends - i), i, *blocks[i // size]) for i in range(0, ends, size)]
        tables.append(np.array(spans, np.int32))
        page += groups * len(spans)
    positions, slots, *pages = np.array(columns, np.int64).T.copy()
    tokens, starts = positions % VOCAB, [0, *itertools.accumulate(counts)]
    for storage in llm.pool.memory.storages:
        storage[:] = 0.5
    batch = RaggedBatch(tokens, positions, np.stack(pages), slots, starts, tables, np.array(list(wanted), np.int64))
    rows = llm.model.compiled.forward(batch, llm.pool.memory).logits
    assert isinstance(rows, HiddenRows)
    stored = [np.frombuffer(one, np.uint8) for one in llm.pool.memory.read_pages(range(page))]
    return np.asarray(rows.hidden), np.stack(stored)


@pytest.fixture(scope="module")
def whole(opened: Callable[[str, str], LLM]) -> Callable[[str, str, str], tuple[np.ndarray, np.ndarray]]:
    """The results of a step of which all rows are wanted: (family, backend, step)."""
    rows = {step: range(sum(counts)) for step, (counts, _) in STEPS.items()}
    return functools.cache(lambda family, backend, step: results(opened(family, backend), step, rows[step]))


@pytest.mark.thinned(2)
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "gemma3", "olmo2", "qwen2moe"])
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_wanted_rows_are_those_of_all(
    family: str,
    backend: str,
    step: str,
    data: st.DataObject,
    opened: Callable[[str, str], LLM],
    whole: Callable[[str, str, str], tuple[np.ndarray, np.ndarray]],
) -> None:
    llm, rows = opened(family, backend), sum(STEPS[step][0])
    wanted = sorted(data.draw(st.sets(st.integers(0, rows - 1))))
    everything, stored = whole(family, backend, step)
    some, stored_too = results(llm, step, wanted)
    assert np.array_equal(some, everything[wanted])
    assert np.array_equal(stored_too, stored)
