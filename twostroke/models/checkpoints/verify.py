"""Checks the weights of a checkpoint: numbers that no model has, and files whose bytes have changed.

Any byte of a quantized tensor is legal, except in its scales. So a changed byte is found for certain only if the digest
of the file is known: from the catalog, from a file beside it (`FILE.sha256`, `SHA256SUMS`), from the hub's cache, which
names files by their digest, or from the last time that this user opened the file.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twostroke.errors import DamagedCheckpoint
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.file_digests import read_digest, recorded_digest, remember
from twostroke.models.checkpoints.progress import Progress
from twostroke.models.formats.tensor import RawTensor

# Sizes that no trained model has. Matrices are compared with themselves: the largest value of a row is at most 104
# times that of the median row in the models of the catalog, and a flipped bit of a scale's exponent makes it 65536.
MAX_IN_VECTOR = 1e6
MAX_IN_MATRIX = 1e5
MAX_TO_MEDIAN = 2000.0
SHA256 = re.compile(r"[0-9a-f]{64}")
SUMS = ("SHA256SUMS", "SHA256SUMS.txt", "sha256sums.txt")


@dataclass(frozen=True)
class VerificationReport:
    """The result of a check."""

    tensors: int  # number of tensors whose values were looked at
    problems: tuple[str, ...]  # one line for each damaged tensor or file
    compared: tuple[tuple[Path, str], ...]  # (file, where its digest is known from) of files whose digests agree
    unknown: tuple[Path, ...]  # files of which no digest is known

    @property
    def text(self) -> str:
        """A line that says what was checked and what could not be."""
        if self.problems:
            first, *others = self.problems
            return f"{first} (and {len(others)} more)" if others else first
        parts = [f"checked {self.tensors} tensors: all values are finite and of plausible size"]
        parts += [f"{path.name} has the sha256 {where}" for path, where in self.compared]
        if self.unknown:
            names = ", ".join(path.name for path in self.unknown)
            parts.append(
                f"no digest of {names} is known, so other changed bytes were not found; its digest is on record now"
            )
        return "; ".join(parts)

    def require(self) -> None:
        """Raise DamagedCheckpoint, in one line, if something is damaged."""
        if self.problems:
            raise DamagedCheckpoint(self.text)


def verify(checkpoint: Checkpoint, progress: Progress | None = None) -> VerificationReport:
    """Check all tensors and all weight files. Takes about as long as reading and decoding all weights.

    `progress(stage, done, total)` is called with bytes. Raises CheckpointError if a file cannot be read.
    """
    report = progress or (lambda stage, done, total: None)
    tensors = list(checkpoint.stored.values())
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    problems: list[str] = []
    for tensor in tensors:
        if (problem := damage(tensor)) is not None:
            problems.append(f"{tensor.source}: damaged: {problem}")
        tensor.release()
        done += tensor.nbytes
        report("checking values", done, total)
    compared: list[tuple[Path, str]] = []
    unknown: list[Path] = []
    for path in (path for path in checkpoint.files if path.suffix != ".json"):
        size = path.stat().st_size
        digest = read_digest(path, lambda done, size=size: report("checking digests", done, size))
        known = known_digest(path)
        if known is None:
            unknown.append(path)
        elif known[0] == digest:
            compared.append((path, known[1]))
        else:
            problems.append(f"{path}: damaged: its sha256 is {digest[:12]}..., not {known[0][:12]}... {known[1]}")
            continue
        remember(path, digest)
    return VerificationReport(len(tensors), tuple(problems), tuple(compared), tuple(unknown))


def damage(tensor: RawTensor) -> str | None:
    """Say what is wrong with a tensor's values; None if they are finite and of plausible size."""
    matrix = len(tensor.shape) > 1
    columns, tops, most = tensor.shape[-1], list[np.ndarray](), MAX_IN_MATRIX if matrix else MAX_IN_VECTOR
    left = np.empty(0, np.float32)  # values of a row that continues in the next chunk
    with np.errstate(invalid="ignore", over="ignore"):
        for start, values in tensor.chunks():
            low, high = float(values.min()), float(values.max())
            if not (-most <= low and high <= most):  # also for NaN
                at = start + int(np.flatnonzero(~(np.abs(values) <= most))[0])
                return f"{_where(tensor, at)} is {values[at - start]:g}"
            if matrix:
                sizes = np.concatenate([left, np.abs(values)])
                whole = len(sizes) // columns * columns
                tops.append(sizes[:whole].reshape(-1, columns).max(-1))
                left = sizes[whole:]
    rows = np.concatenate(tops) if tops else left
    median = float(np.median(rows[rows > 0])) if (rows > 0).any() else 0.0
    if matrix and len(rows) >= 8 and rows.max() > MAX_TO_MEDIAN * median:
        row = int(rows.argmax())
        return f"row {row} has a value of {rows[row]:g}, where rows have about {median:.3g}"
    return None


def known_digest(path: Path) -> tuple[str, str] | None:
    """(the sha256 that a weight file should have, where it is known from, in words)."""
    for find in (_from_catalog, _from_sidecar, _from_hub):
        if (found := find(path)) is not None:
            return found
    recorded = recorded_digest(path)
    return None if recorded is None else (recorded, "of the last time that it was opened here")


def _from_catalog(path: Path) -> tuple[str, str] | None:
    size = path.stat().st_size
    for entry in CATALOG.values():
        if entry.size == size:  # sizes differ in all of the catalog
            return entry.sha256, f"of {entry.name} in the catalog"
    return None


def _from_sidecar(path: Path) -> tuple[str, str] | None:
    for note in (path.with_name(path.name + ".sha256"), *(path.with_name(name) for name in SUMS)):
        try:
            lines = note.read_text(encoding="utf-8", errors="replace").lower().splitlines()
        except OSError:
            continue
        for digest, *names in filter(None, map(str.split, lines)):
            named = " ".join(names).removeprefix("*").removeprefix("./")
            if SHA256.fullmatch(digest) and named in (path.name.lower(), *([""] if note.suffix == ".sha256" else [])):
                return digest, f"in {note.name}"
    return None


def _from_hub(path: Path) -> tuple[str, str] | None:
    blob = path.resolve()
    if blob.parent.name == "blobs" and SHA256.fullmatch(blob.name):
        return blob.name, "that the hub gives"
    return None


def _where(tensor: RawTensor, index: int) -> str:
    return "[" + ", ".join(map(str, (int(i) for i in np.unravel_index(index, tensor.shape)))) + "]"
