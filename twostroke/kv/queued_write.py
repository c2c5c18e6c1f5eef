"""Blocks or a snapshot on their way to a store: they are looked up when their turn comes."""

from twostroke.kv.tiers.admission import Admission
from twostroke.kv.tiers.names import Namespace, PageName
from twostroke.kv.tiers.store import Store
from twostroke.kv.write_back import WriteBack, WriteBackBlock


class QueuedWrite:
    """Some consecutive blocks of a prompt, or the parts of a snapshot, that wait to be written to a store."""

    def __init__(
        self,
        write_back: WriteBack,
        namespace: Namespace,
        store: Store,
        admission: Admission,
        names: list[PageName],
        offered: list[WriteBackBlock],
        group: int,
    ) -> None:
        """`group`: how many of them are copied at once."""
        self._write_back, self._namespace, self._store, self._admission = write_back, namespace, store, admission
        self._names, self._offered, self._group = names, offered, group
        self._written = 0
        self.pages, self.size = len(names), len(names) * namespace.page_bytes

    def write(self) -> None:
        """Write copies: a store that hangs keeps no frame, and no index waits for it."""
        if self._names[0].of_state and self._store.find(self._namespace, self._names) == self.pages:
            self._written = self.pages  # another process was quicker
            return
        for start in range(0, self.pages, self._group):
            some = self._offered[start : start + self._group]
            copies = self._write_back.read(some)
            names = self._names[start : start + len(copies)]
            self._written += self._store.write(self._namespace, names, copies) if copies else 0
            if len(copies) < len(some):
                self._store.counters.skipped("queue", self.pages - start - len(copies))
            if self._written < start + len(some):
                return
        if self._names[0].of_state:
            self._store.counters.snapshot("out")

    def drop(self) -> None:
        self._offered = []
        self._admission.missing(self._names[self._written :])
