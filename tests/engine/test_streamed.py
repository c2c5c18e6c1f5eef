"""A model whose layers are read in every pass has the bits of one in memory, and keeps none of them."""

import weakref
from pathlib import Path

import numpy as np
import pytest

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.weights import PackedMatrix
from twostroke.errors import InvalidRequest
from twostroke.methods import method

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
TEXT = "one two three four five six seven eight nine ten eleven twelve"


@pytest.mark.parametrize("technique", ["plain", "tova", "attention-matching", "overfill"])
def test_the_same_bits(technique: str, native_directory: Path) -> None:
    """In chunks, with queries, with biases, and for a student that is in memory."""
    found: list[tuple[str, np.ndarray]] = []
    for stream in (False, True):
        with LLM(str(native_directory), stream_weights=stream, student="int3", kv_bytes=8 << 20, threads=2,
                 max_step_tokens=16) as llm:  # fmt: skip
            (answer,) = llm.generate([TEXT], max_tokens=6, ignore_eos=True, method=method(technique))
            found.append((answer.text, llm.prefill(TEXT).entries()))
    (text, entries), (streamed, same) = found
    assert streamed == text
    assert (same == entries).all()


def test_no_layer_stays(native_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, alive = weakref.WeakSet[PackedMatrix](), list[int]()
    made = PackedMatrix.__init__

    def count(self: PackedMatrix, *arguments: object) -> None:
        made(self, *arguments)  # pyright: ignore[reportArgumentType]
        weights.add(self)
        alive.append(len(weights))

    monkeypatch.setattr(PackedMatrix, "__init__", count)
    with LLM(str(native_directory), stream_weights=True, kv_bytes=8 << 20, prefix_index="off") as llm:
        head = len(weights)
        llm.prefill(TEXT)
        assert max(alive) <= head + 7  # of one layer
        assert len(weights) == head


def test_models_that_cannot(tmp_path: Path, native_directory: Path) -> None:
    recurrent = write_model("qwen3_5", tmp_path)
    for model, tp, said in ((recurrent, 1, "share more than"), (native_directory, 2, "only the native backend")):
        with pytest.raises(InvalidRequest, match=said):
            LLM(str(model), stream_weights=True, kv_bytes=8 << 20, threads=1, tp=tp)
