"""What a checksum finds, which kind is used between whom, and what neighbours know of each other."""

from collections.abc import Callable
from typing import Any, get_args

import numpy as np
import pytest
from blake3 import blake3
from xxhash import xxh3_128

from tests.cluster.wire.pairs import SECRET, SOON_S
from tests.cluster.wire.small import Ends, same
from tests.kv.values import prefill
from twostroke.cluster.wire import checksum
from twostroke.cluster.wire.checksum import Kind, is_right, kind_between
from twostroke.cluster.wire.runtime import SYSTEM, SystemRuntime
from twostroke.cluster.wire.sender import Sender

KINDS: tuple[Kind, ...] = get_args(Kind)
# Of no bytes: the lists of test values of both projects.
EMPTY = {"xxh3": "99aa06d3014798d86001c324468d497f", "blake3": "af1349b9f5f9a1a6a0404dea36dcc949"}
HASHERS: dict[Kind, Callable[[], Any]] = {"xxh3": xxh3_128, "blake3": blake3}


def some_bytes(count: int) -> bytearray:
    return bytearray(np.random.default_rng(count).bytes(count))


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_that_is_another_is_found_wherever_it_is(kind: Kind) -> None:
    page = some_bytes(6 * 1024 + 40)  # several blocks of both, and a rest
    right = checksum.checksum(memoryview(page), kind)
    assert is_right(memoryview(page), right)
    for place in range(len(page)):
        page[place] ^= 1 << place % 8
        assert not is_right(memoryview(page), right), place
        page[place] ^= 1 << place % 8
    assert is_right(memoryview(page), right)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_late_write_leaves_is_found(kind: Kind) -> None:
    """Memory pages of the system (4 KiB) that are still those of before, are zeros, or have changed places."""
    before, page = some_bytes(16 << 10), some_bytes((16 << 10) + 1)[: 16 << 10]
    right, step = checksum.checksum(memoryview(page), kind), 4096
    for start in range(0, len(page), step):
        there = slice(start, start + step)
        for other in (before[there], bytes(step), page[:step] if start else page[step : 2 * step]):
            assert not is_right(memoryview(page[:start] + other + page[start + step :]), right)
    assert not is_right(memoryview(page[step : 2 * step] + page[:step] + page[2 * step :]), right)
    assert not is_right(memoryview(page[:-1]), right)


@pytest.mark.parametrize("kind", KINDS)
def test_made_in_pieces_it_is_the_one_of_the_whole(kind: Kind) -> None:
    page = some_bytes(70_001)
    for size in (1, 63, 64, 1024, 4096, 65_536):
        hasher = HASHERS[kind]()
        for start in range(0, len(page), size):
            hasher.update(page[start : start + size])
        assert checksum.checksum(memoryview(page), kind) == f"{kind}:{hasher.digest().hex()[:32]}"
    assert checksum.checksum(memoryview(b""), kind) == f"{kind}:{EMPTY[kind]}"


def test_one_kind_is_not_taken_for_the_other() -> None:
    page = memoryview(some_bytes(5000))
    xxh3, blake = (checksum.checksum(page, kind) for kind in ("xxh3", "blake3"))
    for wrong in (xxh3.replace("xxh3", "blake3"), blake.replace("blake3", "xxh3"), xxh3[5:], blake[7:], "xxh3:", ""):
        assert not is_right(page, wrong)


def test_where_there_may_be_a_network_it_is_blake3() -> None:
    assert kind_between("a", "a") == "xxh3"
    assert {kind_between(*pair) for pair in (("a", "b"), ("a", None), (None, "a"), (None, None))} == {"blake3"}
    assert SYSTEM.machine == SystemRuntime().machine, "all processes of a machine have one name for it"


def kinds_used(patch: pytest.MonkeyPatch) -> set[Kind]:
    """The kinds of the checksums of pages that are made from now on."""
    made, used = checksum.checksum, set[Kind]()

    def noted(data: memoryview, kind: Kind) -> str:
        used.add(kind)
        return made(data, kind)

    patch.setattr(checksum, "checksum", noted)
    return used


@pytest.mark.parametrize(
    ("machine", "kind"), [(SYSTEM.machine, kind_between(SYSTEM.machine, SYSTEM.machine)), ("b", "blake3")]
)
def test_the_kind_in_a_transfer(machine: str | None, kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    used = kinds_used(monkeypatch)
    ends, there = Ends(), SystemRuntime()
    there.machine = machine
    receiver = ends.new_receiver(ends.here, runtime=there)
    kv = prefill(ends.there, range(30))
    assert same(receiver.receive(ends.offered(kv).handle).result(SOON_S).kv, kv)
    assert used == {kind}
    ends.close()


def test_a_connection_to_another_address_may_leave_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the other side finds the same name, as in copies of a virtual machine."""
    used = kinds_used(monkeypatch)
    ends = Ends()
    sender = Sender(ends.there, "m", host="127.0.0.2", secret=SECRET)
    kv, offer = prefill(ends.there, range(30)), sender.offer()
    offer.complete(kv)
    assert same(ends.receiver.receive(offer.handle).result(SOON_S).kv, kv)
    assert used == {"blake3"}
    sender.close()
    ends.close()
