"""Which of a model's pages are in a directory, as it changes: by this process, by others, and between their lives."""

import os
import time
from contextlib import suppress

from twostroke.kv.tiers.disk import files
from twostroke.kv.tiers.disk.directory import Directory
from twostroke.kv.tiers.names import KEY_BYTES, PageName
from twostroke.kv.tiers.page_format import PageFormat

SETTLED_NS = 100_000_000  # a directory's time is that of its last change, give or take a tick


class DirectoryWatch:
    """Looks at the files of one model. A page counts if all before it in its prompt are there, so it can be used.

    Only headers are read, which their names prove to be right. Whether the entries behind one are right is seen when
    they are read; a page whose entries are damaged is deleted then. Snapshots of states are no pages here.
    """

    def __init__(self, directory: Directory, page_format: PageFormat) -> None:
        self._folder, self._namespace = f"{directory.pages}/{page_format.scope}", page_format.namespace
        self._root = page_format.namespace.digest.ljust(KEY_BYTES, b"\0")
        self._files: dict[str, PageName | None] = {}  # by name; None: it is no page of this model
        self._there: dict[bytes, PageName] = {}
        self._time: int | None = None  # the directory's, when it was last looked at

    def changes(self) -> tuple[list[PageName], list[PageName]]:
        """The pages that have come and gone since the last look; each page comes after the one before it.

        Raises OSError.
        """
        try:
            time_ns = os.stat(self._folder).st_mtime_ns
            if time_ns == self._time:
                return [], []
            self._time = time_ns if time.time_ns() - time_ns > SETTLED_NS else None
            names = set(os.listdir(self._folder))
        except FileNotFoundError:  # nothing was written yet
            names = set[str]()
        for name in self._files.keys() - names:
            del self._files[name]
        for name in names - self._files.keys():
            with suppress(FileNotFoundError):
                self._files[name] = self._stated(name)
        before, self._there = self._there, self._usable()
        came = [page for key, page in self._there.items() if key not in before]
        return came, [page for key, page in before.items() if key not in self._there]

    def _usable(self) -> dict[bytes, PageName]:
        pages = sorted((page for page in self._files.values() if page is not None), key=lambda page: page.number)
        usable = dict[bytes, PageName]()
        for page in pages:
            if page.parent in usable if page.number else page.parent == self._root:
                usable[page.key] = page
        return usable

    def _stated(self, name: str) -> PageName | None:
        """What a file says that it is, if its name proves it. Raises OSError."""
        found = files.peek(f"{self._folder}/{name}")
        if found is None or found.namespace != self._namespace.digest:
            return None
        right = found.name.right and not found.name.of_state and found.name.key.hex() == name
        return found.name if right else None
