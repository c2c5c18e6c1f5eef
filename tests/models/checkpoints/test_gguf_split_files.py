"""GGUF models in several files, which the `gguf` package writes."""

import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import huggingface_hub
import numpy as np
import pytest

from tests.models.checkpoints.test_catalog import fake_hub
from tests.models.checkpoints.test_gguf import make_weights, write
from twostroke.errors import CheckpointError, UnknownModel
from twostroke.models.checkpoints import hub
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.gguf.split_files import sets
from twostroke.models.checkpoints.resolve import open_checkpoint


def split(folder: Path, name: str = "tiny", alter: Callable[[gguf.GGUFWriter], object] = lambda w: None) -> list[Path]:
    """A model in three files."""
    folder.mkdir(exist_ok=True)
    write(folder / f"{name}.gguf", split_tensors=9, alter=alter)
    return sorted(folder.glob(f"{name}-*.gguf"))


def test_any_part_opens_the_whole(tmp_path: Path) -> None:
    whole = open_gguf(write(tmp_path / "whole.gguf"))
    parts = split(tmp_path / "set")
    assert [part.name for part in parts] == [f"tiny-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    ids = set()
    for typed in (*parts, tmp_path / "set"):
        checkpoint = open_checkpoint(str(typed))
        assert checkpoint.name == "tiny"
        assert checkpoint.files == tuple(parts)
        assert checkpoint.config == whole.config
        assert checkpoint.licence == "mit"
        for name in whole.names():
            assert np.array_equal(checkpoint.tensor(name).dequantize(), whole.tensor(name).dequantize())
        ids.add(checkpoint.weights_id)
    assert len(ids) == 1
    assert checkpoint.tokenizer_source.metadata["tokenizer.ggml.model"] == "gpt2"  # type: ignore[union-attr]


def test_the_id_is_of_all_parts(tmp_path: Path) -> None:
    parts = split(tmp_path / "set")
    before = open_gguf(parts[0]).weights_id
    data = bytearray(parts[2].read_bytes())
    data[-5] ^= 1
    parts[2].write_bytes(data)
    assert open_gguf(parts[0]).weights_id != before


def test_missing_and_foreign_parts_are_named(tmp_path: Path) -> None:
    parts = split(tmp_path / "set")
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "set", kept)

    def restored() -> None:
        shutil.copytree(kept, tmp_path / "set", dirs_exist_ok=True)

    parts[1].unlink()
    for typed in (parts[0], parts[2], tmp_path / "set"):
        with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003\.gguf: this part of a model in 3"):
            open_checkpoint(str(typed))
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"tiny-00002-of-00003\.gguf.* is missing and 1 more"):
        open_gguf(parts[0])
    restored()
    shutil.copy(parts[2], parts[1])
    with pytest.raises(CheckpointError, match=r"00002-of-00003\.gguf: it states that it is part 2 of 3"):
        open_gguf(parts[0])
    restored()
    other = split(tmp_path / "other", alter=lambda w: w.add_name("another"))
    weights = make_weights("llama", layers=3)
    write(tmp_path / "other" / "big.gguf", weights=weights, layers=3, split_tensors=12)
    assert len(list((tmp_path / "other").glob("big-*"))) == 3
    shutil.copy(tmp_path / "other" / "big-00003-of-00003.gguf", parts[2])
    with pytest.raises(CheckpointError, match=r"00003-of-00003\.gguf: split.tensors.count differs .* another model"):
        open_gguf(parts[0])
    restored()
    lone = Path(shutil.copy(other[1], tmp_path / "lone.gguf"))
    with pytest.raises(CheckpointError, match=r"a part of a model in 3 files; name them NAME-00001-of-00003\.gguf"):
        open_gguf(lone)


def test_a_set_of_one_and_odd_counts(tmp_path: Path) -> None:
    assert open_gguf(write(tmp_path / "a.gguf", alter=lambda w: w.add_uint16("split.count", 1))).name == "a"
    with pytest.raises(CheckpointError, match=r"split\.count must be a number of files, not -2"):
        open_gguf(write(tmp_path / "b.gguf", alter=lambda w: w.add_int32("split.count", -2)))


def _next(ending: str) -> str:
    return f"{ending[:-1]}b" if ending.endswith("a") else ending.replace("1", "2", 1)


@pytest.mark.parametrize("ending", ["-split-a", ".part1of2", "-part-a", ".00001", ".a", "-00001-of-00002", ".part1"])
def test_pieces_are_told_how_to_join(ending: str, tmp_path: Path) -> None:
    data = write(tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "whole.gguf").unlink()
    first, second = tmp_path / f"m.gguf{ending}", tmp_path / f"m.gguf{_next(ending)}"
    first.write_bytes(data[: len(data) // 2])
    second.write_bytes(data[len(data) // 2 :])
    for typed in (first, second, tmp_path):
        with pytest.raises(CheckpointError, match=r"a piece of a file .*: cat m\.gguf\?\* > m\.gguf") as caught:
            open_checkpoint(str(typed))
        assert "\n" not in str(caught.value)


def test_models_among_files() -> None:
    names = ["q4/a-00002-of-00002.gguf", "q4/a-00001-of-00002.gguf", "b.gguf", "mmproj-b.gguf", "README.md"]
    assert sets(names) == {"b.gguf": ["b.gguf"], "q4/a-00001-of-00002.gguf": names[1::-1]}


def test_a_projector_beside_a_model_is_no_model(tmp_path: Path) -> None:
    for name in ("a.gguf", "mmproj-a-f16.gguf"):
        write(tmp_path / name)
    assert open_checkpoint(str(tmp_path)).name == "a"


def test_the_hub_gives_all_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [part.name for part in split(tmp_path, "m-q4_k_m")]
    shutil.copy(write(tmp_path / "m-q8_0.gguf"), tmp_path / "m-q8_0-big.gguf")
    asked = fake_hub(monkeypatch, tmp_path, [*parts, "m-q8_0.gguf", "README.md"])
    for typed in (f"org/m:{parts[0]}", f"org/m:{parts[2]}", "org/m:Q4_K_M"):
        asked.clear()
        assert open_checkpoint(typed).files == tuple(tmp_path / part for part in parts)
        assert asked == parts
    with pytest.raises(CheckpointError, match=r"several GGUF models; .* m-q4_k_m-00001-of-00003\.gguf, m-q8_0\.gguf$"):
        open_checkpoint("org/m")
    with pytest.raises(UnknownModel, match="no GGUF file there has Q4_K in its name"):
        open_checkpoint("org/m:Q4_K")
    monkeypatch.setattr(hub, "hub_trouble", lambda _: "no network")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, local_files_only: str(tmp_path))
    assert open_checkpoint("org/m:q4_k_m").files == tuple(tmp_path / part for part in parts)
