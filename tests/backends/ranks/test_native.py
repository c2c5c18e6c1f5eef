"""Any number of ranks has the bits of one: tokens, log-probabilities, keys and values, of every family."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.ranks.scenario import UNEVEN, differences, finite, record
from tests.tiny import LATENT, write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.errors import InvalidRequest

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @functools.cache
    def write(family: str) -> Path:
        return write_model(family, tmp_path_factory.mktemp(family), head_dim=32, **UNEVEN)

    return write


def open_native(path: Path, tp: int, **options: Any) -> LLM:
    chosen: dict[str, Any] = {"backend": "native", "threads": 1, "kv_bytes": 16 << 20} | options
    return LLM(str(path), tp=tp, **chosen)


def seen_with(path: Path, tp: int, **options: Any) -> dict[str, Any]:
    with open_native(path, tp, **options) as llm:
        return record(llm)


# Ranks spin while they wait for each other: three take three times, and four five times, the processor time of two.
@pytest.mark.parametrize("tp", [2, *(pytest.param(tp, marks=pytest.mark.nightly) for tp in (3, 4))])
def test_every_family(family: str, tp: int, written: Callable[[str], Path]) -> None:
    path = written(family)
    if family in (*LATENT, "falcon_h1"):
        with pytest.raises(InvalidRequest, match=r"latent|beside each other"):
            open_native(path, tp)
        return
    alone = seen_with(path, 1)
    assert finite(alone)
    assert differences(alone, seen_with(path, tp)) == []


@pytest.mark.parametrize(("family", "tp"), [("qwen3moe", 3), ("qwen3_5", 4)])
def test_more_ranks(family: str, tp: int, written: Callable[[str], Path]) -> None:
    path = written(family)
    assert differences(seen_with(path, 1), seen_with(path, tp)) == []


@pytest.mark.parametrize("tp", [2, pytest.param(4, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_weights_of_few_bits(weights: str, tp: int, written: Callable[[str], Path]) -> None:
    """Activations are int8, and a step's token comes from the sketch of the head."""
    path = written("llama")
    alone = seen_with(path, 1, weights=weights)
    assert finite(alone)
    assert differences(alone, seen_with(path, tp, weights=weights)) == []


def test_ranks_of_several_threads(written: Callable[[str], Path]) -> None:
    path = written("qwen3moe")
    assert differences(seen_with(path, 1), seen_with(path, 2, threads=2)) == []


def test_more_ranks_than_parts(tiny_directory: Callable[[str], Path]) -> None:
    """Some ranks have no head, no unit of a product, or nothing of the vocabulary."""
    path = tiny_directory("gemma3")
    assert differences(seen_with(path, 1), seen_with(path, 4)) == []


@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("variant", library.VARIANTS)
def test_every_variant(variant: str, tp: int, written: Callable[[str], Path]) -> None:
    if reason := library.unavailable(variant):
        pytest.skip(reason)
    path, backend = written("qwen2"), f"native-{variant}"
    alone = seen_with(path, 1, backend=backend)
    assert differences(alone, seen_with(path, tp, backend=backend)) == []
