"""The reference in float32 has the bits of one process in any number of ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.ranks.scenario import UNEVEN, differences, finite, record
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.kv.cache import KVCache


def open_reference(path: Path, tp: int) -> LLM:
    return LLM(str(path), tp=tp, backend="reference", threads=1, kv_bytes=16 << 20)


def seen_with(path: Path, tp: int) -> dict[str, Any]:
    with open_reference(path, tp) as llm:
        return record(llm, long=False)


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("qwen2", 3),
        pytest.param("qwen2", 4, marks=pytest.mark.nightly),
        ("qwen3moe", 2),
        pytest.param("qwen3moe", 4, marks=pytest.mark.nightly),
        ("gemma3", 2),
        pytest.param("gemma3", 4, marks=pytest.mark.nightly),
        pytest.param("gemma2", 2, marks=pytest.mark.nightly),  # windows and norms are gemma3's too
        pytest.param("granite", 2, marks=pytest.mark.nightly),  # its factors are the same in any rank
        ("gpt_oss", 2),
        ("olmo2", 2),
        pytest.param("olmo2", 3, marks=pytest.mark.nightly),
        pytest.param("olmo2", 4, marks=pytest.mark.nightly),
        ("qwen2moe", 2),
        pytest.param("qwen2moe", 3, marks=pytest.mark.nightly),
        ("ministral3", 2),
    ],
)
def test_families(family: str, tp: int, tmp_path: Path) -> None:
    path = write_model(family, tmp_path, head_dim=32, **UNEVEN)
    alone = seen_with(path, 1)
    assert finite(alone)
    assert differences(alone, seen_with(path, tp)) == []


def test_values(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """Saved in ranks, loaded in one process, and back; copied on write, cut, joined and set aside."""
    path, saved = tiny_directory("llama"), tmp_path / "a.kv"
    with open_reference(path, 1) as one, open_reference(path, 3) as ranks:
        values = [llm.prefill(list(range(2, 60))) for llm in (one, ranks)]
        for llm, value, other in ((one, values[0], ranks), (ranks, values[1], one)):
            value.save(saved)
            there = KVCache.load(saved, other)
            assert (there.entries() == values[0].entries()).all()
            parts = [there[:20], there[7:23] + there[40:], there.to("host").to("pool")]
            expected = [value[:20], value[7:23] + value[40:], value]
            for part, like in zip(parts, expected, strict=True):
                assert (part.entries() == like.entries()).all()
                assert (part.keys(1) == like.keys(1)).all()
            continued = [list(each.decode(kv, max_tokens=4)) for each, kv in ((llm, value), (other, there))]
            assert [token.id for token in continued[0]] == [token.id for token in continued[1]]
