"""The user's key: made once, by the first process, and readable by this user only."""

import multiprocessing
import os
import stat
from pathlib import Path

import pytest

from twostroke.system.user_key import KEY_BYTES, user_key, user_keys


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "key"


def test_it_is_made_on_first_use_and_stays(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert user_key(make=False) is None
    assert not path.parent.exists()
    before = os.umask(0)
    try:
        key = user_key(make=True)
    finally:
        os.umask(before)
    assert key == path.read_bytes() == user_key(make=True) == user_key(make=False)
    assert len(path.read_bytes()) == KEY_BYTES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["key"]
    path.unlink()
    assert user_key(make=True) != key
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o604, 0o640, 0o660])
def test_one_that_others_can_read_is_not_used(path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    user_key(make=True)
    path.chmod(mode)
    assert user_key(make=True) is user_key(make=False) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
    assert "chmod 600" in caplog.text


@pytest.mark.parametrize("content", [b"", b"x" * (KEY_BYTES - 1), b"x" * (KEY_BYTES + 1), b"x" * (9 * KEY_BYTES)])
def test_one_of_another_size_is_not_used(path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.touch(mode=0o600)
    path.write_bytes(content)
    assert user_key(make=True) is None
    assert "this is not a key" in caplog.text


def _make(path: str) -> bytes | None:
    os.environ["TWOSTROKE_HOME"] = path
    return user_key(make=True)


def test_processes_that_make_it_at_once_have_the_same(path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        keys = pool.map(_make, [str(path.parent)] * 8, chunksize=1)
    assert set(keys) == {path.read_bytes()}
    assert os.listdir(path.parent) == ["key"]


def test_without_a_home_there_is_none(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", "~nobody-has-this-name/twostroke")
    assert user_key(make=True) is None
    assert "the key cannot be used" in caplog.text


@pytest.mark.parametrize(("mode", "owner", "used"), [
    (0o400, 0, True), (0o440, 0, True), (0o440, 1, False), (0o444, 0, False), (0o460, 0, False), (0o600, 1, False),
])  # fmt: skip
def test_a_secret_that_is_mounted_is_used(
    mode: int, owner: int, used: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Kubernetes mounts it: a link to a file of root's, readable for a group."""
    secret = tmp_path / "data"
    secret.write_bytes(b"k" * KEY_BYTES)
    secret.chmod(mode)
    (tmp_path / "key").symlink_to(secret)
    monkeypatch.setenv("TWOSTROKE_KEY_FILE", str(tmp_path / "key"))
    true = os.fstat

    def other(file: int) -> os.stat_result:
        status = list(true(file))
        status[4] = owner if owner == 0 else 12345
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", other)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert user_key(make=True) == (b"k" * KEY_BYTES if used else None)


def test_a_file_of_ones_own_may_be_readable_by_a_group_if_nobody_changes_it(path: Path) -> None:
    key = user_key(make=True)
    path.chmod(0o440)
    assert user_key(make=False) == key


def test_keys_of_the_environment_and_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("TWOSTROKE_HOME", str(home))
    monkeypatch.setenv("TWOSTROKE_KEY", "the old secret of all, the new secret of all")
    old, new = user_keys(make=True)
    assert not home.exists(), "a home that can only be read is enough"
    monkeypatch.setenv("TWOSTROKE_KEY", "the new secret of all")
    assert user_keys(make=True) == (new,)
    for wrong in ("", "short", "the new secret of all,"):
        monkeypatch.setenv("TWOSTROKE_KEY", wrong)
        assert user_keys(make=True) == ()
    monkeypatch.delenv("TWOSTROKE_KEY")
    file = tmp_path / "keys"
    file.touch(mode=0o600)
    file.write_bytes(new + old)
    monkeypatch.setenv("TWOSTROKE_KEY_FILE", str(file))
    assert user_keys(make=False) == (new, old)


def test_a_key_file_that_is_stated_and_missing_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TWOSTROKE_KEY_FILE", str(tmp_path / "none"))
    assert user_key(make=True) is None
    assert "No such file" in caplog.text
