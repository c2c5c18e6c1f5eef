"""What has to end before Python frees memory at the end of the process.

Daemon threads go on while the main thread ends: Python frees objects under a kernel that still reads them, and the C
library destroys its static objects. So whoever lets other threads compute ends that in a method that is called here.
"""

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

log = logging.getLogger(__name__)
STAY_S = 10.0  # longer than a process needs for its end, unless it waits for one of its threads
_methods: list[weakref.WeakMethod[Callable[[], None]]] = []  # in order of registration
_ending_thread: int | None = None  # the thread that ends the process, once it does


def call_at_exit(method: Callable[[], None]) -> None:
    """Call a bound method when the process ends, unless its object is gone by then.

    The last one registered is called first, and all of them before functions of `atexit` and finalizers of `weakref`
    that exist by now. Non-daemon threads have ended by then.
    """
    _methods.append(weakref.WeakMethod(method, _methods.remove))
    atexit.unregister(_call_all)
    atexit.register(_call_all)


def _call_all() -> None:
    global _ending_thread
    _ending_thread = threading.get_ident()
    for reference in reversed(_methods[:]):
        if (method := reference()) is not None:
            try:
                method()
            except Exception:
                log.exception("the process ends while a model is in use")


def _forget_parent() -> None:
    """Threads of the parent do not compute in a forked child, nor does its end concern it."""
    global _ending_thread
    _ending_thread = None
    _methods.clear()


os.register_at_fork(after_in_child=_forget_parent)


def stay_if_process_ends() -> None:
    """If the process is ending, stay until it is gone, except in the thread that ends it.

    For daemon threads that would otherwise raise an error that nobody can handle any more. It returns after `STAY_S`:
    then a function of `atexit` waits for the thread, and the caller has to raise that error.
    """
    if _ending_thread not in (None, threading.get_ident()):
        time.sleep(STAY_S)


def free_with(owner: object, free: Callable[..., object], *args: object) -> None:
    """Call `free(*args)` when `owner` is gone, but not at the end of the process: a daemon thread may use it then."""
    weakref.finalize(owner, free, *args).atexit = False


class ExitLock:
    """A lock for what other threads compute outside of an engine's steps. The end of the process keeps it for good."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # the thread that ends the process may still compute
        call_at_exit(self.__enter__)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
