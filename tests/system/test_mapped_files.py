"""Rows read from a mapped file: the same bytes, no memory, and an error if the file changes."""

import errno
import gc
import os
from pathlib import Path

import numpy as np
import pytest

from twostroke.errors import CheckpointError
from twostroke.system.mapped_files import MappedFile, locate_in_file, row_reader

HEADER, SHAPE = 100, (3000, 700)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    values = np.random.default_rng(0).integers(0, 256, HEADER + SHAPE[0] * SHAPE[1] + 50, dtype=np.uint8)
    (tmp_path / "weights").write_bytes(values.tobytes())
    return tmp_path / "weights"


def matrix(path: Path) -> np.ndarray:
    return np.frombuffer(MappedFile(path), np.uint8)[HEADER : HEADER + SHAPE[0] * SHAPE[1]].reshape(SHAPE)


def test_rows_are_those_of_the_array(path: Path) -> None:
    rows, expected = [5, 2999, 0, 5], matrix(path).copy()
    for data in (matrix(path), expected, matrix(path)[1000:2500]):
        offset = 1000 if len(data) == 1500 else 0
        wanted = [row % 1500 for row in rows] if offset else rows
        read = row_reader(data, "w")
        assert read(wanted) == expected[[row + offset for row in wanted]].tobytes()
        assert read([]) == b""


def test_where_an_array_lies(path: Path) -> None:
    data = matrix(path)
    found = locate_in_file(data[7:])
    assert found is not None
    assert found[1] == HEADER + 7 * SHAPE[1]
    assert locate_in_file(data.copy()) is None
    assert locate_in_file(data[[1, 2]]) is None


@pytest.mark.parametrize("change", ["truncated", "overwritten"])
def test_a_file_that_was_changed(path: Path, change: str) -> None:
    read = row_reader(matrix(path), "weights: embed")
    before = path.stat().st_mtime_ns
    with path.open("r+b") as stream:
        if change == "truncated":
            stream.truncate(HEADER + 1000)
        else:
            stream.write(b"GGUF")
    os.utime(path, ns=(before, before + (change == "overwritten")))
    with pytest.raises(CheckpointError, match=r"weights: embed: the file was changed while the model was in use"):
        read([1])


def test_a_disk_that_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    read = row_reader(matrix(path), "weights: embed")
    monkeypatch.setattr(os, "pread", fail)
    with pytest.raises(
        CheckpointError, match=r"embed: the file cannot be read any more \(Input/output error\): check its disk"
    ):
        read([1])


def test_nothing_is_left_open(path: Path) -> None:
    def opened() -> int:
        gc.collect()
        return sum(link.resolve() == path.resolve() for link in Path("/proc/self/fd").iterdir())

    read = row_reader(matrix(path), "w")
    assert opened() == 1  # the mapping is closed, but rows can be read
    assert len(read([1])) == SHAPE[1]
    del read
    assert opened() == 0
