"""Digests are made and checked piece by piece, on other threads where there are cores for them."""

from collections.abc import Iterator

import numpy as np
import pytest

from tests.cluster.wire.pairs import SOON_S
from tests.cluster.wire.relay import Relay
from tests.cluster.wire.small import Ends, arrives, nothing_is_held, same
from tests.kv.values import make_pool, prefill
from twostroke.cluster.wire import page_digests, value_format
from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.checksum import Kind, checksum
from twostroke.cluster.wire.page_digests import DigestThreads, IncomingChecks, OutgoingDigests
from twostroke.kv.page_contents import reading

KIND: Kind = "xxh3"


@pytest.fixture(params=[2, 5], ids=["two cores", "five cores"])
def digesting(request: pytest.FixtureRequest) -> Iterator[DigestThreads]:
    digesting = DigestThreads("wire test", request.param)
    assert digesting.ahead == request.param - 2
    yield digesting
    digesting.close()


def test_digests_of_pages_that_are_about_to_be_sent(digesting: DigestThreads, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = make_pool()
    monkeypatch.setattr(value_format, "PIECE_BYTES", 3 * pool.page_bytes)
    kv = prefill(pool, range(39))
    pages = value_format.whole_pages(kv)
    with reading(pool, np.array(pages), np.full(len(pages), pool.page_size)) as sources:
        known: dict[tuple[Kind, int], str] = {(KIND, pages[1]): "known", ("blake3", pages[0]): "another"}
        with OutgoingDigests(digesting, KIND, 100, pages, sources, known) as ahead:
            made = [checksum(source.data(), KIND) for source in sources]
            made[1] = "known"
            assert ahead([100, 101, 102]) == made[:3]
            assert ahead([104, 107]) == [made[4], made[7]], "as where some pages are in another tier"
            assert ahead([len(pages) + 99]) == made[-1:]
    assert set(known) == {*((KIND, page) for page in pages), ("blake3", pages[0])}


def test_the_last_of_a_page_counts(digesting: DigestThreads) -> None:
    first, second, other = (memoryview(value * 4096) for value in (b"a", b"b", b"c"))
    right = {view: checksum(view, KIND) for view in (first, second, other)}
    came = IncomingChecks(digesting)
    came.add([0, 1], [first, other], [right[second], right[other]])
    came.add([0], [second], [right[second]])
    assert came.settle()
    came.add([1], [other], [right[first]])
    assert not came.settle()
    came.close()


def test_transfers_with_threads_for_digests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_digests, "usable_cores", lambda: 4)
    ends = Ends()
    monkeypatch.setattr(value_format, "PIECE_BYTES", 2 * ends.there.page_bytes)
    kv = prefill(ends.there, range(39))
    offer = ends.offered(kv)
    total = 0
    with Relay(offer.handle) as relay:
        assert same(ends.receiver.receive(relay.handle, release=False).result(SOON_S).kv, kv)
        total = relay.forwarded
    for flip in range(100, total, total // 12):
        with Relay(offer.handle, flip=flip) as relay, pytest.raises(WireError):
            ends.receiver.receive(relay.handle, limit_s=3).result(SOON_S)
        nothing_is_held(ends.here)
    assert same(arrives(ends.receiver, offer), kv)
    ends.close()
    del kv
    nothing_is_held(ends.here, ends.there)
