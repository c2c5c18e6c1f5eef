"""A model's generation defaults, from both kinds of file, and from the catalog."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.models.checkpoints.test_gguf import write
from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.checkpoints.generation import FIELDS
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.resolve import open_checkpoint, open_path
from twostroke.sampling.params import SamplingParams

STATED = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}


@pytest.fixture
def directory(tiny_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_directory("llama"), tmp_path / "model")


def stated(directory: Path, **values: Any) -> dict[str, float]:
    (directory / "generation_config.json").write_text(json.dumps(values))
    return dict(open_path(directory).generation)


def test_of_a_directory(directory: Path) -> None:
    assert stated(directory, **STATED, do_sample=False, eos_token_id=1, max_new_tokens=9) == STATED
    assert stated(directory, temperature=0.6, top_p=None) == {"temperature": 0.6}
    assert stated(directory, top_k=-1) == {"top_k": 0}
    assert stated(directory) == {}
    (directory / "generation_config.json").unlink()
    assert open_path(directory).generation == {}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature must be"),
        ({"temperature": "hot"}, "temperature must be"),
        ({"top_p": 0}, "top_p must be"),
        ({"top_k": 2.5}, "top_k must be"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be"),
    ],
)
def test_what_cannot_be_is_said(values: dict[str, Any], message: str, directory: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {message}"):
        stated(directory, **values)


@pytest.mark.parametrize("text", ["{", "[]", "7", "[" * 100_000])
def test_a_damaged_file_is_said(text: str, directory: Path) -> None:
    (directory / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: (not JSON|must hold)"):
        open_path(directory)


def test_of_a_gguf_file(tmp_path: Path) -> None:
    def alter(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("general.sampling.temp", 0.5)
        writer.add_int32("general.sampling.top_k", 40)
        writer.add_float32("general.sampling.top_p", 0.75)
        writer.add_float32("general.sampling.min_p", 0.25)
        writer.add_float32("general.sampling.penalty_repeat", 1.5)
        writer.add_int32("general.sampling.penalty_last_n", 64)

    found = open_gguf(write(tmp_path / "a.gguf", alter=alter)).generation
    expected = {"temperature": 0.5, "top_k": 40, "top_p": 0.75, "min_p": 0.25, "repetition_penalty": 1.5}
    assert found == expected
    assert open_gguf(write(tmp_path / "b.gguf")).generation == {}
    wrong = write(tmp_path / "c.gguf", alter=lambda writer: writer.add_float32("general.sampling.top_p", 2))
    with pytest.raises(CheckpointError, match=r"c\.gguf: top_p must be"):
        open_gguf(wrong)


def test_of_the_catalog() -> None:
    """Its files state no defaults, so those that the publisher documents apply."""
    assert open_checkpoint("smollm2-135m").generation == CATALOG["smollm2-135m"].generation
    for entry in CATALOG.values():
        assert set(entry.generation) <= set(FIELDS)
        assert bool(entry.generation) == entry.chat
        own: dict[str, Any] = dict(entry.generation)
        assert SamplingParams(**own)
