"""Values in other tiers: the same values, with pages elsewhere."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.kv.tiers.memory_store import MemoryStore
from tests.kv.values import contents, make_pool, prefill
from twostroke.backends.interface import PAGE
from twostroke.backends.lazy_logits import StoredLogits
from twostroke.errors import KVError, OutOfPages, PageLost
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.kv.tier_moves import spill
from twostroke.kv.writer import KVWriter

NewPool = Callable[..., PagePool]
TIERS = ["host", "disk", "remote"]
TAILS = [None, Tail("m", StoredLogits(np.array([[0.5, -1.0]], np.float32))), Tail("m", pending=7)]


def facts(kv: KVCache) -> list[object]:
    models = [kv.canonical_length(model) for model in ("m", "other")]
    sizes = [len(kv), kv.nbytes, kv.entry_table.nbytes, kv.num_pages, kv.next_position, kv.fingerprint]
    return [kv.tokens, kv.positions, kv.tail, kv.pending, contents(kv), kv.entries().tobytes(), *models, *sizes]


def values(pool: PagePool, tail: Tail | None) -> list[KVCache]:
    kv = prefill(pool, range(11), tail=tail)
    other = prefill(kv[:6], [20, 21, 22], model="other", tail=tail)
    return [kv, kv[2:], kv[3:5], kv[:2] + kv[7:], kv[:5] + kv[5:], other, other[2:].resumed_at(30), kv[4:4], kv[:0]]


@pytest.mark.parametrize("which", range(9))
@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("tier", TIERS)
def test_any_value_is_the_same_in_another_tier(pool: PagePool, which: int, tail: Tail | None, tier: str) -> None:
    kv = values(pool, tail)[which]
    expected, table = facts(kv), kv.table.copy()
    away = kv.to(tier)
    assert (kv.tier, away.tier) == ("pool", tier)
    assert facts(away) == facts(kv) == expected
    assert all(np.array_equal(away.keys(layer), kv.keys(layer)) for layer in range(2))
    assert away.to(tier) is away
    del kv
    assert (pool.num_used, pool.num_in(tier)) == (0, away.num_pages)
    assert facts(away) == expected
    back = away.to("pool")
    assert facts(back) == expected
    assert (back.table == table).all()  # attention reads the same pages
    del away
    assert (pool.num_used, pool.num_in(tier)) == (back.num_pages, 0)
    assert facts(back) == expected


@pytest.mark.parametrize("tier", TIERS)
def test_values_that_share_pages_share_them_in_another_tier(
    pool: PagePool, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    kv = prefill(pool, range(16))
    longer = prefill(kv, range(5))
    family = [kv, kv[3:], longer, kv[:2] + longer[9:]]
    bits, moved = [contents(one) for one in family], []
    read = pool.memory.read_pages
    monkeypatch.setattr(pool.memory, "read_pages", lambda frames: moved.extend(frames) or read(frames))
    away = [one.to(tier) for one in family]
    assert len(moved) == len(set(moved)) == pool.num_in(tier) == pool.num_used == 6
    del family, kv, longer
    assert (pool.num_used, pool.num_in(tier)) == (0, 6)
    back = [one.to("pool") for one in away]
    assert pool.num_used == 6
    assert [contents(one) for one in back] == [contents(one) for one in away] == bits
    assert back[0].table[0, PAGE] == back[1].table[0, PAGE] == back[2].table[0, PAGE]
    del away
    assert pool.num_in(tier) == 0


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_still_in_the_pool_is_not_brought_back(pool: PagePool, tier: str) -> None:
    kv = prefill(pool, range(9))
    away, held = kv.to(tier), kv[:4]
    del kv
    assert pool.num_used == 1
    back = away.to("pool")
    assert pool.num_used == 3
    assert back.table[0, PAGE] == held.table[0, PAGE]


@pytest.mark.parametrize("tier", TIERS)
def test_a_page_that_was_written_behind_goes_again(pool: PagePool, tier: str) -> None:
    """The copy has the entries of the first value; the second value has more of the same page."""
    kv = prefill(pool, range(2))
    first = kv.to(tier)
    longer = prefill(kv, [2])
    second = longer.to(tier)
    bits = contents(longer)
    del kv, longer
    assert (pool.num_used, pool.num_in(tier)) == (0, 1)
    assert (contents(first), contents(second)) == (bits[:2], bits)
    back, short = second.to("pool"), first.to("pool")
    del first, second
    forked = prefill(short, [9])  # after another value's entries: a copy
    assert pool.num_used == 2
    assert (contents(back), contents(forked)[:2]) == (bits, bits[:2])


@pytest.mark.parametrize("tier", TIERS)
def test_what_nobody_kept_is_written_over(pool: PagePool, tier: str) -> None:
    kv = prefill(pool, range(2))
    away = kv.to(tier)
    longer = prefill(kv, [2])
    del kv, longer
    again = prefill(away, [5])  # in place: the owner of the third slot is gone
    assert pool.num_used == 1
    assert contents(again) == contents(prefill(pool, [0, 1, 5]))


@pytest.mark.parametrize("tier", TIERS)
def test_values_in_another_tier_are_cut_and_joined_there(pool: PagePool, tier: str) -> None:
    kv = prefill(pool, range(12))
    away, bits = kv.to(tier), contents(kv)
    del kv
    for a, b in ((1, 1), (4, 4), (5, 7), (3, 9), (0, 2), (12, 12)):
        joined = away[:a] + away[b:]
        assert (joined.tier, pool.num_used) == (tier, 0)
        assert contents(joined) == bits[:a] + bits[b:]
    # Parts of two pages become one, as in the pool.
    other = prefill(pool, range(12), model="other").to(tier)
    joined = away[:6] + other[6:]
    assert [span[:PAGE] for span in joined.table.tolist()] == [[0, 4, 0], [0, 4, 4], [0, 4, 8]]
    assert contents(joined) == bits[:6] + contents(other)[6:]
    assert (pool.num_used, pool.num_in(tier)) == (0, 7)


@pytest.mark.parametrize("tier", TIERS)
def test_a_join_lies_where_its_left_side_does(pool: PagePool, new_pool: NewPool, tier: str) -> None:
    kv = prefill(pool, range(12))
    away, bits = kv.to(tier), contents(kv)
    assert ((away[:5] + kv[7:]).tier, (kv[:5] + away[7:]).tier) == (tier, "pool")
    assert contents(away[:5] + kv[7:]) == contents(kv[:5] + away[7:]) == bits[:5] + bits[7:]
    elsewhere = prefill(new_pool(), range(12))
    assert contents(away[:5] + elsewhere[7:]) == bits[:5] + bits[7:]
    assert (away[:5] + elsewhere[7:]).tier == tier


@pytest.mark.parametrize("tier", TIERS)
def test_a_writer_brings_a_value_back(pool: PagePool, tier: str) -> None:
    away = prefill(pool, range(6)).to(tier)
    assert pool.num_used == 0
    longer = prefill(away, [6, 7, 8])
    assert (longer.tier, pool.num_used) == ("pool", 3)
    assert contents(longer) == contents(prefill(pool, range(9)))
    assert longer.canonical_length("m") == 9


@pytest.mark.parametrize("tier", TIERS)
def test_saved_and_copied_from_another_tier(pool: PagePool, new_pool: NewPool, tmp_path: Path, tier: str) -> None:
    kv = prefill(pool, range(11))
    kv = kv[:3] + kv[6:]
    kv.save(tmp_path / "one")
    away, bits = kv.to(tier), contents(kv)
    del kv
    away.save(tmp_path / "two")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    there = new_pool()
    copy = away.copy_to(there)
    assert (copy.tier, contents(copy), pool.num_used) == ("pool", bits, 0)


@pytest.mark.parametrize("tier", TIERS)
def test_without_room_nothing_changes(new_pool: NewPool, tier: str) -> None:
    pool = new_pool(num_pages=3)
    away = prefill(pool, range(9)).to(tier)
    held, bits = prefill(pool, range(4)), contents(away)
    for use in (lambda: away.to("pool"), lambda: KVWriter(away, "m"), lambda: away.copy_to(pool)):
        with pytest.raises(OutOfPages):
            use()
        assert (pool.num_used, pool.num_in(tier), contents(away)) == (1, 3, bits)
    assert contents(held + away[5:]) == contents(held) + bits[5:]


def test_an_index_keeps_prefixes_whose_pages_have_left(pool: PagePool) -> None:
    index = PrefixIndex(pool, "m")
    kv = prefill(pool, range(12))
    index.insert(kv)
    bits = contents(kv)
    assert spill(pool, kv.table[:, PAGE]) == 3
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


@pytest.mark.parametrize("tier", TIERS)
def test_a_value_says_where_it_is(pool: PagePool, tier: str) -> None:
    kv = prefill(pool, range(5))
    assert repr(kv) == "KVCache(5 entries, positions 0 to 4, 640 bytes in 2 pages)"
    assert repr(kv.to(tier)) == f"KVCache(5 entries, positions 0 to 4, 640 bytes in 2 pages, tier {tier})"


@pytest.mark.parametrize("one", TIERS)
@pytest.mark.parametrize("other", TIERS)
def test_from_any_tier_to_any_other(pool: PagePool, one: str, other: str) -> None:
    kv = prefill(pool, range(6))
    bits, kv = contents(kv), kv.to(one)
    moved = kv.to(other)
    assert (contents(kv), contents(moved), pool.num_used) == (bits, bits, 0)
    del kv
    assert {tier: pool.num_in(tier) for tier in TIERS} == {tier: 2 * (tier == other) for tier in TIERS}
    assert contents(moved) == bits


def test_no_other_values_entries_are_written(pool: PagePool) -> None:
    """Slots of a page that belong to other values are zeros in a store."""
    kv = prefill(pool, range(6))
    longer = prefill(kv, [6])
    away = kv.to("disk")
    store = pool.stores["disk"]
    assert isinstance(store, MemoryStore)
    pages = [np.frombuffer(page, np.float32).reshape(2, 2, 2, 4, 4) for page in store.private.values()]
    assert sorted(np.count_nonzero(page[..., 2:, :]) > 0 for page in pages) == [False, True]
    assert contents(away) == contents(longer)[:6]


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_lost_pages_leave_the_facts(pool: PagePool, tier: str, tmp_path: Path) -> None:
    kv = prefill(pool, range(6), tail=TAILS[2])
    away, expected = kv.to(tier), [kv.tokens, kv.positions, kv.tail, kv.nbytes]
    del kv
    store = pool.stores[tier]
    assert isinstance(store, MemoryStore)
    kept, store.private = store.private, {}
    seam = prefill(pool, range(6), model="other")[5:]
    uses: list[Callable[[], object]] = [
        away.entries,
        lambda: away.keys(0),
        lambda: away.to("pool"),
        lambda: away.to("host"),
        lambda: away.copy_to(pool),
        lambda: KVWriter(away, "m"),
        lambda: away.save(tmp_path / "value"),
        lambda: away[:5] + seam,
    ]
    used = pool.num_used
    for use in uses:
        with pytest.raises(PageLost, match=f"memory:{tier}"):
            use()
        assert (pool.num_used, pool.num_copies, pool.num_arriving) == (used, 0, 0)
        assert [away.tokens, away.positions, away.tail, away.nbytes] == expected
    assert not list(tmp_path.iterdir())
    store.private = kept  # the server answers again
    assert contents(away) == contents(prefill(pool, range(6)))


@pytest.mark.parametrize(
    ("tier", "why"),
    [
        ("disk", "there is no disk tier: open the model with kv_disk=DIRECTORY"),
        ("remote", "there is no remote tier: open the model with kv_remote=URL"),
        ("attic", "the tier 'attic' is unknown: use pool, host, disk or remote"),
    ],
)
def test_other_tiers_are_told(tier: str, why: str) -> None:
    pool = make_pool()
    with pytest.raises(KVError, match=why):
        prefill(pool, [1]).to(tier)


def test_overhead_is_what_is_held_besides_keys_and_values(pool: PagePool) -> None:
    kv = prefill(pool, range(10), tail=TAILS[1])
    assert kv.entry_table.nbytes == 3 * 4 * 4 + 10 * 4 + 2 * 4
    assert kv[5:].entry_table.nbytes == 2 * 4 * 4 + 5 * 4 + 5 * 4 + 2 * 4  # it remembers the tokens before it
    assert kv[:0].entry_table.nbytes == 0
