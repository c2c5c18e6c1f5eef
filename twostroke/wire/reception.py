"""The receiver's side of one transfer."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from twostroke.errors import KVError
from twostroke.kv import header as headers
from twostroke.kv import spans
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.kv.header import Header
from twostroke.kv.pool import PagePool
from twostroke.wire import form
from twostroke.wire.channel import Channel, Message, WireError
from twostroke.wire.checks import Checks, Digesting
from twostroke.wire.checksum import is_right
from twostroke.wire.form import Told
from twostroke.wire.handle import Handle
from twostroke.wire.landing import Landing
from twostroke.wire.surroundings import HERE, Surroundings
from twostroke.wire.transport import Transport

log = logging.getLogger(__name__)

STALL_S = 10.0  # seconds in which a sender gives a sign of life
REFUSED = "the value does not fit here"
LOST_S = 60.0  # seconds in which a sender stops after the network between both has failed
END_S = 1.0  # seconds in which a sender stops once this side has turned away


Ended = Callable[["Reception"], None]


class Reception:
    """A value on its way into a pool: claimed, granted, filled, verified, and attached at last.

    Nothing of it is visible until all of it is there and right.

    Attributes:
        identity: of the sender's model.
        bytes_received: bytes of K and V so far.
        moving_s: seconds in which the sender wrote them; it waited for the rest of the time.
    """

    def __init__(
        self, pool: PagePool, transport: Transport, digesting: Digesting, until: float, around: Surroundings = HERE
    ) -> None:
        """`until`: on the monotonic clock, when it has to be there."""
        self._pool, self._transport, self._until, self._around = pool, transport, until, around
        self.identity = ""
        self.bytes_received, self.moving_s = 0, 0.0
        self._channel: Channel | None = None
        self._landing: Landing | None = None
        self._turned_away = self._ended = self._closed = False
        self._returning = 0  # pages that the engine expects back
        self._pages = False  # whether pages come as they are
        self._told: Told | None = None
        self._come: set[int] = set()  # numbers of the pages that are there
        self._num_entries = 0
        self._checks = Checks(digesting)
        self._lock = threading.Lock()

    def turn_away(self) -> None:
        """Nobody wants it any more. From any thread; never waits."""
        with self._lock:
            self._turned_away = True
            channel, landing = self._channel, self._landing
        if landing is not None:
            self._expect(len(landing.pages))
        if channel is not None and self._transport.late:
            channel.hang_up()
        elif channel is not None:
            channel.shut()

    @property
    def num_quarantined(self) -> int:
        landing = self._landing
        return len(landing.pages) if landing is not None and self._ended else 0

    def open(self, handle: Handle, secret: bytes, extend: dict[str, Any] | None) -> None:
        """Connect and claim, or ask for entries after those that are here. Raises WireError."""
        channel = Channel.connect(handle.address, secret, around=self._around)
        with self._lock:
            self._channel, turned_away = channel, self._turned_away
        if turned_away:
            raise WireError("nobody wants it any more")
        pool = self._pool
        channel.send(
            "claim" if extend is None else "extend",
            lease=handle.lease,
            incarnation=handle.incarnation,
            geometry=pool.geometry.fingerprint,
            page_size=pool.page_size,
            layout=pool.memory.layout,
            transport=self._transport.name,
            machine=channel.machine,
            **self._transport.claim(),
            **(extend or {}),
        )

    def accept_terms(self, identity: str | None, convert: bool) -> None:
        """Check what the sender says of its value, and reserve room. Raises KVError."""
        terms = self._message()
        self.identity, self._pages = terms["identity"], terms["pages"]
        own, about = self._pool.geometry, terms["header"]
        same = about == form.without_entries(self._pool)  # as a rule; then there is nothing to read
        self._theirs = own if same else _decoded(about.encode(), self._open).geometry
        if identity is not None and identity != self.identity:
            raise KVError("the value is of another model (or another kernels' variant): its identity differs")
        if not self._pages and not convert:
            own.require(self._theirs, REFUSED)
            raise KVError(f"{REFUSED}: its pages have another size or layout")
        own.require(replace(self._theirs, kv_dtype=own.kv_dtype), REFUSED)
        self._landing = Landing(self._pool)
        self._grant(terms["expected"] if self._pages else 0)

    def take(self, release: bool) -> tuple[KVCache, Queries, Any]:
        """Receive all of it. Returns the value, the queries of its last entries, and what was sent along."""
        while (message := self._message())["kind"] != "done":
            if message["kind"] == "pages":
                self._fill(message)
            elif message["kind"] == "entries":
                self._keep_entries(message)
            elif message["kind"] == "value":
                self._told = self._read(message)
            elif message["kind"] == "more":
                self._grant(message["count"])
        self.moving_s = float(message["moving_s"])
        if (told := self._told) is None:
            raise WireError(f"{self._open.peer} did not say what the value is made of")
        kv = self._attached(told)
        try:
            self._open.send("received", release=release)
        except WireError as error:  # it is here all the same; the lease ends by itself
            log.info("a sender did not hear that its value was received: %s", error)
        return kv, told.queries, told.state

    def end(self, ended: Ended) -> None:
        """Close the channel, and free what is reserved once nothing can be written there any more.

        `ended` is called then: now, or by a thread that waits for a sender that does not stop.
        """
        self._ended = True
        self._checks.close()
        channel, landing = self._channel, self._landing
        if channel is not None and landing is not None and landing.pages and self._transport.late:
            self._expect(len(landing.pages))
            channel.hang_up()
            if not self._stopped(channel, END_S):
                log.warning("%s does not stop: %d pages are in quarantine", channel.peer, len(landing.pages))
                self._around.start("wire quarantine", partial(self._wait, channel, ended))
                return
        self._close(ended)

    def _stopped(self, channel: Channel, limit_s: float) -> bool:
        try:
            return channel.wait_for_end(limit_s)
        except WireError:
            return False

    def _wait(self, channel: Channel, ended: Ended) -> None:
        try:
            while not channel.wait_for_end(LOST_S):
                self._expect(0)  # it does not answer, and it lives: whoever waits for room has waited long enough
        except WireError:  # the sender learns of it too, and stops
            self._around.sleep(LOST_S)
        self._close(ended)

    def _close(self, ended: Ended) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._landing is not None:
            self._landing.free()
            self._landing = None
        self._closed = True
        self._expect(0)
        ended(self)

    def _expect(self, pages: int) -> None:
        """Let the engine know that so many pages come back soon: it does not end an answer for want of them."""
        with self._pool.lock:
            pages = 0 if self._closed else pages
            self._pool.num_returning += pages - self._returning
            self._returning = pages

    # Messages ---------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> Channel:
        assert self._channel is not None
        return self._channel

    def _left(self) -> float:
        if (left := self._until - self._around.now()) <= 0 or self._turned_away:
            raise WireError("nobody wants it any more" if self._turned_away else "the value did not come in time")
        return min(STALL_S, left)

    def _message(self) -> Message:
        message = self._open.receive(self._left())
        if message["kind"] == "gone":
            raise WireError(f"{self._open.peer} does not have the value: {message['why']}")
        return message

    def _grant(self, count: int) -> None:
        landing = self._landing
        assert landing is not None
        places = self._transport.places(landing.reserve(count)) if count else []
        self._open.send("grant", generation=landing.generation, places=places)

    def _fill(self, message: Message) -> None:
        landing, channel = self._landing, self._open
        assert landing is not None
        numbers, digests = message["numbers"], message["digests"]
        if message["generation"] != landing.generation or max(numbers) >= len(landing.pages):
            raise WireError(f"{channel.peer} sent pages that it was not asked for")
        with landing.filling(numbers) as views:
            if message["inline"]:
                channel.fill(views, self._left())
            self._checks.add(numbers, views, digests, partial(self._transport.arrived, message["tag"]))
        self._come.update(numbers)
        self.bytes_received += len(numbers) * self._pool.page_bytes

    def _check(self, view: memoryview, digest: str) -> None:
        if not is_right(view, digest):
            raise self._damaged()

    def _damaged(self) -> WireError:
        return WireError(f"{self._open.peer}: the value was damaged on its way: a checksum is wrong")

    def _keep_entries(self, message: Message) -> None:
        """Entries of a page that is used in part, or, if pages come in another form, the next entries of the value."""
        geometry, pool, slots = self._theirs, self._pool, np.array(message["slots"], np.int64)
        shape = geometry.num_layers, 2, len(slots), geometry.num_kv_heads, geometry.head_dim
        data = np.empty(len(slots) * geometry.entry_bytes, np.uint8)
        self._open.fill([data.data], self._left())
        self._check(data.data, message["digest"])
        landing, numbers = self._landing, np.full(len(slots), message["number"])
        assert landing is not None
        if not self._pages:
            index = np.arange(self._num_entries, self._num_entries + len(slots))
            numbers, slots = index // pool.page_size, index % pool.page_size
            landing.reserve(max(0, int(numbers[-1]) + 1 - len(landing.pages)))
        if numbers.max() >= len(landing.pages) or slots.max() >= pool.page_size:
            raise WireError(f"{self._open.peer} sent entries that it was not asked for")
        entries = data.view(geometry.dtype).reshape(shape).astype(pool.geometry.dtype, copy=False)
        pool.write(np.array(landing.pages, np.int64)[numbers], slots, entries)
        self._come.update(numbers.tolist())
        self._num_entries += len(slots)
        self.bytes_received += len(data)

    def _read(self, message: Message) -> Told:
        """What the value is made of: it comes before its last pages, and is read while they are on their way."""
        header = _decoded(message["header"].encode(), self._open)
        shape, windows = message["queries"]
        rest = np.empty(header.num_logits + int(np.prod(shape)), np.float32)
        data = rest.view(np.uint8).data
        self._open.fill([data], self._left())
        self._check(data, message["digest"])
        if self._pages:
            self._pool.geometry.require(header.geometry, "this value cannot be placed here")
        queries = Queries(rest[header.num_logits :].reshape(shape), tuple(windows))
        order = np.array(message["order"], np.int64)
        return Told(header, order, rest[: header.num_logits], queries, message["state"])

    def _attached(self, told: Told) -> KVCache:
        """The value, now that all of it is there. Raises WireError: something is missing, or is not right."""
        pool, landing = self._pool, self._landing
        assert landing is not None
        header, contents, order = told.header, told.header.contents, told.order
        if not self._pages:
            contents = form.repaged(pool, header)
            order = np.arange(-(-len(contents.tokens) // pool.page_size))
            complete = len(contents.tokens) == self._num_entries
        else:
            complete = len(order) == header.num_pages and set(order.tolist()) <= self._come
        if not complete:
            raise WireError(f"{self._open.peer} did not send all of the value")
        if not self._checks.settle():
            raise self._damaged()
        local = np.arange(len(order))
        pages = landing.keep(order.tolist(), spans.filled(contents.table, local).tolist())
        try:
            table = spans.with_pages(contents.table, local, pages).astype(np.int32)
            return form.value(pool, replace(contents, table=table), told.logits)
        finally:
            pool.release(pages)  # the value holds its own references


def _decoded(text: bytes, channel: Channel) -> Header:
    try:
        return headers.decode(text)
    except headers.Invalid as error:
        raise WireError(f"{channel.peer} describes its value wrongly: {error}") from None
