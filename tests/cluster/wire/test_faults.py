"""Whatever goes wrong: an error in time, no page lost, nothing half-arrived, and others undisturbed."""

# pyright: reportPrivateUsage=false

import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any

import pytest

from tests.cluster.wire.pairs import SECRET, SOON_S
from tests.cluster.wire.relay import Relay
from tests.cluster.wire.small import Ends, arrives, nothing_is_held, same, soon
from tests.kv.values import make_pool, prefill
from twostroke.cluster.wire import arriving_pages, checksum, incoming_transfer, outgoing_transfer
from twostroke.cluster.wire.channel import Channel, WireError
from twostroke.cluster.wire.lease import Lease
from twostroke.cluster.wire.receiver import ReceivedValue, Receiver
from twostroke.cluster.wire.runtime import SYSTEM
from twostroke.cluster.wire.sender import Sender
from twostroke.cluster.wire.split_programs import student_program
from twostroke.cluster.wire.transport import Tcp
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import KVError, OutOfPages


def transferred(ends: Ends) -> int:
    """Bytes that a sender says in one transfer."""
    kv = prefill(ends.there, range(30))
    with Relay(ends.offered(kv).handle) as relay:
        assert same(ends.receiver.receive(relay.handle).result(SOON_S).kv, kv)
        return relay.forwarded


