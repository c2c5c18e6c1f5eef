"""The directory of an evaluation: its settings, and a line for each finished item, where a later run goes on."""

import fcntl
import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from twostroke.errors import InvalidRequest
from twostroke.study.evaluate.measure import RecordsByMeasure
from twostroke.system.atomic_files import atomic_replace

ITEMS, SETTINGS = "items.jsonl", "settings.json"
ROW = ("item", "measures")  # of ITEMS


@dataclass(frozen=True)
class ItemRecords:
    """An item's records. `measures` are by measure, then by contender."""

    item: str
    measures: RecordsByMeasure

    def dump(self) -> str:
        return json.dumps({"item": self.item, "measures": self.measures}) + "\n"


class RunDirectory:
    """A directory while one run writes there. `known`: the records that it has, by item."""

    def __init__(self, path: Path, items: BinaryIO, settings: dict[str, Any]) -> None:
        self._path, self._items = path, items
        known = items.read()
        whole = known.rfind(b"\n") + 1
        items.truncate(whole)  # an unfinished line, left by a killed run, is cut off
        if not (path / SETTINGS).exists():
            if whole:
                raise InvalidRequest(f"{path} has items of an unknown run: choose another directory")
            with atomic_replace(path / SETTINGS) as file:
                file.write(f"{json.dumps(settings, indent=1)}\n".encode())
        found = json.loads((path / SETTINGS).read_bytes())
        rows = [json.loads(line) for line in known[:whole].splitlines()]
        if not isinstance(found, dict) or not all(isinstance(row, dict) and {*ROW} <= row.keys() for row in rows):
            raise ValueError("not all that it holds are settings and items")
        _require_equal(path, found, settings)
        self.known = {row["item"]: ItemRecords(**{key: row[key] for key in ROW}) for row in rows}

    def add(self, lines: Iterable[ItemRecords]) -> None:
        """Raises InvalidRequest if there is no room; what was written whole stays."""
        with writing(self._path):
            self._items.write("".join(line.dump() for line in lines).encode())
            self._items.flush()


@contextmanager
def run_directory(path: Path, settings: dict[str, Any]) -> Generator[RunDirectory]:
    """The directory for one run, made if it is not there. Without settings it gets these.

    Raises InvalidRequest: it cannot be written, another run writes there, or it holds a run with other settings.
    """
    with writing(path):
        if path.exists() and not path.is_dir():
            raise InvalidRequest(f"{path} cannot hold this run: it is no directory")
        path.mkdir(parents=True, exist_ok=True)
        items = (path / ITEMS).open("a+b")
    try:
        with writing(path):
            _lock(path, items)
            items.seek(0)
            held = RunDirectory(path, items, settings)
        yield held
    finally:
        with suppress(OSError):  # it writes again what had no room, which was told
            items.close()


@contextmanager
def writing(path: Path) -> Generator[None]:
    """Files of a run are read or written within. Raises InvalidRequest, one line, for what fails."""
    try:
        yield
    except OSError as error:
        raise InvalidRequest(f"{path} cannot hold this run: {error.strerror or error}") from None
    except ValueError as error:
        raise InvalidRequest(f"{path} cannot hold this run, its files are damaged: {error}") from None


def _lock(path: Path, items: BinaryIO) -> None:
    try:
        fcntl.flock(items, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"{path}: another run writes there: wait for its end, or choose another directory"
        raise InvalidRequest(message) from None


def _require_equal(path: Path, known: dict[str, Any], mine: dict[str, Any]) -> None:
    for field in mine.keys() | known.keys():
        if (theirs := known.get(field)) != (own := json.loads(json.dumps(mine.get(field)))):
            which = f"whose {field} is {json.dumps(theirs)}, not {json.dumps(own)}"
            if field == "weights":
                which = "of other weights, or with K and V of another dtype or layout"
            raise InvalidRequest(f"{path} holds a run {which}: choose another directory")
