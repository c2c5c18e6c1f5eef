"""A tiny model that the native backend runs, whose bits do not depend on the schedule."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from twostroke.api.llm import LLM


@pytest.fixture
def native_llm(native_directory: Path) -> Iterator[Callable[..., LLM]]:
    """A function that opens the model with int8 weights; at the end of a test no page may be lost."""
    opened: list[LLM] = []

    def open_native(**options: Any) -> LLM:
        chosen: dict[str, Any] = {"backend": "native", "weights": "int8", "threads": 1, "kv_bytes": 16 << 20}
        chosen |= {"prefix_index": "off"} | options
        opened.append(LLM(str(native_directory), **chosen))
        return opened[-1]

    yield open_native
    for llm in opened:
        for model in llm.engine.models.values():
            assert model.pool.num_used == llm.engine.cached_pages(model.pool)
