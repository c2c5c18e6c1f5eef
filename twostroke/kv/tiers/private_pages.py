"""Private pages in a store: kept and read by the caller, deleted by a thread, because finalizers must not wait."""

import logging
import threading
import weakref
from queue import Empty, SimpleQueue

from twostroke.kv.tiers.names import Namespace, PageName, private_name
from twostroke.kv.tiers.store import Store
from twostroke.system.interrupts import DeferredInterrupts

log = logging.getLogger(__name__)
Done = SimpleQueue[None]  # not an Event: Ctrl-C in the thread that waits for one may leave its lock held
Task = PageName | Done | None  # a page to delete; what to tell when all before it is done; the end


class PrivatePages:
    """The private pages of one pool in one store."""

    def __init__(self, store: Store, namespace: Namespace) -> None:
        self.store, self.namespace = store, namespace
        self._tasks: SimpleQueue[Task] = SimpleQueue()
        self.thread: threading.Thread | None = None
        self._lock = threading.Lock()
        weakref.finalize(self, self._tasks.put, None)

    def keep(self, page: memoryview) -> PageName:
        """Write a page, and return its name. Raises OutOfPages."""
        with DeferredInterrupts(), self._lock:  # a thread whose start is cut may never begin
            if self.thread is None or not self.thread.is_alive():  # a forked process has no thread yet
                tasks = self.store, self.namespace, self._tasks
                self.thread = threading.Thread(target=_delete, args=tasks, name="tier-deletions", daemon=True)
                self.thread.start()
        name = private_name()
        self.store.keep(self.namespace, name, page)
        return name

    def fetch(self, name: PageName, into: memoryview) -> None:
        """Read a page. Raises PageLost."""
        self.store.fetch(self.namespace, name, into)

    def forget(self, name: PageName) -> None:
        """Delete a page soon. Never waits, and may be called from a finalizer."""
        self._tasks.put(name)

    def settle(self, limit_s: float) -> bool:
        """Wait until all pages forgotten so far are deleted. Returns False if that takes longer."""
        if self.thread is None:
            return True
        done = Done()
        self._tasks.put(done)
        try:
            done.get(timeout=limit_s)
        except Empty:
            return False
        return True


def _delete(store: Store, namespace: Namespace, tasks: SimpleQueue[Task]) -> None:
    """The thread: it holds the store, not the pool."""
    while True:
        batch = [tasks.get()]
        try:
            while len(batch) < 256:
                batch.append(tasks.get_nowait())
        except Empty:
            pass
        names = [task for task in batch if isinstance(task, PageName)]
        try:
            if names:
                store.discard(namespace, names)
        except Exception:  # one failure must not keep all later pages
            log.exception("%d pages could not be deleted in %s", len(names), store.where)
        for task in batch:
            if isinstance(task, SimpleQueue):
                task.put(None)
        if None in batch:
            return
