"""A time in which an engine has no process, since nobody uses its model."""

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

from twostroke.errors import EngineStopped, TwostrokeError
from twostroke.system.futures import settle

T = TypeVar("T")


class Rest:
    """It is true from `begin` until the model is open again."""

    def __init__(self) -> None:
        self._begun: Future[None] | None = None
        self._calls: SimpleQueue[Future[None] | None] = SimpleQueue()

    def __bool__(self) -> bool:
        return self._begun is not None

    def begin(self) -> "Future[None]":
        """The process is to end. The result is there once it has."""
        self._begun = Future()
        return self._begun

    def wake(self) -> "Future[None]":
        """Ask for the model. The result raises why it cannot be opened; then the rest goes on."""
        woken: Future[None] = Future()
        self._calls.put(woken)
        return woken

    def stop(self) -> None:
        """The server ends."""
        self._calls.put(None)

    def last(self, open_again: Callable[[], T]) -> T | None:
        """The process has ended: wait until the model is wanted, and open it. None once the server ends."""
        begun = self._begun
        assert begun is not None
        begun.set_result(None)
        while (woken := self._calls.get()) is not None:
            try:
                opened = open_again()
            except (TwostrokeError, OSError) as error:
                settle(woken, None, error)
            else:
                self._begun = None
                settle(woken, None, None)
                return opened
        while not self._calls.empty():
            settle(self._calls.get() or Future(), None, EngineStopped("the engine was stopped"))
        return None
