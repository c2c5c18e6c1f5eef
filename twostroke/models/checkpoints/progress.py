"""The progress of a download, measured by the bytes in its directory."""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

# (stage, bytes done, bytes in total). During a download it is called from another thread, one call at a time.
Progress = Callable[[str, int, int], None]

POLL_SECONDS = 0.2


def one_line(text: str) -> str:
    """The first line that is not blank, cut at 300 characters."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "")


@contextmanager
def watched(directory: Path, report: Callable[[int], None]) -> Generator[None]:
    """Reports the bytes of all files in a directory every `POLL_SECONDS`."""
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
            except OSError:  # moved in the meantime
                continue
    return total
