"""Receives values of other processes into a pool."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from twostroke.cluster.wire.channel import CONNECT_S, Channel, WireError
from twostroke.cluster.wire.checks import Digesting
from twostroke.cluster.wire.form import digest_of
from twostroke.cluster.wire.handle import Handle
from twostroke.cluster.wire.reception import Reception
from twostroke.cluster.wire.secret import shared_secret
from twostroke.cluster.wire.surroundings import HERE, Surroundings
from twostroke.cluster.wire.tcp import Tcp
from twostroke.cluster.wire.transport import Transport
from twostroke.errors import InvalidRequest, TwostrokeError
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

MOST = 64  # values that arrive at once
LIMIT_S = 120.0  # seconds for a value, the rest of its prefill included


@dataclass(frozen=True)
class Received:
    """A value that has come.

    Attributes:
        kv: the value, in the receiver's pool.
        queries: of its last entries, if the sender gave them.
        state: what the sender sent along.
        identity: of the model that computed it (`Model.id`).
        canonical: whether that is the receiver's model too, so that its entries may enter the prefix index.
        bytes_received: bytes of K and V that came.
        seconds: from the call of `receive` on.
        moving_s: seconds of these in which something moved, and the sender did not wait for its prefill.
    """

    kv: KVCache
    queries: Queries
    state: Any
    identity: str
    canonical: bool
    bytes_received: int
    seconds: float
    moving_s: float


class Incoming(Future[Received]):
    """A value on its way. `result` waits for it and raises what kept it from coming; `cancel` never waits."""

    def __init__(self) -> None:
        super().__init__()
        self._reception: Reception | None = None
        self._turned_away = False

    def cancel(self) -> bool:
        """Nobody wants it any more: its pages are freed as soon as nothing is under way to them."""
        self._turned_away = True
        if (reception := self._reception) is not None:
            reception.turn_away()
        return super().cancel()


class Extended(Future[KVCache]):
    """A value whose last entries are on their way. `cancel` lets go of the others at once."""

    def __init__(self, kv: KVCache, incoming: Incoming) -> None:
        super().__init__()
        # Let go of in the end: the incoming future refers to this one, and a cycle would keep pages until the garbage
        # collector runs.
        self._waits_for: tuple[KVCache, Incoming] | None = kv, incoming
        incoming.add_done_callback(self._join)

    def cancel(self) -> bool:
        if (waits_for := self._waits_for) is not None:
            waits_for[1].cancel()
        if cancelled := super().cancel():
            self._waits_for = None
        return cancelled

    def _join(self, incoming: Future[Received]) -> None:
        """The entries have come, or not."""
        if not self.set_running_or_notify_cancel():
            return
        waits_for, self._waits_for = self._waits_for, None
        assert waits_for is not None
        try:
            self.set_result(waits_for[0] + incoming.result().kv)
        except (TwostrokeError, CancelledError) as error:
            self.set_exception(error.with_traceback(None))


class Receiver:
    """Claims values and brings them into a pool, on threads of its own. Any thread may call its methods."""

    def __init__(
        self,
        pool: PagePool,
        identity: str | None = None,
        *,
        secret: str | None = None,
        transport: Transport | None = None,
        same_identity: bool = False,
        convert: bool = True,
        around: Surroundings = HERE,
    ) -> None:
        """Prepare.

        Args:
            pool: where values go.
            identity: `Model.id` of the model that continues them.
            secret: what senders know too, at least 16 characters; None: as for `Sender`.
            transport: how pages move (`open_transport`); None: TCP.
            same_identity: refuse values of models with another identity. Otherwise they are usable, not canonical.
            convert: accept another KV dtype, page size or layout; their entries are placed anew, and those of another
                dtype are canonical for no model. Otherwise such values are refused.
            around: time, threads and connections; a simulation has its own.

        Raises KVError: there is no secret.
        """
        self.pool, self.identity, self._secret = pool, identity, shared_secret(secret)
        self._transport, self._around = transport or Tcp(), around
        self._same_identity, self._convert = same_identity, convert
        self._workers = around.workers("wire receiver", MOST)
        self._receptions: dict[Reception, None] = {}
        self._digesting = Digesting("wire checks", around.cores)
        self._lock = threading.Lock()

    def receive(self, handle: Handle, limit_s: float = LIMIT_S, release: bool = True) -> Incoming:
        """Claim a value. It may still be computed: its pages come as they are made.

        Args:
            handle: names the value.
            limit_s: seconds within which it has to be there.
            release: whether the sender may let go of it then; otherwise its lease goes on.

        The future raises:
            GeometryMismatch, KVError: it does not fit here; one line says why. OutOfPages: no room; nothing was evicted
                but unused prefixes. WireError: it is gone, damaged on its way, late, or the other side has died.
        """
        return self._start(handle, limit_s, release, None)

    def extend(
        self, handle: Handle, kv: KVCache, tokens: Sequence[int], logits: str, limit_s: float = LIMIT_S
    ) -> Future[KVCache]:
        """Let the sender prefill tokens after a value that both sides hold, and fetch the new entries.

        Args:
            handle: names the value of the sender's; its lease must be held, so it was received with `release=False`.
            kv: the value here, with the entries that the sender's has.
            tokens: at least one.
            logits: as in `Prefill`: "last" or "none".

        Returns a future of the longer value, which shares its pages with `kv`. It raises the errors of `receive`.
        """
        if not tokens or kv.pending is not None:
            raise InvalidRequest("a sender extends a value without a pending token, by at least one token")
        asked = {"length": len(kv), "digest": digest_of(kv), "tokens": list(tokens), "logits": logits}
        return Extended(kv, self._start(handle, limit_s, True, asked))

    def _start(self, handle: Handle, limit_s: float, release: bool, extend: dict[str, Any] | None) -> Incoming:
        incoming = Incoming()
        self._workers.submit(lambda: self._run(incoming, handle, limit_s, release, extend))
        return incoming

    def release(self, handle: Handle) -> bool:
        """Tell a sender that a value is not wanted. Waits for the answer. Returns False if it holds it no more."""
        return self._tell("release", handle)

    def renew(self, handle: Handle) -> bool:
        """Ask a sender to hold a value for longer. Waits for the answer. Returns False if it holds it no more."""
        return self._tell("renew", handle)

    @property
    def num_quarantined(self) -> int:
        """Number of pages that nobody wants, and that nobody may use yet, since something is still read into them."""
        with self._lock:
            return sum(reception.num_quarantined for reception in self._receptions)

    def close(self, limit_s: float = 5.0) -> None:
        """Turn away from all that is on its way."""
        with self._lock:
            receptions = list(self._receptions)
        for reception in receptions:
            reception.turn_away()
        self._workers.close(limit_s)
        self._digesting.close()

    def _tell(self, what: str, handle: Handle) -> bool:
        try:
            channel = Channel.connect(handle.address, self._secret, around=self._around)
        except WireError:
            return False
        try:
            channel.send(what, lease=handle.lease, incarnation=handle.incarnation)
            return channel.receive(CONNECT_S)["kind"] == "ok"
        except WireError:
            return False
        finally:
            channel.close()

    def _run(
        self, incoming: Incoming, handle: Handle, limit_s: float, release: bool, extend: dict[str, Any] | None
    ) -> None:
        if not incoming.set_running_or_notify_cancel():
            return
        until = self._around.now() + limit_s
        reception = Reception(self.pool, self._transport, self._digesting, until, self._around)
        with self._lock:
            self._receptions[reception] = None
        try:
            outcome = self._receive(reception, incoming, handle, release, extend)
        except TwostrokeError as error:
            outcome = error.with_traceback(None)  # it would keep pages
        except Exception as error:
            log.exception("a value could not be received")
            outcome = WireError(f"a value could not be received: {error}")
        reception.end(self._forget)  # first, so that who learns of a failure finds the room free
        if isinstance(outcome, Received):
            incoming.set_result(outcome)
        else:
            incoming.set_exception(outcome)

    def _receive(
        self, reception: Reception, incoming: Incoming, handle: Handle, release: bool, extend: dict[str, Any] | None
    ) -> Received:
        began = self._around.now()
        incoming._reception = reception
        if incoming._turned_away:
            raise WireError("nobody wants it any more")
        reception.open(handle, self._secret, extend)
        reception.accept_terms(self.identity if self._same_identity else None, self._convert)
        kv, queries, state = reception.take(release)
        identity, seconds = reception.identity, self._around.now() - began
        canonical, took = identity == self.identity, (reception.bytes_received, seconds, reception.moving_s)
        return Received(kv, queries, state, identity, canonical, *took)

    def _forget(self, reception: Reception) -> None:
        with self._lock:
            self._receptions.pop(reception, None)
