"""Senders and receivers over pools without a model."""

import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.cluster.wire.pairs import SECRET, SOON_S
from tests.kv.counts import check_counts
from tests.kv.values import GEOMETRY, make_pool, same_tail
from twostroke.cluster.wire.nixl import unavailable
from twostroke.cluster.wire.offer import ValueOffer
from twostroke.cluster.wire.receiver import Receiver
from twostroke.cluster.wire.sender import Sender
from twostroke.cluster.wire.transport import Transport, open_transport
from twostroke.kv.cache import KVCache
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool

MISSING = unavailable(make_pool())
TRANSPORTS = ["tcp", pytest.param("nixl", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING)))]


class Ends:
    """One sender, and any number of receivers."""

    def __init__(
        self, kind: Any = "tcp", pages: int = 60, transport: Transport | None = None, geometry: Geometry = GEOMETRY
    ) -> None:
        self._kind, self._opened, self._receivers = kind, list[Transport](), list[Receiver]()
        self.there = make_pool(pages, geometry=geometry)
        self.sender = Sender(self.there, "m", secret=SECRET, transport=transport or self._transport(self.there))
        self.here = make_pool(pages, geometry=geometry)
        self.receiver = self.new_receiver(self.here, transport=transport)

    def _transport(self, pool: PagePool) -> Transport:
        self._opened.append(open_transport(self._kind, pool))
        return self._opened[-1]

    def new_receiver(self, pool: PagePool, transport: Transport | None = None, **options: Any) -> Receiver:
        given: dict[str, Any] = {"identity": "m", "secret": SECRET} | options
        self._receivers.append(Receiver(pool, transport=transport or self._transport(pool), **given))
        return self._receivers[-1]

    def offered(self, kv: KVCache, **options: Any) -> ValueOffer:
        offer = self.sender.offer(**options)
        offer.complete(kv)
        return offer

    def close(self) -> None:
        for receiver in self._receivers:
            receiver.close()
        self.sender.close()
        for transport in self._opened:
            transport.close()


def arrives(receiver: Receiver, offer: ValueOffer) -> KVCache:
    return receiver.receive(offer.handle).result(SOON_S).kv


def same(one: KVCache, other: KVCache) -> bool:
    """Whether two values have the same entries, provenance and continuation."""
    stretches = [[(s.count, s.model, s.before.tolist()) for s in kv.stretches] for kv in (one, other)]
    return (
        np.array_equal(one.entries(), other.entries(), equal_nan=True)
        and (one.tokens, one.positions, one.next_position) == (other.tokens, other.positions, other.next_position)
        and np.array_equal(one.head_positions, other.head_positions)  # pyright: ignore[reportArgumentType]
        and stretches[0] == stretches[1]
        and same_tail(one.tail, other.tail)
    )


def soon(true: Callable[[], bool]) -> bool:
    """Whether it becomes true soon."""
    until = time.monotonic() + SOON_S
    while not true() and time.monotonic() < until:
        time.sleep(0.005)
    return true()


def nothing_is_held(*pools: PagePool) -> None:
    """Raise AssertionError unless all pages of pools become free soon."""
    for pool in pools:
        if pool.num_used:  # a caught exception and its frame form a cycle, which keeps the frame's values
            gc.collect()
        assert soon(lambda pool=pool: pool.num_used == 0 and not pool.pins), (pool.num_used, pool.pins)
        check_counts(pool, [])
