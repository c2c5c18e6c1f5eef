"""Values in the host tier: the same values, with pages in another memory."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kv.values import contents, prefill
from twostroke.backends.interface import PAGE
from twostroke.backends.rows import Stored
from twostroke.errors import KVError, OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.kv.contents import Tail
from twostroke.kv.hashed import HashIndex
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix import PrefixIndex
from twostroke.kv.radix import RadixIndex
from twostroke.kv.writer import Writer

NewPool = Callable[..., PagePool]
TAILS = [None, Tail("m", Stored(np.array([[0.5, -1.0]], np.float32))), Tail("m", pending=7)]


def facts(kv: KVCache) -> list[object]:
    models = [kv.canonical_length(model) for model in ("m", "other")]
    sizes = [len(kv), kv.nbytes, kv.overhead_bytes, kv.num_pages, kv.next_position, kv.fingerprint]
    return [kv.tokens, kv.positions, kv.tail, kv.pending, contents(kv), kv.entries().tobytes(), *models, *sizes]


def values(pool: PagePool, tail: Tail | None) -> list[KVCache]:
    kv = prefill(pool, range(11), tail=tail)
    other = prefill(kv[:6], [20, 21, 22], model="other", tail=tail)
    return [kv, kv[2:], kv[3:5], kv[:2] + kv[7:], kv[:5] + kv[5:], other, other[2:].resumed_at(30), kv[4:4], kv[:0]]


@pytest.mark.parametrize("which", range(9))
@pytest.mark.parametrize("tail", TAILS)
def test_any_value_is_the_same_in_the_host(pool: PagePool, which: int, tail: Tail | None) -> None:
    kv = values(pool, tail)[which]
    expected, table = facts(kv), kv.table.copy()
    host = kv.to("host")
    assert (kv.tier, host.tier) == ("pool", "host")
    assert facts(host) == facts(kv) == expected
    assert all(np.array_equal(host.keys(layer), kv.keys(layer)) for layer in range(2))
    assert host.to("host") is host
    del kv
    assert (pool.num_used, pool.num_copies) == (0, host.num_pages)
    assert facts(host) == expected
    back = host.to("pool")
    assert facts(back) == expected
    assert (back.table == table).all()  # attention reads the same pages
    del host
    assert (pool.num_used, pool.num_copies) == (back.num_pages, 0)
    assert facts(back) == expected


def test_values_that_share_pages_share_them_in_the_host(pool: PagePool, monkeypatch: pytest.MonkeyPatch) -> None:
    kv = prefill(pool, range(16))
    longer = prefill(kv, range(5))
    family = [kv, kv[3:], longer, kv[:2] + longer[9:]]
    bits, moved = [contents(one) for one in family], []
    read = pool.memory.read_pages
    monkeypatch.setattr(pool.memory, "read_pages", lambda frames: moved.extend(frames) or read(frames))
    host = [one.to("host") for one in family]
    assert len(moved) == len(set(moved)) == pool.num_copies == pool.num_used == 6
    del family, kv, longer
    assert (pool.num_used, pool.num_copies) == (0, 6)
    back = [one.to("pool") for one in host]
    assert pool.num_used == 6
    assert [contents(one) for one in back] == [contents(one) for one in host] == bits
    assert back[0].table[0, PAGE] == back[1].table[0, PAGE] == back[2].table[0, PAGE]
    del host
    assert pool.num_copies == 0


def test_what_is_still_in_the_pool_is_not_brought_back(pool: PagePool) -> None:
    kv = prefill(pool, range(9))
    host, held = kv.to("host"), kv[:4]
    del kv
    assert pool.num_used == 1
    back = host.to("pool")
    assert pool.num_used == 3
    assert back.table[0, PAGE] == held.table[0, PAGE]


def test_a_page_that_was_written_behind_goes_again(pool: PagePool) -> None:
    """The host's copy has the entries of the first value; the second value has more of the same page."""
    kv = prefill(pool, range(2))
    first = kv.to("host")
    longer = prefill(kv, [2])
    second = longer.to("host")
    bits = contents(longer)
    del kv, longer
    assert (pool.num_used, pool.num_copies) == (0, 1)
    assert (contents(first), contents(second)) == (bits[:2], bits)
    back, short = second.to("pool"), first.to("pool")
    del first, second
    forked = prefill(short, [9])  # after another value's entries: a copy
    assert pool.num_used == 2
    assert (contents(back), contents(forked)[:2]) == (bits, bits[:2])


def test_what_nobody_kept_is_written_over(pool: PagePool) -> None:
    kv = prefill(pool, range(2))
    host = kv.to("host")
    longer = prefill(kv, [2])
    del kv, longer
    again = prefill(host, [5])  # in place: the owner of the third slot is gone
    assert pool.num_used == 1
    assert contents(again) == contents(prefill(pool, [0, 1, 5]))