def test_a_sender_that_dies_at_any_point(ends: Ends) -> None:
    total, kv = transferred(ends), prefill(ends.there, range(30))
    offer = ends.offered(kv)
    for most in sorted({0, 1, 50, 72, 80, *range(100, total, total // 24), total - 1}):
        with Relay(offer.handle, most=most) as relay, pytest.raises(WireError):
            ends.receiver.receive(relay.handle).result(SOON_S)
        nothing_is_held(ends.here)
    assert same(arrives(ends.receiver, offer), kv), "its lease is still held"


def test_bytes_that_are_altered_on_the_way(ends: Ends) -> None:
    total, kv = transferred(ends), prefill(ends.there, range(30))
    offer = ends.offered(kv)
    for flip in sorted({0, 9, 41, *range(73, total, total // 40), total - 1}):
        with Relay(offer.handle, flip=flip) as relay, pytest.raises(WireError):
            ends.receiver.receive(relay.handle, limit_s=3).result(SOON_S)
        nothing_is_held(ends.here)
    assert same(arrives(ends.receiver, offer), kv)


def test_a_page_that_is_damaged_where_it_arrives(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = prefill(ends.there, range(30))
    offer, numbers = ends.offered(kv), itertools.count()
    with monkeypatch.context() as patch:
        patch.setattr(checksum, "checksum", lambda data, kind: str(next(numbers)))  # no two are the same
        with pytest.raises(WireError, match="a checksum is wrong"):
            arrives(ends.receiver, offer)
    nothing_is_held(ends.here)
    assert same(arrives(ends.receiver, ends.offered(kv)), kv)


def test_a_network_that_stalls(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_transfer, "STALL_S", 0.3)
    total, kv = transferred(ends), prefill(ends.there, range(30))
    offer = ends.offered(kv)
    for most in range(200, total, total // 3):
        silent = pytest.raises(WireError, match="does not answer")
        with Relay(offer.handle, most=most, stalls=True) as relay, silent:
            ends.receiver.receive(relay.handle).result(SOON_S)
        nothing_is_held(ends.here)
    assert same(arrives(ends.receiver, offer), kv)


def test_a_receiver_that_dies(ends: Ends) -> None:
    """It connects, claims, and goes at each message; the lease stays for another."""
    kv = prefill(ends.there, range(30))
    offer = ends.sender.offer()
    offer.extend(kv[:20])
    for messages in range(3):
        channel = Channel.connect(offer.handle.address, ends.receiver._secrets)
        handle, pool = offer.handle, ends.here
        facts: dict[str, Any] = {"geometry": pool.geometry.fingerprint, "page_size": 4, "layout": "plain"}
        facts |= {"transport": ends.receiver._transport.name}
        if messages:
            channel.send("claim", lease=handle.lease, incarnation=handle.incarnation, **facts)
        if messages > 1:
            assert channel.receive(SOON_S)["kind"] == "terms"
            channel.send("read")
        channel.close()
    offer.complete(kv)
    assert same(arrives(ends.receiver, offer), kv)


def test_nobody_wants_it_any_more(ends: Ends) -> None:
    kv = prefill(ends.there, range(30))
    offer = ends.sender.offer(expected=8)
    offer.extend(kv[:20])
    incoming = ends.receiver.receive(offer.handle)
    assert soon(lambda: offer.bytes_sent == 5 * ends.there.page_bytes)
    assert ends.here.num_used == 8
    incoming.cancel()
    nothing_is_held(ends.here)
    offer.complete(kv)
    assert same(arrives(ends.receiver, offer), kv)


def test_entries_that_nobody_wants_any_more_keep_no_page() -> None:
    """The pages before them are free at once, not when the transfer has ended."""
    pool, coming = make_pool(), Future[ReceivedValue]()

    def technique() -> Program:
        yield Prefill([8], prefill(pool, range(8)))

    program = student_program(technique(), lambda _: coming)
    asked: Any = next(program)
    assert asked.start() is coming
    assert pool.num_used == 2
    del asked
    program.close()
    assert (pool.num_used, coming.done()) == (0, False)


def test_no_room_is_refused_in_one_line_and_hurts_nobody(ends: Ends) -> None:
    kv = prefill(ends.there, range(30))
    small = make_pool(12)
    receiver = ends.new_receiver(small)
    mine = prefill(small, range(20))
    before, offer = mine.entries(), ends.offered(kv)
    with pytest.raises(OutOfPages, match="8 more KV pages are needed and 7 of 12 are free"):
        arrives(receiver, offer)
    assert (mine.entries() == before).all()
    assert small.num_used == 5
    del mine
    assert same(arrives(receiver, offer), kv), "now there is room"
    growing = ends.sender.offer()  # nobody knows how long it will be
    longer = prefill(ends.there, range(60))
    growing.extend(longer[:32])
    incoming = receiver.receive(growing.handle)
    assert soon(lambda: growing.bytes_sent > 0)
    growing.complete(longer)
    with pytest.raises(OutOfPages):
        incoming.result(SOON_S)
    nothing_is_held(small)


def test_a_lease_ends(ends: Ends) -> None:
    kv = prefill(ends.there, range(30))
    offer = ends.offered(kv, ttl_s=0.2)
    expected, handle = kv.num_pages, offer.handle
    assert ends.there.num_used == expected
    del kv
    assert soon(lambda: ends.there.num_used == 0)
    assert offer.lease is not None
    assert offer.lease.state == "expired"
    with pytest.raises(WireError, match="its lease has ended"):
        ends.receiver.receive(handle).result(SOON_S)
    assert ends.receiver.release(handle) is False, "a late release changes nothing"
    assert ends.receiver.renew(handle) is False


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A function that puts both sides' clock forward, so that no limit is a race with the machine."""
    ahead = [0.0]
    monkeypatch.setattr(SYSTEM, "now", lambda: time.monotonic() + sum(ahead))
    return ahead.append


def test_a_lease_is_renewed_and_released(ends: Ends, passes: Callable[[float], None]) -> None:
    kv = prefill(ends.there, range(30))
    offer = ends.offered(kv, ttl_s=1000)
    for _ in range(4):
        passes(600)
        assert ends.receiver.renew(offer.handle)
    del kv
    assert ends.receiver.release(offer.handle) is True
    assert ends.receiver.release(offer.handle) is False
    assert (ends.sender.num_offers, ends.there.num_used) == (0, 0)


def test_the_states_of_a_lease() -> None:
    now = [0.0]

    def lease(receivers: int = 1) -> Lease:
        return Lease(receivers, 10, lambda: now[0])

    one = lease(2)
    now[0] += 9
    assert (one.held, one.renew()) == (True, True)
    now[0] += 9
    assert (one.receiver_done(), one.state, one.receiver_done(), one.state) == (True, "held", True, "released")
    ended = [one, lease(), lease()]
    ended[1].cancel()
    now[0] += 10
    states = [each.state for each in ended]
    assert states == ["released", "cancelled", "expired"]
    for each in ended:  # nothing that is said late brings it back
        assert (each.renew(), each.receiver_done()) == (False, False)
        each.cancel()
    assert [each.state for each in ended] == states


def test_a_prefill_that_fails_or_is_given_up(ends: Ends) -> None:
    offer = ends.sender.offer()
    incoming = ends.receiver.receive(offer.handle)
    offer.extend(prefill(ends.there, range(9)))
    offer.fail("its prefill failed: no")
    with pytest.raises(WireError, match="its prefill failed: no"):
        incoming.result(SOON_S)
    given_up = ends.sender.offer()
    assert ends.receiver.release(given_up.handle)
    given_up.complete(prefill(ends.there, range(9)))  # too late
    assert ends.sender.num_offers == 0


def test_a_sender_that_starts_again_at_the_same_address(ends: Ends) -> None:
    handle = ends.offered(prefill(ends.there, range(9))).handle
    ends.sender.close()
    other = Sender(ends.there, "m", port=handle.port, secret=SECRET)
    other.offers[handle.lease] = other.offer()  # even with the same number
    with pytest.raises(WireError, match="a process that has ended"):
        ends.receiver.receive(handle).result(SOON_S)
    other.close()
    with pytest.raises(WireError, match="cannot be reached"):
        ends.receiver.receive(handle).result(SOON_S)


def test_who_does_not_know_the_secret(ends: Ends) -> None:
    kv = prefill(ends.there, range(30))
    offer = ends.offered(kv)
    stranger = Receiver(ends.here, secret=SECRET + "!")
    with pytest.raises(WireError, match="another secret"):
        arrives(stranger, offer)
    stranger.close()
    with pytest.raises(KVError, match="too short"):
        Receiver(ends.here, secret="1234")
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(1000)):
        with socket.create_connection(offer.handle.address) as connection:
            connection.sendall(noise)
    silent = socket.create_connection(offer.handle.address)  # keeps one thread for some seconds, and nobody else
    assert same(arrives(ends.receiver, offer), kv)
    silent.close()


class Late(Tcp):
    """A transport that reads when it likes, as RDMA does, also after the receiver has turned away. It serves one side's
    memory to the other's."""

    name = "late"

    def __init__(self) -> None:
        self.go, self.begun, self.read = threading.Event(), 0, 0  # pages whose read has begun, and that were read
        self.there: Any = None
        self.here: Any = None

    def memory(self) -> Any:
        return {}

    def reader(self, memory: dict[str, Any]) -> Any:
        return self

    def begin(self, places: Sequence[int], frames: Sequence[int]) -> "LateReading":
        return LateReading(self, places, frames)


class LateReading:
    def __init__(self, late: Late, places: Sequence[int], frames: Sequence[int]) -> None:
        self._late, self._thread = late, threading.Thread(target=self._read, args=(places, frames))
        self._thread.start()
        late.begun += len(places)

    def _read(self, places: Sequence[int], frames: Sequence[int]) -> None:
        assert self._late.go.wait(SOON_S)
        for place, frame in zip(places, frames, strict=True):
            self._late.here.write_page(frame, self._late.there.read_pages([place])[0])
            self._late.read += 1

    def wait(self, limit_s: float) -> bool:
        self._thread.join(limit_s)
        return not self._thread.is_alive()


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Late, Ends]]:
    monkeypatch.setattr(incoming_transfer, "END_S", 0.05)
    transport = Late()
    ends = Ends(pages=20, transport=transport)
    transport.here, transport.there = ends.here.memory, ends.there.memory
    yield transport, ends
    transport.go.set()
    ends.close()
    nothing_is_held(ends.here, ends.there)


@pytest.mark.parametrize("how", ["cancelled", "too late", "closed"])
def test_a_late_read_never_reaches_a_page_of_somebody_else(
    how: str, late: tuple[Late, Ends], passes: Callable[[float], None]
) -> None:
    """Until it has ended, the pages are nobody's."""
    transport, ends = late
    kv = prefill(ends.there, range(40))
    incoming = ends.receiver.receive(ends.offered(kv).handle, limit_s=1000)
    assert soon(lambda: transport.begun == 10 == ends.here.num_used)  # pages are reserved before a read begins
    if how == "closed":
        ends.sender.close(0.1)
    if how == "too late":
        passes(1000)
    if how == "cancelled":
        incoming.cancel()
    else:
        with pytest.raises(WireError):
            incoming.result(SOON_S)
    assert soon(lambda: ends.receiver.num_quarantined == 10)
    mine = prefill(ends.here, range(40))
    before = mine.entries()
    with pytest.raises(OutOfPages):
        prefill(ends.here, range(4))
    transport.go.set()
    assert soon(lambda: ends.here.num_used == 10 and ends.receiver.num_quarantined == 0)
    assert transport.read == 10
    assert (mine.entries() == before).all()


def test_what_is_read_when_it_is_somebody_elses_is_not_the_value(
    late: tuple[Late, Ends], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender holds its pages for so long and no longer; the receiver sees that it has read others."""
    monkeypatch.setattr(outgoing_transfer, "ANSWER_S", 0.2)
    monkeypatch.setattr(arriving_pages, "ALIVE_S", SOON_S)  # it says nothing meanwhile
    transport, ends = late
    kv = prefill(ends.there, range(40))
    offer = ends.offered(kv)
    incoming = ends.receiver.receive(offer.handle)
    assert soon(lambda: transport.begun == 10 == ends.here.num_used)
    offer.fail("nobody wants it any more")
    del kv, offer
    assert soon(lambda: ends.there.num_used == 0), "the sender does not wait for ever"
    other = prefill(ends.there, range(100, 180))
    transport.go.set()
    with pytest.raises(WireError):
        incoming.result(SOON_S)
    del other


def test_a_slow_read_keeps_its_sender_waiting(late: tuple[Late, Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver says that it is alive."""
    monkeypatch.setattr(outgoing_transfer, "ANSWER_S", 0.6)
    monkeypatch.setattr(arriving_pages, "ALIVE_S", 0.1)
    transport, ends = late
    kv = prefill(ends.there, range(40))
    incoming = ends.receiver.receive(ends.offered(kv).handle)
    threading.Timer(1.5, transport.go.set).start()
    assert same(incoming.result(SOON_S).kv, kv)


def test_a_read_that_takes_too_long_is_given_up(late: tuple[Late, Ends], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incoming_transfer, "STALL_S", 0.3)
    transport, ends = late
    kv = prefill(ends.there, range(40))
    incoming = ends.receiver.receive(ends.offered(kv).handle)
    with pytest.raises(WireError, match="memory does not answer"):
        incoming.result(SOON_S)
    assert ends.receiver.num_quarantined == 10
    transport.go.set()
    nothing_is_held(ends.here)


@pytest.mark.parametrize(
    ("sends", "receives", "meet"), [("old", "old,new", True), ("new,old", "old,new", True), ("new,old", "old", False)]
)
def test_secrets_are_replaced_one_side_after_the_other(ends: Ends, sends: str, receives: str, meet: bool) -> None:
    """The sender proves itself with its first secret; the receiver knows it if it is one of its own."""
    sides = [",".join(f"{word} secret of the wire" for word in side.split(",")) for side in (sends, receives)]
    kv = prefill(ends.there, range(30))
    with closing(Sender(ends.there, "m", secret=sides[0])) as sender:
        offer = sender.offer()
        offer.complete(kv)
        receiver = ends.new_receiver(ends.here, secret=sides[1])
        if meet:
            assert same(arrives(receiver, offer), kv)
        else:
            with pytest.raises(WireError, match="another secret"):
                arrives(receiver, offer)
