"""What the server has asked an engine's process to run, until it answers."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from twostroke.server.engine_process.messages import Ask, AskReply
from twostroke.system.futures import settle


def refuse_all(results: "Iterable[Future[Any]]", error: Exception) -> None:
    """End asks that will have no answer."""
    for result in results:
        settle(result, None, error)


class PendingAsks:
    """All of them. The owner's lock guards it."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[Ask, Future[Any]]] = {}
        self._next = 0

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[Ask]:
        return (ask for ask, _ in self._pending.values())

    def add(self, action: Callable[[Any], Any], *, between_steps: bool) -> "tuple[Ask, Future[Any]]":
        """A new one, and what will be its result."""
        ask, result = Ask(self._next, action, between_steps), Future[Any]()
        self._next += 1
        self._pending[ask.id] = ask, result
        return ask, result

    def pop(self, reply: AskReply) -> "Future[Any] | None":
        """The result that a reply is for, unless it was given up."""
        return self._pending.pop(reply.id, (None, None))[1]

    def clear(self) -> "list[Future[Any]]":
        """Forget all, and return their results."""
        gone = [result for _, result in self._pending.values()]
        self._pending.clear()
        return gone