def test_values_in_the_host_are_cut_and_joined_there(pool: PagePool) -> None:
    kv = prefill(pool, range(12))
    host, bits = kv.to("host"), contents(kv)
    del kv
    for a, b in ((1, 1), (4, 4), (5, 7), (3, 9), (0, 2), (12, 12)):
        joined = host[:a] + host[b:]
        assert (joined.tier, pool.num_used) == ("host", 0)
        assert contents(joined) == bits[:a] + bits[b:]
    # Parts of two pages become one, as in the pool.
    other = prefill(pool, range(12), model="other").to("host")
    joined = host[:6] + other[6:]
    assert [span[1:] for span in joined.table.tolist()] == [[0, 4, 0], [0, 4, 4], [0, 4, 8]]
    assert contents(joined) == bits[:6] + contents(other)[6:]
    assert (pool.num_used, pool.num_copies) == (0, 7)


def test_a_join_lies_where_its_left_side_does(pool: PagePool, new_pool: NewPool) -> None:
    kv = prefill(pool, range(12))
    host, bits = kv.to("host"), contents(kv)
    assert ((host[:5] + kv[7:]).tier, (kv[:5] + host[7:]).tier) == ("host", "pool")
    assert contents(host[:5] + kv[7:]) == contents(kv[:5] + host[7:]) == bits[:5] + bits[7:]
    elsewhere = prefill(new_pool(), range(12))
    assert contents(host[:5] + elsewhere[7:]) == bits[:5] + bits[7:]
    assert (host[:5] + elsewhere[7:]).tier == "host"


def test_a_writer_brings_a_value_back(pool: PagePool) -> None:
    host = prefill(pool, range(6)).to("host")
    assert pool.num_used == 0
    longer = prefill(host, [6, 7, 8])
    assert (longer.tier, pool.num_used) == ("pool", 3)
    assert contents(longer) == contents(prefill(pool, range(9)))
    assert longer.canonical_length("m") == 9


def test_saved_and_copied_from_the_host(pool: PagePool, new_pool: NewPool, tmp_path: Path) -> None:
    kv = prefill(pool, range(11))
    kv = kv[:3] + kv[6:]
    kv.save(tmp_path / "one")
    host, bits = kv.to("host"), contents(kv)
    del kv
    host.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    there = new_pool()
    copy = host.copy_to(there)
    assert (copy.tier, contents(copy), pool.num_used) == ("pool", bits, 0)


def test_without_room_nothing_changes(new_pool: NewPool) -> None:
    pool = new_pool(num_pages=3)
    host = prefill(pool, range(9)).to("host")
    held, bits = prefill(pool, range(4)), contents(host)
    for use in (lambda: host.to("pool"), lambda: Writer(host, "m"), lambda: host.copy_to(pool)):
        with pytest.raises(OutOfPages):
            use()
        assert (pool.num_used, pool.num_copies, contents(host)) == (1, 3, bits)
    assert contents(held + host[5:]) == contents(held) + bits[5:]


@pytest.mark.parametrize("kind", [RadixIndex, HashIndex])
def test_an_index_keeps_prefixes_whose_pages_have_left(pool: PagePool, kind: type[PrefixIndex]) -> None:
    index = kind(pool, "m")
    kv = prefill(pool, range(12))
    index.insert(kv.to("host"))
    bits = contents(kv)
    assert pool.spill(kv.table[:, PAGE]) == 3
    del kv
    assert (index.num_pages, pool.num_used, pool.num_copies) == (3, 0, 3)
    hit = index.match(range(12))
    assert contents(hit) == bits
    assert index.evict(1) == 0  # it would free no page of the pool
    longer = prefill(hit, [12])
    assert (pool.num_used, pool.num_copies) == (4, 0)
    assert contents(longer)[:12] == bits
    del hit, longer
    assert index.evict(5) == 3


@pytest.mark.parametrize(
    ("tier", "why"),
    [
        ("disk", "there is no disk tier: open the model with kv_disk=DIRECTORY"),
        ("remote", "there is no remote tier: open the model with kv_remote=URL"),
        ("attic", "the tier 'attic' is unknown: use pool, host, disk or remote"),
    ],
)
def test_other_tiers_are_told(pool: PagePool, tier: str, why: str) -> None:
    with pytest.raises(KVError, match=why):
        prefill(pool, [1]).to(tier)


def test_overhead_is_what_is_held_besides_keys_and_values(pool: PagePool) -> None:
    kv = prefill(pool, range(10), tail=TAILS[1])
    assert kv.overhead_bytes == 3 * 4 * 4 + 10 * 4 + 2 * 4
    assert kv[5:].overhead_bytes == 2 * 4 * 4 + 5 * 4 + 5 * 4 + 2 * 4  # it remembers the tokens before it
    assert kv[:0].overhead_bytes == 0
