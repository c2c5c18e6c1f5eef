"""Saving behaves as in other programs."""

import os
import re
import stat
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from twostroke.api.llm import LLM
from twostroke.errors import KVError
from twostroke.kv.cache import KVCache
from twostroke.system.atomic_files import atomic_replace


def save(path: Path, data: bytes = b"new") -> None:
    with atomic_replace(path) as out:
        out.write(data)


@contextmanager
def umask(mask: int) -> Generator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["a\0b", "a\ud800b"])
def test_a_name_that_no_file_can_have(tmp_path: Path, name: str, tiny_llm: Callable[..., LLM]) -> None:
    """One line, for saving, loading and a directory of pages."""
    with pytest.raises(OSError, match="no file can have this name"):
        save(tmp_path / name)
    llm = tiny_llm()
    kv = llm.prefill([5, 6])
    with pytest.raises(KVError, match="no file can have this name"):
        kv.save(f"{tmp_path}/{name}")
    with pytest.raises(KVError, match="no file can have this name"):
        KVCache.load(f"{tmp_path}/{name}", llm)
    with pytest.raises(KVError, match="no file can have this name"):
        tiny_llm(kv_disk=f"{tmp_path}/{name}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("mask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_gets_what_the_umask_allows(tmp_path: Path, mask: int, mode: int) -> None:
    with umask(mask):
        save(tmp_path / "file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o755])
def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    (tmp_path / "file").write_bytes(b"old and longer")
    (tmp_path / "file").chmod(mode)
    with umask(0o022):
        save(tmp_path / "file")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    assert (tmp_path / "file").read_bytes() == b"new"


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays(tmp_path: Path, there: bool) -> None:
    (tmp_path / "away").mkdir()
    target = tmp_path / "away" / "target"
    if there:
        target.write_bytes(b"old")
    (tmp_path / "middle").symlink_to("away/target")
    (tmp_path / "link").symlink_to("middle")
    save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "middle").is_symlink()
    assert target.read_bytes() == b"new"
    assert os.listdir(tmp_path / "away") == ["target"]


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "circle").symlink_to("circle")
    (tmp_path / "to_null").symlink_to("/dev/null")
    (tmp_path / "file").touch()
    for path, why in [
        (tmp_path, "a directory"),
        (tmp_path / "pipe", "no regular file"),
        (tmp_path / "circle", "no regular file"),
        (tmp_path / "to_null", "no regular file"),
        (Path("/dev/null"), "no regular file"),
        (tmp_path / "file" / "below", "Not a directory"),
        (tmp_path / "missing" / "file", f"there is no directory {tmp_path / 'missing'}: make it first"),
        (tmp_path / ("x" * 300), "File name too long"),
    ]:
        before = sorted(os.listdir(tmp_path))
        with pytest.raises(OSError, match=re.escape(why)):
            save(path)
        assert sorted(os.listdir(tmp_path)) == before
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_file_that_may_not_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"old")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to anything
    with pytest.raises(PermissionError):
        save(tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == b"old"


@pytest.mark.parametrize("error", [OSError(28, "full"), ValueError(), KeyboardInterrupt()])
def test_a_failure_leaves_what_was_there(tmp_path: Path, error: BaseException) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail() -> None:
        with atomic_replace(tmp_path / "file") as out:
            out.write(b"half")
            assert len(os.listdir(tmp_path)) == 2
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["file"]
