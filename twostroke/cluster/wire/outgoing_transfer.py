"""The sender's side of one transfer: a value goes to one receiver over one channel."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np

from twostroke.cluster.wire.channel import Channel, Message, WireError
from twostroke.cluster.wire.checksum import Kind, checksum, kind_between
from twostroke.cluster.wire.offer import OfferState, ValueOffer
from twostroke.cluster.wire.page_digests import DigestThreads, OutgoingDigests
from twostroke.cluster.wire.secret import Clock
from twostroke.cluster.wire.transport import Transport
from twostroke.cluster.wire.value_format import GROUP_BYTES, CompleteValue, piece, pieces, without_entries
from twostroke.kv import spans
from twostroke.kv.page_contents import PageSource, read_entries, reading
from twostroke.kv.pool import PagePool
from twostroke.kv.spans import NO_PAGE

log = logging.getLogger(__name__)

ALIVE_S = 1.0  # seconds after which a sender that has nothing to send says that it is there
HELD_BYTES = 128 << 20  # of pages that stay where they are until they have gone
ANSWER_S = 10.0  # seconds in which a receiver answers


class OutgoingTransfer:
    """Messages of the sender: terms; value once, and pages, entries and alive in any number; done. Or gone."""

    def __init__(
        self,
        channel: Channel,
        claim: Message,
        offer: ValueOffer,
        pool: PagePool,
        identity: str,
        transport: Transport,
        digesting: DigestThreads,
        now: Clock,
    ) -> None:
        self._channel, self._offer, self._pool, self._identity = channel, offer, pool, identity
        same = claim["geometry"] == pool.geometry.fingerprint and claim["page_size"] == pool.page_size
        self._pages = bool(same and claim["layout"] == pool.memory.layout)
        self._memory = transport.memory() if self._pages and claim["transport"] == transport.name else None
        self._digesting = digesting
        self._kind: Kind = kind_between(channel.machine, claim.get("machine"))
        self._sent = self._run = 0
        self._told = False  # whether the receiver knows what the value is made of
        self._now, self._moving_s = now, 0.0  # seconds in which something moved

    def run(self) -> None:
        """Send the value. Raises KVError: it did not get there; nothing of it is under way any more."""
        offer, channel = self._offer, self._channel
        about, expected = without_entries(self._pool), offer.num_pages
        channel.send(
            "terms", identity=self._identity, header=about, pages=self._pages, expected=expected, memory=self._memory
        )
        final = self._send_pages() if self._pages else self._send_entries()
        self._finish(final)
        answer = channel.receive(ANSWER_S)
        if answer["kind"] != "received":
            raise WireError(f"{channel.peer} has not taken the value")
        if answer["release"] and offer.lease is not None:
            offer.lease.receiver_done()
            offer.sweep()

    def _look(self) -> OfferState:
        """What there is to send; says now and then that this side lives. Raises WireError if the other has gone."""
        while True:
            if self._channel.readable:  # all that a receiver may say now is that it turns away
                raise WireError(f"{self._channel.peer} has turned away")
            look = self._offer.poll(self._sent, self._run, ALIVE_S)
            self._offer.renew()
            self._sent, self._run = look.first, look.run
            self._tell(look.final)
            if look.pages or look.final is not None:
                return look
            self._channel.send("alive")

    def _send_pages(self) -> CompleteValue:
        group = max(1, HELD_BYTES // self._pool.page_bytes)
        while True:
            look = self._look()  # it holds the value until its pages are there
            if not look.pages:
                assert look.final is not None
                return look.final
            some = np.array(look.pages[:group], np.int64)
            numbers = range(self._sent, self._sent + len(some))
            with (
                reading(self._pool, some, np.full(len(some), self._pool.page_size)) as sources,
                OutgoingDigests(
                    self._digesting, self._kind, self._sent, some.tolist(), sources, look.digests
                ) as digests,
            ):
                began = self._now()
                self._send_some(numbers, sources, digests)
                self._moving_s += self._now() - began
            self._sent += len(some)
            self._offer.count(len(some) * self._pool.page_bytes)
            del look  # while it waits for more, it holds nothing

    def _send_some(self, numbers: Sequence[int], sources: Sequence[PageSource], digests: OutgoingDigests) -> None:
        """Send whole pages, or let the receiver read them. Returns when nobody reads them any more."""
        read = [i for i, source in enumerate(sources) if self._memory is not None and source.copy is None]
        for some in pieces(len(read), piece(sources)):
            places = [sources[i].frame for i in read[some]]
            mine = [numbers[i] for i in read[some]]
            # The receiver reads on while the next are digested. It tells once, when it has read them all.
            self._channel.send(
                "pages", numbers=mine, digests=digests(mine), places=places, answer=some.stop >= len(read)
            )
        other = sorted({*range(len(sources))}.difference(read))
        for some in pieces(len(other), piece(sources)):
            views = [sources[i].data() for i in other[some]]
            mine = [numbers[i] for i in other[some]]
            self._channel.send("pages", views, numbers=mine, digests=digests(mine))
        if read:
            self._tell(self._offer.described())  # while the receiver reads
            self._wait_until_read()

    def _wait_until_read(self) -> None:
        """Wait for the message "read". What comes before it says that the receiver is alive."""
        said = ""
        while said != "read":
            said = self._channel.receive(ANSWER_S)["kind"]

    def _send_entries(self) -> CompleteValue:
        """All entries one after another, for a pool of another form. They go when the value is complete."""
        while (look := self._look()).final is None:
            self._sent = look.first + len(look.pages)
        final = look.final
        for group, entry_bytes in enumerate(self._pool.geometry.group_bytes):
            pages, slots = spans.places(final.kv.table, group)
            held = np.flatnonzero(pages != NO_PAGE)
            for some in pieces(len(held), max(1, GROUP_BYTES // entry_bytes)):
                at = held[some]
                self._entries(group, pages[at], slots[at], {"at": at.tolist()})
        return final

    def _entries(self, group: int, pages: np.ndarray, slots: np.ndarray, places: dict[str, Any]) -> None:
        """Entries of a group of layers. `places`: slots of a page by its number, or which entries of the value."""
        data = read_entries(self._pool, group, pages, slots)
        view = np.ascontiguousarray(data).view(np.uint8).reshape(-1).data
        digest, began = checksum(view, self._kind), self._now()
        self._channel.send("entries", [view], group=group, digest=digest, **places)
        self._moving_s += self._now() - began
        self._offer.count(len(view))

    def _tell(self, final: CompleteValue | None) -> None:
        """Say once what the value is made of, if that is known."""
        if final is None or self._told:
            return
        queries = final.queries
        further = (
            [queries.cap, list(queries.sources)] if queries.sources else [] if queries.cap is None else [queries.cap]
        )
        rest = np.concatenate([final.logits, queries.rows.ravel()]).view(np.uint8).data
        self._channel.send(
            "value",
            [rest],
            header=final.header,
            order=final.order,
            queries=[list(queries.rows.shape), list(queries.windows), *further],
            digest=checksum(rest, self._kind),
            state=final.state,
        )
        self._told = True

    def _finish(self, final: CompleteValue) -> None:
        if self._pages:
            for part in final.parts:
                pages = np.full(len(part.slots), part.page)
                self._entries(part.group, pages, part.slots, {"number": part.number, "slots": part.slots.tolist()})
        self._channel.send("done", moving_s=f"{self._moving_s:012.6f}")  # its length does not depend on the time
