"""How far a download is: told by looking at what has arrived, whoever writes it."""

import os
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

# (stage, bytes done, bytes in all). While a download runs it is called from another thread, one call at a time.
Progress = Callable[[str, int, int], None]

POLL_SECONDS = 0.2


def one_line(text: str) -> str:
    """The first line that says something, not too long."""
    return next((line.strip()[:300] for line in text.splitlines() if line.strip()), "")


@contextmanager
def watched(directory: Path, report: Callable[[int], None]) -> Generator[None]:
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
