"""A value arrives as it was, with the bytes of its entries and no others."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cluster.wire.pairs import SOON_S, Pair
from tests.cluster.wire.small import TRANSPORTS, Ends, arrives, nothing_is_held, same, soon
from tests.kv.values import FULL, GEOMETRY, RECURRENT, WINDOWED, geometry, make_pool, prefill
from twostroke.backends.lazy_logits import StoredLogits
from twostroke.cluster.wire import outgoing_transfer, value_format
from twostroke.cluster.wire.channel import IdentityMismatch
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.receiver import Receiver
from twostroke.errors import GeometryMismatch, InvalidRequest, KVError
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.kv.geometry import Geometry
from twostroke.methods import method

LOGITS = Tail("m", StoredLogits(np.arange(50, dtype=np.float32)[None] / 7))


VALUES: dict[str, Callable[[KVCache], KVCache]] = {
    "whole": lambda kv: kv,
    "in whole pages": lambda kv: kv[:16].with_tail(Tail("m", pending=7)),
    "a part of one page": lambda kv: kv[5:7],
    "a slice": lambda kv: kv[6:27],
    "sinks and the last": lambda kv: kv[:2] + kv[20:],
    "every other page": lambda kv: kv[:4] + kv[8:12] + kv[16:20],
    "resumed elsewhere": lambda kv: kv[3:9].resumed_at(2),
    "moved": lambda kv: kv[3:].at(40),
    "of another model": lambda kv: prefill(kv, range(9), "n"),
    "in the host": lambda kv: kv.to("host"),
    "empty": lambda kv: kv[:0],
}


def gathered(kv: KVCache) -> KVCache:
    """Other entries for each head, and a cut of them."""
    rows = [np.arange(first, first + 21) for first in (0, 2, 4, 9)]
    return kv.gather(np.reshape(rows, (2, 2, 21)))[2:]


@pytest.mark.parametrize("cut", VALUES.values(), ids=list(VALUES))
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_groups_of_layers_arrive_as_they_were(kind: str, cut: Callable[[KVCache], KVCache]) -> None:
    """Pages that a window has given back are not sent."""
    ends = Ends(kind, geometry=WINDOWED)
    kv = cut(prefill(ends.there, range(30), tail=LOGITS))
    offer = ends.offered(kv)
    received = ends.receiver.receive(offer.handle).result(SOON_S)
    assert same(received.kv, kv)
    assert received.kv.complete == kv.complete
    assert offer.bytes_sent == received.bytes_received == kv.nbytes
    assert received.kv.num_pages == ends.here.num_used == kv.num_pages
    if kv.complete:
        assert same(prefill(received.kv, [3, 4]), prefill(kv, [3, 4]))
    del kv, received
    ends.close()
    nothing_is_held(ends.here, ends.there)


@pytest.mark.parametrize("cut", VALUES.values(), ids=list(VALUES))
@pytest.mark.parametrize("kind", TRANSPORTS)
def test_states_arrive_as_they_were(kind: str, cut: Callable[[KVCache], KVCache]) -> None:
    ends = Ends(kind, geometry=RECURRENT)
    kv = cut(prefill(ends.there, range(30), tail=LOGITS))
    received = ends.receiver.receive(ends.offered(kv).handle).result(SOON_S).kv
    assert same(received, kv)
    assert (received.nbytes, received.num_pages, received.complete) == (kv.nbytes, kv.num_pages, kv.complete)
    assert ends.here.num_used == kv.num_pages
    mine, theirs = received.states(), kv.states()
    assert (mine is None) == (theirs is None)
    assert mine is None or theirs is None or np.array_equal(mine[2], theirs[2])
    if kv.complete:
        assert same(prefill(received, [3, 4]), prefill(kv, [3, 4]))
    del kv, received
    ends.close()
    nothing_is_held(ends.here, ends.there)


@pytest.mark.parametrize("cut", [*VALUES.values(), gathered], ids=[*VALUES, "gathered"])
def test_a_value_arrives_as_it_was(ends: Ends, cut: Callable[[KVCache], KVCache]) -> None:
    kv = cut(prefill(ends.there, range(30), tail=LOGITS))
    offer = ends.offered(kv)
    received = ends.receiver.receive(offer.handle).result(SOON_S)
    assert same(received.kv, kv)
    assert offer.bytes_sent == received.bytes_received == kv.nbytes
    assert received.moving_s <= received.seconds
    assert (received.moving_s > 0) == (kv.nbytes > 0)
    assert received.canonical
    assert received.kv.num_pages == ends.here.num_used == kv.num_pages
    assert soon(lambda: ends.sender.num_offers == 0)


def test_a_value_that_grows_goes_out_page_by_page(ends: Ends) -> None:
    kv = prefill(ends.there, range(30), tail=LOGITS)
    offer = ends.sender.offer(expected=8)
    incoming = ends.receiver.receive(offer.handle)
    for length in (3, 9, 16, 29):
        offer.extend(kv[:length])
        full = length // 4 * ends.there.page_bytes
        assert soon(lambda full=full: offer.bytes_sent == full), "while the rest is computed"
    assert not incoming.done()
    offer.complete(kv, {"seed": 3})
    assert same(incoming.result(SOON_S).kv, kv)
    assert incoming.result().state == {"seed": 3}
    assert offer.bytes_sent == kv.nbytes, "nothing went twice"


def test_a_prefill_that_starts_again_sends_all_of_it_again(ends: Ends) -> None:
    first, second = prefill(ends.there, range(30)), prefill(ends.there, range(30))
    offer = ends.sender.offer()
    incoming = ends.receiver.receive(offer.handle)
    offer.extend(first[:17])
    assert soon(lambda: offer.bytes_sent == 4 * ends.there.page_bytes)
    offer.pause()
    del first
    assert soon(lambda: ends.there.num_used == second.num_pages), "nothing keeps the pages of what was preempted"
    offer.extend(second[:9])
    offer.complete(second)
    assert same(incoming.result(SOON_S).kv, second)


def test_several_receivers(ends: Ends) -> None:
    kv = prefill(ends.there, range(30), tail=LOGITS)
    offer = ends.sender.offer(receivers=3)
    pools = [ends.here, make_pool(), make_pool()]
    receivers = [ends.receiver, *(ends.new_receiver(pool) for pool in pools[1:])]
    incoming = [receiver.receive(offer.handle) for receiver in receivers[:2]]
    offer.extend(kv[:22])
    offer.complete(kv)
    assert all(same(one.result(SOON_S).kv, kv) for one in incoming)
    assert offer.lease is not None
    assert offer.lease.held
    assert same(arrives(receivers[2], offer), kv)
    assert soon(lambda: ends.sender.num_offers == 0)
    del incoming
    nothing_is_held(*pools[1:])


def test_two_at_once_do_not_disturb_each_other(ends: Ends) -> None:
    values = [prefill(ends.there, range(n, n + 9)) for n in range(8)]
    incoming = [ends.receiver.receive(ends.offered(kv).handle) for kv in values]
    assert all(same(one.result(SOON_S).kv, kv) for one, kv in zip(incoming, values, strict=True))


def test_groups(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than one message of pages."""
    monkeypatch.setattr(outgoing_transfer, "HELD_BYTES", 5 * ends.there.page_bytes)
    monkeypatch.setattr(value_format, "PIECE_BYTES", 2 * ends.there.page_bytes)
    kv = prefill(ends.there, range(39))
    assert same(arrives(ends.receiver, ends.offered(kv)), kv)


