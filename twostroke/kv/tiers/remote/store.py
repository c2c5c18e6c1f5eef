"""The remote tier: pages in a server that speaks Redis' protocol.

Every page is one key, so a page is there or not, and no second command can find half of it. Pages live for some days
after their last use; of one prompt, the deeper ones go first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from twostroke.errors import InvalidRequest, KVError, OutOfPages, PageLost
from twostroke.kv.tiers.counters import TierCounters
from twostroke.kv.tiers.names import Namespace, PageName
from twostroke.kv.tiers.page_format import SEAL_BYTES
from twostroke.kv.tiers.remote.format import PRIVATE, RemoteForm
from twostroke.system.extras import extra
from twostroke.system.user_key import user_key

try:
    with extra("redis", "a remote tier"):
        from twostroke.kv.tiers.remote.connection import Command, Late, Line, Refused, accepted
        from twostroke.kv.tiers.remote.connection_pool import BATCH_KEYS, CALL_S, Endpoint, Open, Trouble
        from twostroke.kv.tiers.remote.key_refresher import Lasting
except InvalidRequest as error:
    raise KVError(str(error)) from None

log = logging.getLogger(__name__)
T = TypeVar("T")

TTL_S = 7 * 86400.0
PRIVATE_TTL_S = 600.0
REFRESH_S = 120.0
SLOWEST = 8e6  # bytes/s; a call with pages may take as long besides
PRIVATE_S = 5.0  # more patience for pages that cannot be computed again
BATCH_BYTES = 8 << 20  # under way at once


class RedisStore:
    """The remote tier of one process; see `tiers.store.Store`."""

    tier = "remote"

    def __init__(self, endpoint: Endpoint, key: bytes, ttl_s: float, private_ttl_s: float, refresh_s: float) -> None:
        self.where, self.traffic = endpoint.where, TierCounters()
        self._endpoint, self._key = endpoint, key
        self._ttl_s, self._private = ttl_s, Lasting(endpoint, private_ttl_s, refresh_s)
        self._forms: dict[Namespace, RemoteForm] = {}
        self._told: dict[str, float] = {}  # when each namespace's model was last told

    @classmethod
    def open(
        cls,
        url: str,
        *,
        ttl_s: float = TTL_S,
        private_ttl_s: float = PRIVATE_TTL_S,
        refresh_s: float = REFRESH_S,
    ) -> RedisStore:
        """The store at a URL. The server need not be there yet.

        Args:
            url: redis://, rediss:// (TLS) or unix://, with options as the package `redis` takes them.
            ttl_s: pages are deleted this long after their last use.
            private_ttl_s: private pages are deleted this long after this process has ended, or stands still.
            refresh_s: how often they are told to stay.

        Raises:
            KVError: the URL is wrong, or there is no key to seal pages with.
        """
        endpoint = Endpoint(url)
        key = user_key(make=True)
        if key is None:
            raise KVError("a remote tier needs the user's key, which cannot be used here: see the warning before")
        return cls(endpoint, key, ttl_s, private_ttl_s, refresh_s)

    @property
    def answering(self) -> bool:
        """Whether the server is asked; it is left alone for a while after failures."""
        return self._endpoint.circuit.closed

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
        form, there = self._form(namespace), 0
        try:
            with self._endpoint.line(CALL_S) as line:
                for start in range(0, len(names), BATCH_KEYS):
                    some = names[start : start + BATCH_KEYS]
                    found = [reply == 1 for reply in line.answers([("EXISTS", form.key(name)) for name in some])]
                    leading = found.index(False) if False in found else len(found)
                    there += leading
                    if leading < len(some):
                        break
        except Trouble as trouble:
            self._skipped(trouble, len(names) - there)
        return there

    def read(self, namespace: Namespace, names: Sequence[PageName], into: Sequence[memoryview], limit_s: float) -> int:
        form, began, count = self._form(namespace), time.perf_counter(), 0
        limit_s = min(limit_s, _patience(len(names) * namespace.page_bytes))
        right: bool | None = True
        try:
            with self._endpoint.line(limit_s) as line:
                for start, stop in _batches(len(names), namespace.page_bytes):
                    line.send([("GET", form.key(name)) for name in names[start:stop]])
                    while count < stop and (right := self._take(form, line, names[count], into[count])):
                        count += 1
                    if not right:
                        break
        except Trouble as trouble:
            self._skipped(trouble, len(names) - count)
        if right is False:
            self._delete([form.key(names[count])])
        if count:
            self.traffic.moved("in", count, count * namespace.page_bytes, time.perf_counter() - began)
        return count

    def write(self, namespace: Namespace, names: Sequence[PageName], pages: Sequence[memoryview]) -> int:
        if not names:
            return 0
        form = self._form(namespace)

        def put(line: Line) -> int:
            return self._put(line, form, names, pages)

        try:
            return self._writing(_patience(sum(map(len, pages))), put)
        except Trouble as trouble:
            self._skipped(trouble, len(names))
            return 0
        except Refused as refused:
            self.traffic.skipped("full" if refused.full else "error", len(names) - refused.before)
            return refused.before

    def touch(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        form = self._form(namespace)
        with suppress(*Trouble, Refused), self._endpoint.line(CALL_S) as line:
            self._stay(line, form, names[::-1])  # the first page is the most recently used
            self._tell_about(line, form)

    # Pages of one value ---------------------------------------------------------------------------------------

    def keep(self, namespace: Namespace, name: PageName, page: memoryview) -> None:
        form, began = self._form(namespace), time.perf_counter()
        key = form.key(name, PRIVATE)
        command = "SET", key, form.value(name, page), "PX", self._private.milliseconds

        def put(line: Line) -> None:
            accepted(line.replies([command]))

        try:
            self._writing(PRIVATE_S + _patience(len(page)), put)
        except Trouble as trouble:
            self._skipped(trouble, 1)
            raise OutOfPages(f"{self.where} does not answer, or is full: no value can go there now") from None
        except Refused as refused:
            self.traffic.skipped("full" if refused.full else "error")
            raise OutOfPages(f"{self.where} takes no value: {self._endpoint.describe(refused)}") from None
        self._private.add(key)
        self.traffic.moved("out", 1, len(page), time.perf_counter() - began)

    def fetch(self, namespace: Namespace, name: PageName, into: memoryview) -> None:
        form, began = self._form(namespace), time.perf_counter()
        right: bool | None = None
        try:
            with self._endpoint.line(PRIVATE_S + _patience(len(into))) as line:
                line.send([("GET", form.key(name, PRIVATE))])
                right = self._take(form, line, name, into)
        except Trouble as trouble:
            self._skipped(trouble, 1)
            raise PageLost(f"{self.where} does not answer, and has pages of this value: try again later") from None
        if not right:
            raise PageLost(f"a page of this value is {'gone' if right is None else 'damaged'} in {self.where}")
        self.traffic.moved("in", 1, len(into), time.perf_counter() - began)

    def discard(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        form = self._form(namespace)
        keys = [form.key(name, PRIVATE) for name in names]
        self._private.remove(keys)
        self._delete(keys)

    def close(self) -> None:
        self._delete(self._private.close())
        self._endpoint.close()

    # ----------------------------------------------------------------------------------------------------------

    def _form(self, namespace: Namespace) -> RemoteForm:
        form = self._forms.get(namespace)
        if form is None:
            form = self._forms[namespace] = RemoteForm.of(namespace, self._key)
        return form

    def _take(self, form: RemoteForm, line: Line, name: PageName, into: memoryview) -> bool | None:
        """The next reply, which should be this page. None: it is not there; False: it is wrong, as others may be."""
        expected = form.header(name)
        header, seal = bytearray(len(expected)), bytearray(SEAL_BYTES)
        parts = [memoryview(header), into, memoryview(seal)]
        size = line.value(parts)
        if size is None:
            return None
        whole = size == sum(map(len, parts)) and form.seal(bytes(header), into) == bytes(seal)
        if whole and bytes(header) == expected:
            return True
        line.trusted = False
        reason = "foreign" if whole else "corrupt"
        self.traffic.skipped(reason)
        log.warning("%s: a page is %s: it is deleted, and computed instead", self.where, reason)
        return False

    def _writing(self, limit_s: float, put: Callable[[Line], T]) -> T:
        """Let `put` write, unless writing has failed before. Raises what it raises."""
        writing = self._endpoint.writing
        ticket = writing.ask()
        if ticket is None:
            raise Open
        try:
            with self._endpoint.line(limit_s) as line:
                done = put(line)
            writing.answered(ticket)
            return done
        except Late:  # too slow to write, though perhaps not to read
            writing.failed(ticket)
            raise
        except Refused as refused:
            if (wait := writing.failed(ticket, at_once=refused.full)) is not None:
                text = "%s takes no pages (%s): nothing is written there for %.0f s"
                log.info(text, self.where, self._endpoint.describe(refused), wait)
            raise
        finally:
            writing.undecided(ticket)  # does nothing if it has been decided

    def _put(self, line: Line, form: RemoteForm, names: Sequence[PageName], pages: Sequence[memoryview]) -> int:
        """Write the pages that are missing, in order. Returns how many leading ones are there. Raises Refused."""
        parents = [_parent(names[0])] if names[0].number else []
        there = self._stay(line, form, [*parents, *names])
        if parents and not there.pop(0):
            return 0
        self._tell_about(line, form)
        missing = [i for i, known in enumerate(there) if not known]
        for start, stop in _batches(len(missing), form.namespace.page_bytes):
            began, some = time.perf_counter(), missing[start:stop]
            for i in some:  # one by one, since a value is a copy of its page
                line.send([self._command(form, names[i], pages[i])])
            replies = [line.reply() for _ in some]
            refused = [isinstance(reply, Refused) for reply in replies]
            new = refused.index(True) if True in refused else len(some)
            written = sum(reply == b"OK" for reply in replies[:new])
            self.traffic.moved("out", written, written * form.namespace.page_bytes, time.perf_counter() - began)
            if new < len(some):
                orphans = [i for i, reply in zip(some[new:], replies[new:], strict=True) if reply == b"OK"]
                if orphans:  # a page is there only with its parent
                    line.replies([("DEL", form.key(names[i])) for i in orphans])
                raise Refused(str(replies[new]), some[new])
        return len(names)

    def _command(self, form: RemoteForm, name: PageName, page: memoryview) -> Command:
        return "SET", form.key(name), form.value(name, page), "NX", "PX", self._milliseconds(name)

    def _milliseconds(self, name: PageName) -> int:
        """How long a page stays after its last use."""
        return round(1e3 * max(self._ttl_s / 2, self._ttl_s - name.number))

    def _stay(self, line: Line, form: RemoteForm, names: Sequence[PageName]) -> list[bool]:
        """Let pages live on. Returns which of them are there. Raises Refused."""
        commands = [("PEXPIRE", form.key(name), self._milliseconds(name)) for name in names]
        return [reply == 1 for reply in accepted(line.replies(commands))]

    def _tell_about(self, line: Line, form: RemoteForm) -> None:
        """Name the model, for people, now and then."""
        now = time.monotonic()
        if now - self._told.get(form.scope, float("-inf")) > self._ttl_s / 4:
            line.replies([("SET", form.about_key, form.about_value, "PX", round(1e3 * self._ttl_s))])
            self._told[form.scope] = now

    def _delete(self, keys: Sequence[bytes]) -> None:
        for start in range(0, len(keys), BATCH_KEYS):
            with suppress(*Trouble), self._endpoint.line(CALL_S) as line:
                line.replies([("DEL", *keys[start : start + BATCH_KEYS])])

    def _skipped(self, trouble: Exception, pages: int) -> None:
        reason = "open" if isinstance(trouble, Open) else "late" if isinstance(trouble, Late) else "error"
        self.traffic.skipped(reason, pages)


def _parent(name: PageName) -> PageName:
    return PageName(name.parent, b"", name.number - 1, b"")


def _patience(size: int) -> float:
    """Seconds that a call with `size` bytes of pages may take."""
    return CALL_S + size / SLOWEST


def _batches(count: int, page_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of pages that are under way together."""
    most = max(1, min(BATCH_BYTES // page_bytes, BATCH_KEYS))
    return ((start, min(start + most, count)) for start in range(0, count, most))
