"""The remote tier: pages in a server that speaks Redis' protocol.

Every page is one key, so a page is there or not, and no second command can find half of it. Pages live for some days
after their last use; of one prompt, the deeper ones go first.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from typing import TypeVar

from twostroke.errors import KVError, OutOfPages, PageLost
from twostroke.kv.tiers.counters import TierCounters
from twostroke.kv.tiers.names import Namespace, PageName
from twostroke.kv.tiers.page_format import HEADER_BYTES, SEAL_BYTES
from twostroke.kv.tiers.remote.connection import CallTimedOut, ErrorReply, RedisConnection, accepted
from twostroke.kv.tiers.remote.connection_pool import BATCH_KEYS, CALL_S, UNAVAILABLE, CircuitOpen, ConnectionPool
from twostroke.kv.tiers.remote.format import PRIVATE, RemotePageFormat
from twostroke.kv.tiers.remote.key_refresher import KeyRefresher
from twostroke.kv.tiers.remote.prompt_pages import PromptPages, batches
from twostroke.system.user_key import user_keys

log = logging.getLogger(__name__)
T = TypeVar("T")

TTL_S = 7 * 86400.0
PRIVATE_TTL_S = 600.0
REFRESH_S = 120.0
MIN_BYTES_PER_S = 8e6  # bytes/s; a call with pages may take as long besides
PRIVATE_S = 5.0  # more patience for pages that cannot be computed again


class RedisStore:
    """The remote tier of one process; see `tiers.store.Store`."""

    tier = "remote"

    def __init__(
        self,
        pool: ConnectionPool,
        keys: Sequence[bytes],
        ttl_s: float,
        private_ttl_s: float,
        refresh_s: float,
        compressed: bool,
    ) -> None:
        self.where, self.counters = pool.where, TierCounters()
        self.connections = pool
        self._prompt_pages = PromptPages(self.counters, ttl_s)
        self.refresher = KeyRefresher(pool, private_ttl_s, refresh_s)
        self.page_format = cache(lambda namespace: RemotePageFormat.of(namespace, keys, compressed))

    @classmethod
    def open(
        cls,
        url: str,  # redis://, rediss:// (TLS) or unix://, with options as the package `redis` takes them
        *,
        ttl_s: float = TTL_S,  # pages are deleted this long after their last use
        # private pages are deleted this long after this process has ended, or stands still
        private_ttl_s: float = PRIVATE_TTL_S,
        refresh_s: float = REFRESH_S,  # how often they are told to stay
        compressed: bool = False,  # whether pages are written compressed
    ) -> "RedisStore":
        """The store at a URL. The server need not be there yet.

        Raises:
            KVError: the URL is wrong, or there is no key to seal pages with.
        """
        pool = ConnectionPool(url)
        keys = user_keys(make=True)
        if not keys:
            raise KVError("a remote tier needs the user's key, which cannot be used here: see the warning before")
        return cls(pool, keys, ttl_s, private_ttl_s, refresh_s, compressed)

    @property
    def answering(self) -> bool:
        """Whether the server is asked; it is left alone for a while after failures."""
        return self.connections.circuit.closed

    @property
    def used_bytes(self) -> int | None:
        """Not known: others write there too."""
        return None

    @property
    def most_bytes(self) -> int | None:
        """Not known: the server decides."""
        return None

    # Pages of prompts -----------------------------------------------------------------------------------------

    def find(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        return self._leading(namespace, names, there=True)

    def find_any(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        return self._leading(namespace, names, there=False)

    def _leading(self, namespace: Namespace, names: Sequence[PageName], there: bool) -> int:
        """How many leading pages are there, or are not. What the server does not say is not there."""
        page_format, count = self.page_format(namespace), 0
        try:
            with self.connections.connection(CALL_S) as connection:
                for start in range(0, len(names), BATCH_KEYS):
                    some = names[start : start + BATCH_KEYS]
                    replies = connection.answers([("EXISTS", *page_format.keys(one)) for one in some])
                    leading = next((i for i, reply in enumerate(replies) if bool(reply) != there), len(some))
                    count += leading
                    if leading < len(some):
                        break
        except UNAVAILABLE as trouble:
            self._skipped(trouble, len(names) - count)
            return count if there else len(names)
        return count

    def read(self, namespace: Namespace, names: Sequence[PageName], into: Sequence[memoryview], limit_s: float) -> int:
        began, own = time.perf_counter(), self.page_format(namespace)
        until = began + min(limit_s, _patience(len(names) * namespace.page_bytes))
        formats, count, fruitless = [own, *own.others], 0, 0
        while fruitless < len(formats) and count < len(names):  # a run of pages under one key, then under the next
            page_format, left = formats[0], until - time.perf_counter()
            new = self._read_run(page_format, names[count:], into[count:], left)
            count, fruitless = count + new, 1 if new else fruitless + 1
            formats.append(formats.pop(0))
        if count:
            self.counters.moved("in", count, count * namespace.page_bytes, time.perf_counter() - began)
        return count

    def _read_run(
        self, page_format: RemotePageFormat, names: Sequence[PageName], into: Sequence[memoryview], limit_s: float
    ) -> int:
        """Read leading pages under one key. Returns how many are right."""
        right, count = None, 0
        try:
            with self.connections.connection(limit_s) as connection:
                for start, stop in batches(len(names), page_format.namespace.page_bytes):
                    connection.send([("GET", page_format.key(name)) for name in names[start:stop]])
                    while count < stop and (right := self._take(page_format, connection, names[count], into[count])):
                        count += 1
                    if not right:
                        break
        except UNAVAILABLE as trouble:
            self._skipped(trouble, len(names) - count)
        if right is False:
            self._delete([page_format.key(names[count])])
        return count

    def write(self, namespace: Namespace, names: Sequence[PageName], pages: Sequence[memoryview]) -> int:
        if not names:
            return 0
        page_format = self.page_format(namespace)

        def put(connection: RedisConnection) -> int:
            return self._prompt_pages.put(connection, page_format, names, pages)

        try:
            return self._writing(_patience(sum(map(len, pages))), put)
        except UNAVAILABLE as trouble:
            self._skipped(trouble, len(names))
            return 0
        except ErrorReply as refused:
            self.counters.skipped("full" if refused.full else "error", len(names) - refused.before)
            return refused.before

    def touch(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        page_format = self.page_format(namespace)
        with suppress(*UNAVAILABLE, ErrorReply), self.connections.connection(CALL_S) as connection:
            self._prompt_pages.stay(connection, page_format, names[::-1])  # the first page is the most recently used
            self._prompt_pages.announce(connection, page_format)

    # Pages of one value ---------------------------------------------------------------------------------------

    def keep(self, namespace: Namespace, name: PageName, page: memoryview) -> None:
        page_format, began = self.page_format(namespace), time.perf_counter()
        key = page_format.key(name, PRIVATE)
        command = "SET", key, page_format.value(name, page), "PX", self.refresher.milliseconds

        def put(connection: RedisConnection) -> None:
            accepted(connection.replies([command]))

        try:
            self._writing(PRIVATE_S + _patience(len(page)), put)
        except UNAVAILABLE as trouble:
            self._skipped(trouble, 1)
            raise OutOfPages(f"{self.where} does not answer, or is full: no value can go there now") from None
        except ErrorReply as refused:
            self.counters.skipped("full" if refused.full else "error")
            raise OutOfPages(f"{self.where} takes no value: {self.connections.describe(refused)}") from None
        self.refresher.add(key)
        self.counters.moved("out", 1, len(page), time.perf_counter() - began)

    def fetch(self, namespace: Namespace, name: PageName, into: memoryview) -> None:
        page_format, began = self.page_format(namespace), time.perf_counter()
        right: bool | None = None
        try:
            with self.connections.connection(PRIVATE_S + _patience(len(into))) as connection:
                connection.send([("GET", page_format.key(name, PRIVATE))])
                right = self._take(page_format, connection, name, into)
        except UNAVAILABLE as trouble:
            self._skipped(trouble, 1)
            raise PageLost(f"{self.where} does not answer, and has pages of this value: try again later") from None
        if not right:
            raise PageLost(f"a page of this value is {'gone' if right is None else 'damaged'} in {self.where}")
        self.counters.moved("in", 1, len(into), time.perf_counter() - began)

    def discard(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        page_format = self.page_format(namespace)
        keys = [page_format.key(name, PRIVATE) for name in names]
        self.refresher.remove(keys)
        self._delete(keys)

    def close(self) -> None:
        self._delete(self.refresher.close())
        self.connections.close()

    # ----------------------------------------------------------------------------------------------------------

    def _take(
        self, page_format: RemotePageFormat, connection: RedisConnection, name: PageName, into: memoryview
    ) -> bool | None:
        """The next reply, which should be this page. None: it is not there; False: it is wrong, as others may be."""
        ahead = HEADER_BYTES + len(name.tokens)

        def parts_of(size: int) -> list[memoryview]:
            payload = page_format.room(size - ahead - SEAL_BYTES, into)
            return [] if payload is None else [memoryview(bytearray(ahead)), payload, memoryview(bytearray(SEAL_BYTES))]

        parts = connection.value(parts_of)
        if parts is None:
            return None
        whole = False
        if parts:
            header, payload, seal = bytes(parts[0]), parts[1], bytes(parts[2])
            whole = page_format.seal(header, payload) == seal
            if whole and header == page_format.header(name, len(payload)) and page_format.unpack(payload, into):
                return True
        connection.trusted = False
        reason = "foreign" if whole else "corrupt"
        self.counters.skipped(reason)
        log.warning("%s: a page is %s: it is deleted, and computed instead", self.where, reason)
        return False

    def _writing(self, limit_s: float, put: Callable[[RedisConnection], T]) -> T:
        """Let `put` write, unless writing has failed before. Raises what it raises."""
        writing = self.connections.writing
        ticket = writing.acquire()
        if ticket is None:
            raise CircuitOpen
        try:
            with self.connections.connection(limit_s) as connection:
                done = put(connection)
            writing.succeeded(ticket)
            return done
        except CallTimedOut:  # too slow to write, though perhaps not to read
            writing.failed(ticket)
            raise
        except ErrorReply as refused:
            if (wait := writing.failed(ticket, at_once=refused.full)) is not None:
                text = "%s takes no pages (%s): nothing is written there for %.0f s"
                log.info(text, self.where, self.connections.describe(refused), wait)
            raise
        finally:
            writing.abandon(ticket)  # does nothing if it has been decided

    def _delete(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), BATCH_KEYS):
            with suppress(*UNAVAILABLE), self.connections.connection(CALL_S) as connection:
                connection.replies([("DEL", *keys[start : start + BATCH_KEYS])])

    def _skipped(self, trouble: Exception, pages: int) -> None:
        reason = (
            "open" if isinstance(trouble, CircuitOpen) else "late" if isinstance(trouble, CallTimedOut) else "error"
        )
        self.counters.skipped(reason, pages)


def _patience(size: int) -> float:
    """Seconds that a call with `size` bytes of pages may take."""
    return CALL_S + size / MIN_BYTES_PER_S