def arrives_whole(ends: Ends, receiver: Receiver, kv: KVCache) -> None:
    offer = ends.offered(kv)
    try:
        got = arrives(receiver, offer)
    except KVError as error:
        assert kv.pool.geometry.windowed
        assert "give both sides the same backend and page_size" in str(error)  # noqa: PT017
        return
    assert offer.bytes_sent == kv.nbytes
    # Of windowed layers, an entry beyond what is needed may lie in a page of this size that lacks others.
    there = ~np.isnan(got.entries())
    assert got.complete == kv.complete
    assert there[: len(FULL.layers)].all()
    assert same(got, kv) if there.all() else np.array_equal(got.entries()[there], kv.entries()[there])


@pytest.mark.parametrize("page_size", [2, 3, 4, 16])
@pytest.mark.parametrize("in_pairs", [False, True])
@pytest.mark.parametrize("groups", [GEOMETRY, WINDOWED], ids=["plain", "windowed"])
def test_pages_of_another_form_are_converted(page_size: int, in_pairs: bool, groups: Geometry) -> None:
    if in_pairs and page_size % 2:
        return
    ends = Ends(geometry=groups)
    pool = make_pool(60, page_size, groups, in_pairs=in_pairs)
    receiver = ends.new_receiver(pool)
    for cut in VALUES.values():
        arrives_whole(ends, receiver, cut(prefill(ends.there, range(30), tail=LOGITS)))
    ends.close()
    nothing_is_held(ends.there, ends.here, pool)


