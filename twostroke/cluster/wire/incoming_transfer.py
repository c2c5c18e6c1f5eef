"""The receiver's side of one transfer."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from twostroke.backends.interface import PAGE
from twostroke.cluster.wire import value_format
from twostroke.cluster.wire.arriving_pages import PageReservation, RemoteRead, RemoteReads
from twostroke.cluster.wire.channel import MISMATCH, Channel, IdentityMismatch, Message, WireError
from twostroke.cluster.wire.checksum import is_right
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.page_digests import DigestThreads, IncomingChecks
from twostroke.cluster.wire.runtime import SYSTEM, Runtime
from twostroke.cluster.wire.secret import Secrets
from twostroke.cluster.wire.transport import PageReader, Transport
from twostroke.cluster.wire.value_format import ValueDescription
from twostroke.errors import KVError
from twostroke.kv import spans
from twostroke.kv import stream_header as headers
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import EntryTable
from twostroke.kv.pool import PagePool
from twostroke.kv.spans import NO_PAGE
from twostroke.kv.stream_header import StreamHeader

log = logging.getLogger(__name__)

STALL_S = 10.0  # seconds in which a sender gives a sign of life
REFUSED = "the value does not fit here"
LOST_S = 60.0  # seconds that others wait for pages into which something is still read
END_S = 1.0  # seconds in which a read ends, as a rule, once this side has turned away
Ended = Callable[["IncomingTransfer"], None]


class IncomingTransfer:
    """A value on its way into a pool: claimed, filled, verified, and attached at last.

    Nothing of it is visible until all of it is there and right.

    Attributes:
        identity: of the sender's model.
        bytes_received: bytes of K and V so far.
        moving_s: seconds in which they moved; the sender waited for the rest of the time.
    """

    def __init__(
        self, pool: PagePool, transport: Transport, digesting: DigestThreads, until: float, runtime: Runtime = SYSTEM
    ) -> None:
        """`until`: on the monotonic clock, when it has to be there."""
        self._pool, self._transport, self._until, self._runtime = pool, transport, until, runtime
        self.identity = ""
        self.bytes_received, self.moving_s = 0, 0.0
        self._channel: Channel | None = None
        self._reservation: PageReservation | None = None
        self._cancelled = self._ended = self._closed = False
        self._returning = 0  # pages that the engine expects back
        self._pages = False  # whether pages come as they are
        self._description: ValueDescription | None = None
        self._arrived_pages: set[int] = set()  # numbers of the pages that are there
        self._reader: PageReader | None = None
        self._reads = RemoteReads(runtime, self._arrived, lambda: self._open.send("alive"))
        self._num_entries = 0
        self._new_form: EntryTable | None = None  # of a value whose pages come in another form
        self._checks = IncomingChecks(digesting)
        self._lock = threading.Lock()

    def cancel(self) -> None:
        """Nobody wants it any more. From any thread; never waits."""
        with self._lock:
            self._cancelled = True
            channel, reservation = self._channel, self._reservation
        if reservation is not None:
            self._expect(len(reservation.pages))
        if channel is not None:
            channel.shut()

    @property
    def num_quarantined(self) -> int:
        reservation = self._reservation
        return len(reservation.pages) if reservation is not None and self._ended else 0

    def open(
        self, handle: ValueHandle, known: Secrets, extend: dict[str, Any] | None, identity: str | None = None
    ) -> None:
        """Connect and claim, or ask for entries after those that are here. Raises WireError.

        `identity`: that of the only model whose values are taken; None: any.
        """
        channel = Channel.connect(handle.address, known, runtime=self._runtime)
        with self._lock:
            self._channel, cancelled = channel, self._cancelled
        if cancelled:
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
            identity=identity,
            **(extend or {}),
        )

    def accept_terms(self, identity: str | None, convert: bool) -> None:
        """Check what the sender says of its value, and reserve room. Raises KVError."""
        terms = self._message()
        self.identity, self._pages = terms["identity"], terms["pages"]
        own, about = self._pool.geometry, terms["header"]
        same = about == value_format.without_entries(self._pool)  # as a rule; then there is nothing to read
        self._theirs = own if same else _decoded(about.encode(), self._open).geometry
        if identity is not None and identity != self.identity:
            raise IdentityMismatch(f"{self._open.peer}: {MISMATCH}")
        if not self._pages and not convert:
            own.require(self._theirs, REFUSED)
            raise KVError(f"{REFUSED}: its pages have another size or layout")
        own.require(replace(self._theirs, kv_dtype=own.kv_dtype), REFUSED)
        if not self._pages and own.states:
            raise KVError(f"{REFUSED}: {value_format.STATES_NEED_PAGES}")
        self._reservation = PageReservation(self._pool)
        if terms["memory"] is not None:
            self._reader = self._transport.reader(terms["memory"])
        if self._pages:
            self._reservation.ensure(terms["expected"])

    def take(self, release: bool) -> tuple[KVCache, Queries, Any]:
        """Receive all of it. Returns the value, the queries of its last entries, and what was sent along."""
        while (message := self._message())["kind"] != "done":
            if message["kind"] == "pages":
                self._fill(message)
            elif message["kind"] == "entries":
                self._keep_entries(message)
            elif message["kind"] == "value":
                self._description = self._read(message)
        self.moving_s = float(message["moving_s"])
        if (description := self._description) is None:
            raise WireError(f"{self._open.peer} did not say what the value is made of")
        kv = self._attached(description)
        try:
            self._open.send("received", release=release)
        except WireError as error:  # it is here all the same; the lease ends by itself
            log.info("a sender did not hear that its value was received: %s", error)
        return kv, description.queries, description.state

    def end(self, ended: Ended) -> None:
        """Close the channel, and free what is reserved once nothing is read into it any more.

        `ended` is called then: now, or by a thread that waits for a read that does not end.
        """
        self._ended = True
        self._checks.close()
        channel, reservation = self._channel, self._reservation
        if channel is not None and reservation is not None:
            self._expect(len(reservation.pages))
            channel.shut()
            if not self._reads.end(END_S):
                log.warning("%s: a read does not end: %d pages are in quarantine", channel.peer, len(reservation.pages))
                self._runtime.start("wire quarantine", partial(self._wait, ended))
                return
        self._close(ended)

    def _wait(self, ended: Ended) -> None:
        while not self._reads.end(LOST_S):
            self._expect(0)  # whoever waits for room has waited long enough
        self._close(ended)

    def _close(self, ended: Ended) -> None:
        if self._channel is not None:
            self._channel.close()
        if self._reservation is not None:
            self._reservation.free()
            self._reservation = None
        self._closed = True
        self._expect(0)
        ended(self)

    def _expect(self, pages: int) -> None:
        """Let the engine know that so many pages come back soon: it does not end an answer for want of them."""
        with self._pool.lock:
            pages = 0 if self._closed else pages
            self._pool.num_quarantined += pages - self._returning
            self._returning = pages

    # Messages ---------------------------------------------------------------------------------------------------

    @property
    def _open(self) -> Channel:
        assert self._channel is not None
        return self._channel

    def _left(self) -> float:
        if (left := self._until - self._runtime.now()) <= 0 or self._cancelled:
            raise WireError("nobody wants it any more" if self._cancelled else "the value did not come in time")
        return min(STALL_S, left)

    def _message(self) -> Message:
        message = self._open.receive(self._left())
        if message["kind"] == "gone":
            if message.get("mismatch"):
                raise IdentityMismatch(f"{self._open.peer}: {message['why']}")
            raise WireError(f"{self._open.peer} does not have the value: {message['why']}")
        return message

    def _fill(self, message: Message) -> None:
        """Pages come behind their message, or are to be read from the sender's memory."""
        reservation, numbers, digests, places = (
            self._reservation,
            message["numbers"],
            message["digests"],
            message.get("places"),
        )
        assert reservation is not None
        reservation.ensure(max(numbers) + 1)
        with reservation.filling(numbers) as views:
            if places is None:
                self._open.fill(views, self._left())
                self._arrived(numbers, views, digests)
                return
            if self._reader is None:
                raise WireError(f"{self._open.peer} lets read from a memory of which it has not told")
            reading = self._reader.begin(places, reservation.frames(numbers))
        self._reads.add(RemoteRead(reading, numbers, views, digests), self._left)
        if message["answer"]:
            self._reads.settle(self._left)
            self._open.send("read")

    def _arrived(self, numbers: Sequence[int], views: Sequence[memoryview], digests: Sequence[str]) -> None:
        self._checks.add(numbers, views, digests)
        self._arrived_pages.update(numbers)
        self.bytes_received += len(numbers) * self._pool.page_bytes

    def _check(self, view: memoryview, digest: str) -> None:
        if not is_right(view, digest):
            raise self._damaged()

    def _damaged(self) -> WireError:
        return WireError(f"{self._open.peer}: the value was damaged on its way: a checksum is wrong")

    def _keep_entries(self, message: Message) -> None:
        """Entries of a group of layers: of a page that is used in part, or of a value that takes another form here."""
        geometry, pool, group = self._theirs, self._pool, message["group"]
        where = np.array(message["slots"] if self._pages else message["at"], np.int64)
        if not 0 <= group < pool.num_groups or (self._pages and where.max() >= pool.page_size):
            raise WireError(f"{self._open.peer} sent entries that no page has")
        one = geometry.groups[group]
        data = np.empty(len(where) * geometry.group_bytes[group], np.uint8)
        self._open.fill([data.data], self._left())
        self._check(data.data, message["digest"])
        theirs, own = geometry.stored, pool.geometry.stored
        shape = len(one.layers), one.parts(theirs), len(where), one.num_kv_heads, one.width(theirs)
        entries = data.view(one.dtype(theirs)).reshape(shape)
        if theirs != own:
            entries = own.encode(theirs.decode(entries))
        reservation = self._reservation
        assert reservation is not None
        if self._pages:
            reservation.ensure(message["number"] + 1)
            self._write(group, np.full(len(where), reservation.pages[message["number"]]), where, entries)
            self._arrived_pages.add(message["number"])
        else:
            self._place_entries(group, where, entries)
        self.bytes_received += len(data)

    def _place_entries(self, group: int, at: np.ndarray, entries: np.ndarray) -> None:
        """Write entries of the value into pages of its new form, which the header has told."""
        description, reservation = self._description, self._reservation
        if description is None or reservation is None:
            raise WireError(f"{self._open.peer} sent entries before it said of what")
        if self._new_form is None:
            self._new_form = value_format.repaged(self._pool, description.header)
            reservation.ensure(len(spans.distinct_pages(self._new_form.table)))
        numbers, slots = spans.places(self._new_form.table, group)
        if len(at) and at.max() >= len(numbers):
            raise WireError(f"{self._open.peer} sent entries that no page has")
        kept = numbers[at] != NO_PAGE
        pages = np.array(reservation.pages, np.int64)[numbers[at][kept]]
        self._write(group, pages, slots[at][kept], entries[:, :, kept])
        self._num_entries += int(kept.sum())

    def _write(self, group: int, pages: np.ndarray, slots: np.ndarray, entries: np.ndarray) -> None:
        pool, depth = self._pool, self._pool.geometry.groups[group].depth
        whole = np.zeros((depth, *entries.shape[1:]), entries.dtype)
        whole[: len(entries)] = entries
        pool.memory.write(group, pool.frames_of(pages), slots, whole)

    def _read(self, message: Message) -> ValueDescription:
        """What the value is made of: it comes before its last pages, and is read while they are on their way."""
        header = _decoded(message["header"].encode(), self._open)
        shape, windows, *further = message["queries"]
        rest = np.empty(header.num_logits + int(np.prod(shape)), np.float32)
        data = rest.view(np.uint8).data
        self._open.fill([data], self._left())
        self._check(data, message["digest"])
        if self._pages and self._reservation is not None:
            self._pool.geometry.require(header.geometry, "this value cannot be placed here")
            self._reservation.ensure(header.num_pages)
        queries = Queries(rest[header.num_logits :].reshape(shape), tuple(windows), *further)
        order = np.array(message["order"], np.int64)
        return ValueDescription(header, order, rest[: header.num_logits], queries, message["state"])

    def _attached(self, description: ValueDescription) -> KVCache:
        """The value, now that all of it is there. Raises WireError: something is missing, or is not right."""
        pool, reservation = self._pool, self._reservation
        assert reservation is not None
        header, contents, order = description.header, description.header.contents, description.order
        if not self._pages:
            contents = self._new_form or value_format.repaged(pool, header)
            order = np.arange(len(spans.distinct_pages(contents.table)))
            held = spans.counts(contents.table) @ (contents.table[:, PAGE:] != NO_PAGE)
            complete = int(held.sum()) == self._num_entries
        else:
            complete = len(order) == header.num_pages and set(order.tolist()) <= self._arrived_pages
        if not complete:
            raise WireError(f"{self._open.peer} did not send all of the value")
        if not self._checks.settle():
            raise self._damaged()
        local, stops = contents.pages_and_stops(pool.page_size)
        pages = reservation.commit(order.tolist(), stops.tolist())
        groups = spans.page_groups(contents.table, len(order))
        groups[contents.snapshot_pages] = pool.num_groups
        pool.set_groups(pages, groups)
        try:
            return value_format.value(pool, contents.in_pages(local, pages), description.logits)
        finally:
            pool.release(pages)  # the value holds its own references


def _decoded(text: bytes, channel: Channel) -> StreamHeader:
    try:
        return headers.decode(text)
    except headers.InvalidHeader as error:
        raise WireError(f"{channel.peer} describes its value wrongly: {error}") from None
