"""Receives values of other processes into a pool."""

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from twostroke.cluster.wire.channel import CONNECT_S, Channel, IdentityMismatch, WireError
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.incoming_transfer import IncomingTransfer
from twostroke.cluster.wire.page_digests import DigestThreads
from twostroke.cluster.wire.runtime import SYSTEM, Runtime
from twostroke.cluster.wire.secret import shared_secrets
from twostroke.cluster.wire.transport import Tcp, Transport
from twostroke.cluster.wire.value_format import digest_of
from twostroke.errors import InvalidRequest, TwostrokeError
from twostroke.kv.attention import Queries
from twostroke.kv.cache import KVCache
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

MAX_VALUES = 64  # values that arrive at once
LIMIT_S = 120.0  # seconds for a value, the rest of its prefill included


@dataclass(frozen=True)
class ReceivedValue:
    """A value that has come."""

    kv: KVCache  # the value, in the receiver's pool
    queries: Queries  # of its last entries, if the sender gave them
    state: Any  # what the sender sent along
    identity: str  # of the model that computed it (`Model.id`)
    canonical: bool  # whether that is the receiver's model too, so that its entries may enter the prefix index
    bytes_received: int  # bytes of K and V that came
    seconds: float  # from the call of `receive` on
    moving_s: float  # seconds of these in which something moved, and the sender did not wait for its prefill


class IncomingValue(Future[ReceivedValue]):
    """A value on its way. `result` waits for it and raises what kept it from coming; `cancel` never waits."""

    def __init__(self, transfer: IncomingTransfer) -> None:
        super().__init__()
        self._transfer = transfer

    def cancel(self) -> bool:
        """Give it up. Its pages are freed as soon as nothing is under way to them."""
        self._transfer.cancel()
        return super().cancel()


class Receiver:
    """Claims values and brings them into a pool, on threads of its own. Any thread may call its methods."""

    def __init__(
        self,
        pool: PagePool,  # where values go
        identity: str | None = None,  # `Model.id` of the model that continues them
        *,
        secret: str | None = None,  # what senders know too, at least 16 characters; None: as for `Sender`
        transport: Transport | None = None,  # how pages move (`open_transport`); None: TCP
        # refuse values of models with another identity (IdentityMismatch). Otherwise they are usable, not canonical.
        same_identity: bool = False,
        # accept another KV dtype, page size or layout; their entries are placed anew, and those of another dtype are
        # canonical for no model. Otherwise such values are refused.
        convert: bool = True,
        runtime: Runtime = SYSTEM,  # time, threads and connections; a simulation has its own
    ) -> None:
        """Prepare.

        Raises KVError: there is no secret.
        """
        self.pool, self.identity, self._secrets = pool, identity, shared_secrets(secret)
        self._transport, self._runtime = transport or Tcp(), runtime
        # num_mismatched: values that were refused, since a model with another identity has computed them
        self._same_identity, self._convert, self.num_mismatched = same_identity, convert, 0
        self._workers = runtime.workers("wire receiver", MAX_VALUES)
        self.transfers: dict[IncomingTransfer, None] = {}
        self._digesting = DigestThreads("wire checks", runtime.cores)
        self._lock = threading.Lock()

    def receive(self, handle: ValueHandle, limit_s: float = LIMIT_S, release: bool = True) -> IncomingValue:
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
        self, handle: ValueHandle, kv: KVCache, tokens: Sequence[int], logits: str, limit_s: float = LIMIT_S
    ) -> IncomingValue:
        """Let the sender prefill tokens after a value that both sides hold, and fetch the new entries.

        Args:
            handle: names the value of the sender's; its lease must be held, so it was received with `release=False`.
            kv: the value here, with the entries that the sender's has.
            tokens: at least one.
            logits: as in `Prefill`: "last" or "none".

        The longer value is `kv` + what comes. The future raises the errors of `receive`.
        """
        if not tokens or kv.pending is not None:
            raise InvalidRequest("a sender extends a value without a pending token, by at least one token")
        asked = {"length": len(kv), "digest": digest_of(kv), "tokens": list(tokens), "logits": logits}
        return self._start(handle, limit_s, True, asked)

    def _start(
        self, handle: ValueHandle, limit_s: float, release: bool, extend: dict[str, Any] | None
    ) -> IncomingValue:
        began = self._runtime.now()
        transfer = IncomingTransfer(self.pool, self._transport, self._digesting, began + limit_s, self._runtime)
        incoming = IncomingValue(transfer)
        self._workers.submit(lambda: self._run(incoming, transfer, handle, began, release, extend))
        return incoming

    def release(self, handle: ValueHandle) -> bool:
        """Tell a sender that a value is not wanted. Waits for the answer. Returns False if it holds it no more."""
        return self._tell("release", handle)

    def renew(self, handle: ValueHandle) -> bool:
        """Ask a sender to hold a value for longer. Waits for the answer. Returns False if it holds it no more."""
        return self._tell("renew", handle)

    @property
    def num_quarantined(self) -> int:
        """Number of pages that nobody wants, and that nobody may use yet, since something is still read into them."""
        with self._lock:
            return sum(transfer.num_quarantined for transfer in self.transfers)

    def close(self, limit_s: float = 5.0) -> None:
        """Turn away from all that is on its way."""
        with self._lock:
            transfers = list(self.transfers)
        for transfer in transfers:
            transfer.cancel()
        self._workers.close(limit_s)
        self._digesting.close()

    def _tell(self, what: str, handle: ValueHandle) -> bool:
        try:
            channel = Channel.connect(handle.address, self._secrets, runtime=self._runtime)
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
        self,
        incoming: IncomingValue,
        transfer: IncomingTransfer,
        handle: ValueHandle,
        began: float,
        release: bool,
        extend: dict[str, Any] | None,
    ) -> None:
        if not incoming.set_running_or_notify_cancel():
            return
        with self._lock:
            self.transfers[transfer] = None
        demanded = self.identity if self._same_identity else None
        try:
            transfer.open(handle, self._secrets, extend, demanded)
            transfer.accept_terms(demanded, self._convert)
            came, canonical = transfer.take(release), transfer.identity == self.identity
            took = transfer.bytes_received, self._runtime.now() - began, transfer.moving_s
            outcome = ReceivedValue(*came, transfer.identity, canonical, *took)
        except TwostrokeError as error:
            self.num_mismatched += isinstance(error, IdentityMismatch)
            outcome = error.with_traceback(None)  # it would keep pages
        except Exception as error:
            log.exception("a value could not be received")
            outcome = WireError(f"a value could not be received: {error}")
        transfer.end(self._forget)  # first, so that who learns of a failure finds the room free
        if isinstance(outcome, ReceivedValue):
            incoming.set_result(outcome)
        else:
            incoming.set_exception(outcome)

    def _forget(self, transfer: IncomingTransfer) -> None:
        with self._lock:
            self.transfers.pop(transfer, None)