def test_another_dtype_is_converted_and_canonical_for_nobody() -> None:
    ends = Ends()
    pool = make_pool(geometry=replace(GEOMETRY, kv_dtype="bfloat16"))
    kv = prefill(ends.there, range(30), tail=LOGITS)
    got = arrives(ends.new_receiver(pool), ends.offered(kv))
    assert np.array_equal(got.entries().astype(np.float32), kv.entries())  # bytes, which both have
    assert (got.canonical_length("m"), kv.canonical_length("m"), got.tokens) == (0, 30, kv.tokens)
    with pytest.raises(GeometryMismatch, match="kv_dtype float32 is not bfloat16"):
        arrives(ends.new_receiver(pool, convert=False), ends.offered(kv))
    with pytest.raises(KVError, match="another size or layout"):
        arrives(ends.new_receiver(make_pool(page_size=8), convert=False), ends.offered(kv))
    ends.close()


def test_another_geometry_is_refused_in_one_line(ends: Ends) -> None:
    pool = make_pool(geometry=geometry(num_layers=3))
    kv = prefill(ends.there, range(30))
    offer = ends.offered(kv)
    with pytest.raises(GeometryMismatch, match=r"groups \[2 layers .*\] is not \[3 layers"):
        arrives(ends.new_receiver(pool), offer)
    assert same(arrives(ends.receiver, offer), kv), "its lease is still held"
    nothing_is_held(pool)


def test_another_identity_is_told_or_refused(ends: Ends) -> None:
    kv = prefill(ends.there, range(30))
    received = ends.new_receiver(ends.here, identity="n").receive(ends.offered(kv).handle).result(SOON_S)
    assert (received.identity, received.canonical, received.kv.canonical_length("n")) == ("m", False, 0)
    strict = ends.new_receiver(ends.here, identity="n", same_identity=True)
    with pytest.raises(IdentityMismatch, match="identity differs"):
        arrives(strict, ends.offered(kv))
    assert (strict.num_mismatched, ends.sender.num_mismatched) == (1, 1)


def test_handles_are_checked() -> None:
    handle = ValueHandle("localhost", 5, "a", "b")
    assert ValueHandle.from_json(handle.to_json()) == handle
    wrong: list[Any] = [None, {}, [], handle.to_json() | {"port": "5"}, handle.to_json() | {"more": 1}]
    for one in wrong:
        with pytest.raises(InvalidRequest, match="no handle"):
            ValueHandle.from_json(one)


def test_repetition_costs_the_wire_nothing(pair: Callable[..., Pair]) -> None:
    """PTDO sends the second copy alone, to the byte, and with sinks these too."""
    both = pair(max_step_tokens=7)
    entry = both.first.pool.entry_bytes
    for length in (16, 27, 40):
        for chosen, kept in ((method("repeat", sinks=0), length), (method("repeat", times=3, sinks=4), length + 4)):
            offer = both.prefilled(list(range(5, 5 + length)), chosen)
            both.second.engine.run([both.request(offer, [5], chosen, max_tokens=2)])
            assert offer.bytes_sent == kept * entry
