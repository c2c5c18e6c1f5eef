"""A value that is offered to other processes, complete or while its prefill still runs."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from twostroke.cluster.wire import value_format
from twostroke.cluster.wire.checksum import Kind
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.lease import TTL_S, Lease
from twostroke.cluster.wire.runtime import SYSTEM, Runtime
from twostroke.cluster.wire.value_format import CompleteValue, digest_of, whole_pages
from twostroke.errors import KVError
from twostroke.kv.attention import NO_QUERIES, Queries
from twostroke.kv.cache import KVCache


@dataclass(frozen=True)
class OfferState:
    """What there is to send: pages, the number of the first of them, and the run that they belong to.

    `kv` holds the pages; `final` is the complete value, at the latest when there are no more pages. `digests` of the
    run's pages are kept for all receivers.
    """

    kv: KVCache | None
    pages: list[int]
    first: int
    run: int
    final: CompleteValue | None
    digests: dict[tuple[Kind, int], str]


class ValueOffer:
    """Holds the pages of a value until those who are to receive it have it, or its lease ends.

    Any thread may call its methods; none of them waits for a network.

    Attributes:
        handle: names it to a receiver; valid before anything is computed.
        expected: number of pages that the value will have, if that is known, so that a receiver can reserve them.
    """

    def __init__(
        self,
        handle: ValueHandle,
        expected: int | None = None,
        receivers: int = 1,
        ttl_s: float = TTL_S,
        runtime: Runtime = SYSTEM,
    ) -> None:
        """Use `Sender.offer`."""
        self.handle, self.expected = handle, expected
        self.lease: Lease | None = None  # begins when the value is complete; None before
        self.bytes_sent = 0  # bytes of K and V that went out, to all receivers
        self._receivers, self._ttl_s, self._clock = receivers, ttl_s, runtime.now
        self._changed = runtime.condition()
        self._promised: list[int] = []
        self._digests: dict[tuple[Kind, int], str] = {}  # of whole pages of the value
        self._run = 0  # how often all had to go out again
        self._kv: KVCache | None = None
        self._longer: list[KVCache] = []  # with entries of answers; none begins another
        self._given: Callable[[], CompleteValue] | None = None  # makes the complete value
        self._final: CompleteValue | None = None
        self._why: str | None = None  # why it will not be complete, or is gone

    def extend(self, kv: KVCache) -> None:
        """The value as far as it is computed: pages that are full go out while the rest is computed.

        If it lacks a page of the value before it, as after a preemption, all goes out again.
        """
        pages = whole_pages(kv, windowed=False)  # others leave the value as their window passes
        with self._changed:
            if self._given is None and self._why is None:
                self._kv, self.lease = kv, None
                self._promise(pages, pages)
                self._changed.notify_all()

    def _promise(self, pages: list[int], among: list[int]) -> None:
        if not set(among).issuperset(self._promised):
            self._promised, self._digests, self._run = [], {}, self._run + 1
        known = set(self._promised)
        self._promised = [*self._promised, *(page for page in pages if page not in known)]

    def pause(self) -> None:
        """What computes the value was interrupted: let go of its pages. It fails unless it goes on within `ttl_s`."""
        with self._changed:
            if self._given is None and self._why is None:
                self._kv, self._promised, self._digests, self._run = None, [], {}, self._run + 1
                self.lease = Lease(self._receivers, self._ttl_s, self._clock)

    def complete(self, kv: KVCache, state: Any = None, queries: Queries = NO_QUERIES) -> None:
        """The whole value. Its lease begins.

        Args:
            kv: in the pool of the sender.
            state: what goes along, for JSON; the receiver gets it with the value.
            queries: of the last entries, if the technique chooses by attention.
        """
        logits = value_format.logits_of(kv)  # by who computes; the rest is done by who sends
        with self._changed:
            if self._given is None and self._why is None:
                self._promise(whole_pages(kv), kv.entry_table.pages.tolist())
                self._kv = kv
                self._given = lambda: CompleteValue.of(kv, self._promised, logits, state, queries)
                self.lease = Lease(self._receivers, self._ttl_s, self._clock)
                self._changed.notify_all()

    def fail(self, why: str) -> None:
        """The value will not be complete, or is not offered any more. Receivers are told `why`, in one line."""
        with self._changed:
            if self.lease is not None:
                self.lease.cancel()
            self._drop(why)

    def sweep(self) -> str | None:
        """Drop the pages if the lease has ended. Returns why it holds none any more, if so."""
        with self._changed:
            if self._why is None and self.lease is not None and not self.lease.held:
                self._drop(
                    f"its lease was {self.lease.state}" if self.lease.state == "released" else "its lease has ended"
                )
            return self._why

    def _drop(self, why: str) -> None:
        if self._why is None:
            self._why = why
        self._kv = self._given = self._final = None
        self._promised, self._digests, self._longer = [], {}, []
        self._changed.notify_all()

    # For transfers ----------------------------------------------------------------------------------------------

    def find_prefix(self, length: int, digest: str) -> KVCache | None:
        """So many first entries of the complete value, or of what `grow` has made of it, if they have this digest.

        None: nothing that is held begins with these entries, as before it is complete and after its lease.
        """
        with self._changed:
            values = () if self._given is None or self._kv is None else (self._kv, *self._longer)
        beginnings = (kv[:length] for kv in values if len(kv) >= length)
        return next((kv for kv in beginnings if digest_of(kv) == digest), None)

    def add_longer(self, kv: KVCache) -> None:
        """Hold a longer value too, for the next entries that are asked for. Each choice of a request has its own."""
        with self._changed:
            if self._given is not None and not any(_begins(kv, other) for other in self._longer):
                self._longer = [*(other for other in self._longer if not _begins(other, kv)), kv]

    def renew(self) -> None:
        """A transfer, or a receiver, gives a sign of life. While the value is not complete that changes nothing."""
        if self.lease is not None and self._given is not None:
            self.lease.renew()

    @property
    def num_pages(self) -> int:
        """Number of pages that a receiver reserves at first: all, if that is known."""
        if self._given is not None and (kv := self._kv) is not None:
            return kv.num_pages
        return self.expected or 0

    def poll(self, sent: int, run: int, limit_s: float) -> OfferState:
        """What there is to send after the first `sent` pages of a run, waiting at most `limit_s` seconds for more.

        Raises KVError: the value is gone.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._why is not None or self._given is not None or len(self._promised) > sent, limit_s
            )
            self.sweep()
            if self._why is not None:
                raise KVError(self._why)
            sent = sent if run == self._run else 0
            final = self._final if len(self._promised) > sent else self._described()
            pages = self._promised if final is None else final.whole
            return OfferState(
                self._kv if len(pages) > sent else None, pages[sent:], sent, self._run, final, self._digests
            )

    def described(self) -> CompleteValue | None:
        """What a complete value is made of; None before it is complete, and when it is gone. It takes some time."""
        with self._changed:
            return self._described()

    def _described(self) -> CompleteValue | None:
        if self._final is None and self._given is not None:
            self._final = self._given()
        return self._final

    def count(self, size: int) -> None:
        """Count bytes that were sent."""
        with self._changed:
            self.bytes_sent += size


def _begins(kv: KVCache, other: KVCache) -> bool:
    """Whether a value is the beginning of another."""
    return len(kv) <= len(other) and digest_of(other[: len(kv)]) == digest_of(kv)
