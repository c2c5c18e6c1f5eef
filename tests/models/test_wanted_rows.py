"""Rows that nobody wants the result of leave the last block after their keys and values: nothing else may change."""

import itertools
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import write_model
from twostroke.kernels import library
from twostroke.kernels.interface import RaggedBatch
from twostroke.llm import LLM

COUNTS = [1, 40, 16, 3]  # rows of each sequence
BEFORE = [20, 0, 0, 5]  # entries that they come after
BACKENDS = ["reference", *(f"native-{variant}" for variant in library.VARIANTS)]


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], LLM]:
    models: dict[tuple[str, str], LLM] = {}

    def open_model(family: str, backend: str) -> LLM:
        if backend != "reference" and (reason := library.unavailable(backend.removeprefix("native-"))):
            pytest.skip(reason)
        if (family, backend) not in models:
            directory = write_model(family, tmp_path_factory.mktemp(family), head_dim=64)
            weights = {} if backend == "reference" else {"weights": "int8"}
            models[family, backend] = LLM(str(directory), backend=backend, threads=2, kv_bytes=16 << 20, **weights)
        return models[family, backend]

    return open_model


def results(llm: LLM, wanted: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """What a pass of all sequences hands out, and every key and value that it leaves."""
    size = llm.pool.page_size
    starts = [0, *itertools.accumulate(COUNTS)]
    positions = np.concatenate([np.arange(b, b + n) for b, n in zip(BEFORE, COUNTS, strict=True)])
    first_pages = np.repeat(
        [0, *itertools.accumulate((b + n) // size + 1 for b, n in zip(BEFORE, COUNTS, strict=True))][:-1], COUNTS
    )
    tables = []
    for first, before, count in zip(dict.fromkeys(first_pages.tolist()), BEFORE, COUNTS, strict=True):
        begins = range(0, before + count, size)
        tables.append([(first + b // size, 0, min(size, before + count - b), b) for b in begins])
    columns = [
        np.arange(len(positions)) + 5,
        positions,
        first_pages + positions // size,
        positions % size,
        list(wanted),
    ]
    tokens, positions, pages, slots, rows = (np.array(column, np.int64) for column in columns)
    arrays = [np.array(table, np.int32) for table in tables]
    llm.pool.storage[:] = 0.5
    hidden = llm.decoder.forward(RaggedBatch(tokens, positions, pages, slots, starts, arrays, rows), llm.pool.storage)
    return np.asarray(hidden), llm.pool.storage[:, :, : max(pages.tolist()) + 1].copy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
@settings(max_examples=15, deadline=None)
@given(wanted=st.sets(st.integers(0, sum(COUNTS) - 1)).map(sorted))
def test_wanted_rows_are_those_of_all(
    family: str, backend: str, wanted: list[int], opened: Callable[[str, str], LLM]
) -> None:
    llm = opened(family, backend)
    whole, stored = results(llm, range(sum(COUNTS)))
    some, stored_too = results(llm, wanted)
    assert np.array_equal(some, whole[wanted])
    assert np.array_equal(stored_too, stored)
