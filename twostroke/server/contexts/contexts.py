"""All contexts of a server, by name: until they expire or are deleted, or without a disk tier the server ends."""

import asyncio
import time
from collections.abc import Generator
from contextlib import contextmanager

from twostroke.server.contexts.context import Context
from twostroke.server.contexts.saved import SavedContexts
from twostroke.server.contexts.schemas import ContextBody
from twostroke.server.errors import ApiError
from twostroke.server.tenants.tenant import current_tenant

LONG_S = 10 * 365 * 86400.0
Key = tuple[str, str]  # whose context it is, and its name


class Contexts:
    """At most `most_bytes` are held. Nothing is dropped to make room: what a client has named is there until it ends.

    A request that has begun keeps what it needs of a context that is deleted or expires meanwhile.

    Every method belongs to the event loop's thread.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most, self._saved = most_bytes, SavedContexts(None)
        self._held: dict[Key, tuple[Context, asyncio.TimerHandle]] = {}
        self._arriving = 0  # bytes of those that are being computed

    @property
    def all(self) -> list[Context]:
        """The caller's contexts that have not expired, in the order in which they were made."""
        space = current_tenant().space
        return [one for one, _ in self._held.values() if not one.expired and one.owner == space]

    @property
    def size(self) -> int:
        """Bytes that are held, and those that will be. Pages that several contexts share count once."""
        contexts = [context for context, _ in self._held.values()]
        pages = {page for context in contexts for page in context.pages}
        page_bytes = next((context.kv.page_bytes for context in contexts if context.kv is not None), 0)
        return self._arriving + len(pages) * page_bytes + sum(context.body_bytes for context in contexts)

    def get(self, name: str) -> Context:
        """Raises ApiError (404) for one that does not live."""
        context, _ = self._held.get(_own(name), (None, None))
        if context is None or context.expired:
            message = f"there is no context {name!r:.140}: it was deleted, has expired, or was made before a restart"
            raise ApiError(404, message, param="context", code="context_not_found")
        return context

    def held(self, name: str | None) -> Context | None:
        """The living context of this name that has its KV; None if there is none."""
        context, _ = self._held.get(_own(name or ""), (None, None))
        return context if context is not None and context.kv is not None and not context.expired else None

    def known(self, name: str, body: ContextBody) -> Context | None:
        """A context of this name that is the same as the body's; None if there is none.

        Raises ApiError (409) if the name stands for another.
        """
        context, _ = self._held.get(_own(name), (None, None))
        if context is None or context.expired:
            return None
        if context.body.content != body.content:
            message = f"the name {name} stands for another context: delete it first, or choose another name"
            raise ApiError(409, message, param="name", code="context_exists")
        return context

    @contextmanager
    def room(self, size: int) -> Generator[None]:
        """Room for a context that is being computed, until it is put. Raises ApiError (413)."""
        left = self._most - self.size
        if size > left:
            message = (
                f"the context takes {size:,} bytes, and of the {self._most:,} for contexts {max(0, left):,} are left: "
                f"delete others, or serve with a larger --max-context-bytes"
            )
            raise ApiError(413, message, code="contexts_full")
        self._arriving += size
        try:
            yield
        finally:
            self._arriving -= size

    def put(self, context: Context) -> None:
        """Hold a context until it expires, in place of an earlier one of its name."""
        self._saved.save(context)
        self._hold(context)

    def restore(self, saved: SavedContexts) -> None:
        """Save from now on, and take up those of before a restart: their KV is loaded or computed when they are asked
        for."""
        self._saved = saved
        for context in saved.load():
            self._hold(context)

    def _hold(self, context: Context) -> None:
        key = context.owner, context.name
        self._drop(key)
        seconds = min(context.expires - time.time(), LONG_S)  # one that is pinned stays as long as the server
        timer = asyncio.get_running_loop().call_later(seconds, self._forget, key)
        self._held[key] = context, timer

    def delete(self, name: str) -> None:
        """Raises ApiError (404) for one that does not live."""
        self.get(name)
        self._forget(_own(name))

    def clear(self) -> None:
        """Drop all, as at the server's end: what is saved stays."""
        for key in list(self._held):
            self._drop(key)

    def _forget(self, key: Key) -> None:
        self._drop(key)
        self._saved.delete(*key)

    def _drop(self, key: Key) -> None:
        if key in self._held:
            _, timer = self._held.pop(key)
            timer.cancel()


def _own(name: str) -> Key:
    return current_tenant().space, name
