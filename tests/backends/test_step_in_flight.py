"""A step may begin before the host knows the tokens that it enters: placeholders stand for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.interface import RaggedBatch
from twostroke.backends.native import library
from twostroke.sampling.draw import NO_NOISE, Draw, Noise
from twostroke.sampling.params import SamplingParams

BACKENDS = ["reference", *(["native"] if library.unavailable() is None else [])]
PARAMS = SamplingParams()


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LLM]:
    directory = write_model("llama", tmp_path_factory.mktemp("flight"), head_dim=64, num_attention_heads=2)

    def open_model(backend: str) -> LLM:
        options: dict[str, Any] = {} if backend == "reference" else {"weights": "int8"}
        return LLM(str(Path(directory)), backend=backend, threads=1, kv_bytes=16 << 20, **options)

    return open_model


def batch(token_ids: list[int], position: int, **more: Any) -> RaggedBatch[np.ndarray]:
    """One row for each of some sequences, each in a page of its own, behind `position` entries."""
    count = len(token_ids)
    rows = np.arange(count, dtype=np.int64)
    tables = [np.array([[0, position + 1, 0, page]], np.int32) for page in range(count)]
    return RaggedBatch(
        np.array(token_ids, np.int64),
        np.full(count, position, np.int64),
        rows[None],
        np.full(count, position, np.int64),
        list(range(count + 1)),
        tables,
        rows,
        **more,
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_placeholders_are_the_tokens_that_were_drawn(backend: str, opened: Callable[[str], LLM]) -> None:
    llm = opened(backend)
    compiled, memory = llm.model.compiled, llm.pool.memory
    first = compiled.forward(batch([5, 6, 7], 0), memory).logits
    noises = [NO_NOISE, Noise.of(0.9, b"seed", 1), Noise.of(1.5, b"seed", 2)]
    nothing = np.zeros(0, np.int32)
    drawn = compiled.sample([first[i : i + 1] for i in range(3)], [Draw(PARAMS, one, 0, nothing, []) for one in noises])
    tokens = [sampled.id for sampled in drawn.read()]
    assert len(drawn) == 3
    known = compiled.forward(batch([tokens[2], 9, tokens[0]], 1), memory).logits
    expected, stored = known.read().copy(), np.array(memory.storages[0][:, :, :3])
    found = compiled.forward(batch([-3, 9, -1], 1, drawn=drawn), memory).logits
    assert np.array_equal(found.read(), expected)
    assert np.array_equal(np.array(memory.storages[0][:, :, :3]), stored)


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_are_computed_when_they_are_read_and_once_for_a_step(backend: str, opened: Callable[[str], LLM]) -> None:
    llm = opened(backend)
    rows, queries, _ = llm.model.compiled.forward(batch([5, 6, 7], 0), llm.pool.memory)
    assert queries is None
    assert len(rows) == 3
    kept, hidden_bytes = rows[1:2].kept(), rows.nbytes
    assert hidden_bytes == 3 * kept.nbytes == 3 * 4 * llm.config.hidden_size
    whole = rows.read()
    assert rows.nbytes == hidden_bytes + whole.nbytes
    assert np.shares_memory(rows[1:].read(), whole)
    if llm.backend.exact:
        assert np.array_equal(kept.read(), whole[1:2])
    assert kept.nbytes == 4 * llm.config.hidden_size  # and none of the logits that were read


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_value_keeps_a_hidden_state_and_no_logits(backend: str, opened: Callable[[str], LLM]) -> None:
    llm = opened(backend)
    kv = llm.prefill(list(range(5, 45)))
    assert kv.tail is not None
    assert kv.tail.nbytes == 4 * llm.config.hidden_size
    logits = kv.tail.logits
    assert logits is not None
    assert logits.shape == (llm.config.vocab_size,)
    assert kv.tail.nbytes == 4 * llm.config.hidden_size
    assert kv.entry_table.nbytes == kv.table.nbytes + kv.token_array.nbytes + kv.tail.nbytes
