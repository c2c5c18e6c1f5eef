"""Offers values to other processes, and sends them to those who claim them."""

import logging
import secrets
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from twostroke.cluster.wire.channel import MISMATCH, Channel, Message, WireError
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.lease import TTL_S
from twostroke.cluster.wire.offer import ValueOffer
from twostroke.cluster.wire.outgoing_transfer import OutgoingTransfer
from twostroke.cluster.wire.page_digests import DigestThreads
from twostroke.cluster.wire.runtime import SYSTEM, Runtime
from twostroke.cluster.wire.secret import shared_secrets
from twostroke.cluster.wire.transport import Tcp, Transport
from twostroke.errors import KVError, TwostrokeError
from twostroke.kv.cache import KVCache
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
MAX_CONNECTIONS = 64  # connections at once
MAX_PREFILLS = 16  # prefills for receivers at once
MAX_REMEMBERED = 10_000  # values that are gone, of which it is known why
SWEEP_S = 0.25  # seconds between looks at leases
Compute = Callable[[KVCache, list[int], str], KVCache]  # (value, tokens, which logits) -> the longer value


class Sender:
    """Listens for receivers. Its methods may be called from any thread; none of them waits for a network.

    Attributes:
        host, port: where it listens.
        incarnation: a random number, new with every sender.
        num_mismatched: claims that were refused, since the receiver's model has another identity.
    """

    def __init__(
        self,
        pool: PagePool,  # the pool of the values that are offered
        identity: str,  # `Model.id` of the model that computes them, told to receivers
        *,
        # host, port: where to listen; port 0: any free one. Only this machine reaches the default.
        host: str = LOOPBACK,
        port: int = 0,
        advertise: str | None = None,  # the host in handles, if receivers know this machine by another name
        # what receivers must know too, at least 16 characters (see `wire.secret`); None: the environment's, or one made
        # from the user's key
        secret: str | None = None,
        transport: Transport | None = None,  # how pages move (`open_transport`); None: TCP
        # prefills tokens after a value that a receiver holds too, and asks to extend (`Receiver.extend`). It is called
        # on threads of its own, a few at a time. None: nothing is computed for receivers.
        compute: Compute | None = None,
        runtime: Runtime = SYSTEM,  # time, threads and connections; a simulation has its own
    ) -> None:
        """Listen.

        Raises:
            WireError: the address cannot be used. KVError: there is no secret.
        """
        self._pool, self.identity, self._secrets = pool, identity, shared_secrets(secret)
        self._transport, self._runtime = transport or Tcp(), runtime
        try:
            self._listener = runtime.listen((host, port))
        except OSError as error:
            raise WireError(f"cannot listen at {host}:{port}: {error.strerror or error}") from None
        self.host, self.port = advertise or host, int(self._listener.getsockname()[1])
        self.incarnation, self.num_mismatched = secrets.token_hex(8), 0
        self.offers: dict[str, ValueOffer] = {}
        self.ended: dict[str, str] = {}  # why values are not there any more
        self.channels: dict[Channel, None] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._workers = runtime.workers("wire sender", MAX_CONNECTIONS)
        self._computing = runtime.workers("wire prefill", MAX_PREFILLS)
        self._digesting = DigestThreads("wire digests", runtime.cores)
        self._compute = compute
        self._thread = runtime.start("wire listener", self._listen)

    def offer(self, expected: int | None = None, receivers: int = 1, ttl_s: float = TTL_S) -> ValueOffer:
        """A value that will be sent to who claims it, from now on: it may still have to be computed.

        Args:
            expected: number of pages that it will have, at most; None: receivers reserve room as it grows.
            receivers: how many are to have it, before its pages are let go.
            ttl_s: seconds that it is held for them once it is complete, from the last sign of life of a transfer.

        Raises WireError: the sender is closed.
        """
        handle = ValueHandle(self.host, self.port, self.incarnation, secrets.token_hex(8))
        offer = ValueOffer(handle, expected, receivers, ttl_s, self._runtime)
        with self._lock:
            if self._closed:
                raise WireError("this sender is closed")
            self.offers[handle.lease] = offer
        return offer

    @property
    def num_offers(self) -> int:
        """Number of values that are held, or are still to be computed."""
        self._sweep()
        return len(self.offers)

    def close(self, limit_s: float = 5.0) -> None:
        """Stop listening, end all transfers, and let go of all values. A second call does nothing."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            offers, channels = list(self.offers.values()), list(self.channels)
        for offer in offers:
            offer.fail("its sender was closed")
        for channel in channels:
            channel.shut()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(limit_s)
        self._listener.close()
        self._workers.close(limit_s)
        self._computing.close(limit_s)
        self._digesting.close()

    # Threads ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        self._listener.settimeout(SWEEP_S)
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                self._sweep()
                continue
            except OSError:  # closed, or out of files for a moment
                if self._closed:
                    return
                continue
            self._workers.submit(lambda connection=connection: self._serve(connection))

    def _sweep(self) -> None:
        with self._lock:
            offers = list(self.offers.items())
        for lease, offer in offers:
            if (why := offer.sweep()) is not None:
                with self._lock:
                    self.offers.pop(lease, None)
                    self.ended[lease] = why
                    while len(self.ended) > MAX_REMEMBERED:
                        del self.ended[next(iter(self.ended))]

    def _serve(self, connection: socket.socket) -> None:
        try:
            channel = Channel.accept(connection, self._secrets, self._runtime)
        except WireError as error:
            log.warning("a connection was refused: %s", error)
            return
        with self._lock:
            self.channels[channel] = None
        try:
            if not self._closed:
                self._answer(channel, channel.receive(5.0))
        except KVError as error:
            log.info("a transfer ended: %s", error)
        finally:
            channel.close()
            with self._lock:
                del self.channels[channel]

    def _answer(self, channel: Channel, asked: Message) -> None:
        self._sweep()
        own, lease = asked["incarnation"] == self.incarnation, asked["lease"]
        if not own or (offer := self.offers.get(lease)) is None:
            why = self.ended.get(lease) if own else "it was offered by a process that has ended"
            channel.send("gone", why=why or "there is no such value")
            return
        if asked.get("identity") not in (None, self.identity):
            self.num_mismatched += 1
            log.warning("%s was refused a value: its model has another identity (weights, or kernels)", channel.peer)
            channel.send("gone", why=MISMATCH, mismatch=True)
            return
        offer.renew()
        answers: dict[str, Any] = {
            "claim": self._send,
            "extend": self._extend,
            "release": self._release,
            "renew": self._renew,
        }
        answers[asked["kind"]](channel, asked, offer)

    def _send(self, channel: Channel, asked: Message, offer: ValueOffer) -> None:
        try:
            way = self._transport, self._digesting, self._runtime.now
            OutgoingTransfer(channel, asked, offer, self._pool, self.identity, *way).run()
        except WireError:
            raise
        except KVError as error:  # of this side: the receiver is told
            channel.send("gone", why=str(error))
            raise

    def _extend(self, channel: Channel, asked: Message, offer: ValueOffer) -> None:
        """Compute entries after those that the receiver has, and send them."""
        part = ValueOffer(offer.handle, runtime=self._runtime)
        self._computing.submit(lambda: self._prefill(asked, offer, part))
        try:
            self._send(channel, asked, part)
        finally:
            part.fail("it was sent")

    def _prefill(self, asked: Message, offer: ValueOffer, part: ValueOffer) -> None:
        try:
            if self._compute is None:
                raise KVError("this sender does not extend values")
            if (base := offer.find_prefix(length := asked["length"], asked["digest"])) is None:
                raise KVError("the value to extend is not held here")
            longer = self._compute(base, asked["tokens"], asked["logits"])
            offer.add_longer(longer)
            part.complete(longer[length:])
        except TwostrokeError as error:
            part.fail(str(error))
        except Exception as error:
            log.exception("a prefill for a receiver failed")
            part.fail(f"its prefill failed: {error}")

    def _release(self, channel: Channel, asked: Message, offer: ValueOffer) -> None:
        if offer.lease is None:
            offer.fail("nobody wants it any more")
        else:
            offer.lease.receiver_done()
        self._sweep()
        channel.send("ok")

    def _renew(self, channel: Channel, asked: Message, offer: ValueOffer) -> None:
        channel.send("ok")
