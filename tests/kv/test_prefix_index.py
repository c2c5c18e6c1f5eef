"""Prefixes in an index: what is found, what enters, and what leaves."""

from collections.abc import Callable, Iterator
from itertools import chain

import pytest

from tests.kv.values import contents, make_pool, prefill
from twostroke.backends.interface import PAGE
from twostroke.errors import KVError, OutOfPages
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex

A, B, C, D = ([10 * i + j for j in range(4)] for i in range(1, 5))  # the tokens of four whole pages


@pytest.fixture
def index(pool: PagePool) -> Iterator[PrefixIndex]:
    index = PrefixIndex(pool, "m")
    yield index
    index.clear()
    assert index.num_pages == 0


def add(index: PrefixIndex, *pages: list[int], model: str = "m") -> None:
    index.insert(prefill(index.pool, [*chain(*pages)], model=model))


def known(index: PrefixIndex, *pages: list[int]) -> int:
    return len(index.match([*chain(*pages)])) // 4


def test_match_returns_the_longest_whole_page_prefix(index: PrefixIndex) -> None:
    add(index, A, B, C[:3])
    for tokens, length in [
        ([*A, *B, *C], 8),
        ([*A, *B], 8),
        ([*A, *B[:3]], 4),
        ([*A, *C], 4),
        (A, 4),
        (A[:3], 0),
        ([*B, *A], 0),
        ([], 0),
    ]:
        hit = index.match(tokens)
        assert hit.tokens == tokens[:length]
        assert contents(hit) == contents(prefill(index.pool, tokens[:length]))
        assert hit.canonical_length("m") == length == hit.next_position
        assert hit.tail is None


def test_a_hit_shares_pages_and_is_continued_like_any_value(index: PrefixIndex) -> None:
    add(index, A, B)
    used = index.pool.num_used
    hit = index.match([*A, *B, *C])
    assert index.pool.num_used == used == 2
    longer = prefill(hit, C)
    index.insert(longer)
    assert known(index, A, B, C, D) == 3
    assert contents(longer) == contents(prefill(index.pool, [*A, *B, *C]))


def test_pages_known_already_stay_as_they_are(index: PrefixIndex) -> None:
    add(index, A, B)
    pages = index.match([*A, *B]).table[:, PAGE].tolist()
    add(index, A, B, C)
    add(index, A, D)
    assert index.match([*A, *B, *C]).table[:2, PAGE].tolist() == pages
    assert index.match([*A, *D]).table[0, PAGE] == pages[0]
    assert index.num_pages == index.pool.num_used == 4


def test_only_canonical_whole_aligned_pages_enter(index: PrefixIndex) -> None:
    pool, size = index.pool, 16
    kv = prefill(pool, [*A, *B, *C, *D])
    other = prefill(pool, [*A, *B, *C, *D], model="other")
    for wrong in (kv[4:], kv[5:], kv[:0], kv[1:9], other, other[:4] + kv[4:], prefill(other, A), kv[:3]):
        index.insert(wrong)
        assert index.num_pages == 0
    gap = prefill(kv[:5] + kv[7:], A)
    index.insert(gap)
    assert known(index, A, B, C, D) == 1
    index.insert(kv[:9] + other[9:])
    assert known(index, A, B, C, D) == 2
    for a in range(size + 1):  # joined again, it is complete
        index.clear()
        index.insert(kv[:a] + kv[a:])
        assert known(index, A, B, C, D) == 4


def test_values_of_another_pool_are_refused(index: PrefixIndex) -> None:
    with pytest.raises(KVError, match="only values in its pool"):
        index.insert(prefill(make_pool(), A))


def test_counters_count_tokens(index: PrefixIndex) -> None:
    add(index, A, B)
    index.match([*A, *B, *C, 1])
    index.match([*B])
    assert (index.queried_tokens, index.hit_tokens) == (17, 8)


def test_the_least_recently_used_goes_first_and_the_deepest_of_it(index: PrefixIndex) -> None:
    order = [(A, B, C), (A, D), (C,), (A, B), (A,)]  # the expected evictions, one by one
    for gone in range(len(order) + 1):
        add(index, A, B, C)
        add(index, A, D)
        add(index, C)
        known(index, A, B)  # which leaves C behind it the oldest, then D, then C alone
        assert index.evict(gone) == gone
        for pages in order:
            assert known(index, *pages) == sum(pages[:depth] in order[gone:] for depth in range(1, len(pages) + 1))
        index.clear()


def test_to_insert_again_is_to_use(index: PrefixIndex) -> None:
    for pages in ((A, B), (C,), (A, B)):
        add(index, *pages)
    assert index.evict(1) == 1
    assert (known(index, A, B), known(index, C)) == (2, 0)


def test_evict_frees_exactly_what_it_says(index: PrefixIndex) -> None:
    add(index, A, B, C, D)
    for count, freed in [(0, 0), (-1, 0), (1, 1), (2, 2), (5, 1), (1, 0)]:
        used = index.pool.num_used
        assert index.evict(count) == freed == used - index.pool.num_used
    assert index.num_pages == 0


def test_pages_in_use_stay_in_the_index_while_evicting_them_would_free_nothing(index: PrefixIndex) -> None:
    kv = prefill(index.pool, [*A, *B])
    index.insert(kv)
    assert index.evict(5) == 0
    assert known(index, A, B) == 2
    add(index, A, B, C)
    assert index.evict(5) == 1
    assert known(index, A, B, C) == 2
    index.clear()
    assert index.pool.num_used == 2
    assert contents(kv) == contents(prefill(index.pool, [*A, *B]))


def test_a_held_tail_leaves_the_index_so_that_the_unused_prefix_can_go(index: PrefixIndex) -> None:
    kv = prefill(index.pool, [*A, *B, *C])
    index.insert(kv)
    tail, before = kv[8:], contents(kv)[8:]
    del kv
    assert index.evict(1) == 1
    assert index.pool.num_used == 2
    assert known(index, A, B, C) == 1
    assert contents(tail) == before


def test_the_pool_asks_the_index_for_pages(new_pool: Callable[..., PagePool], index: PrefixIndex) -> None:
    pool = new_pool(num_pages=4)
    small = PrefixIndex(pool, "m")
    pool.reclaim = small.evict  # pyright: ignore[reportAttributeAccessIssue]
    add(small, A, B, C)
    held = prefill(small.match(A), D * 2)  # two pages, where one was free
    assert (small.num_pages, pool.num_used) == (2, 4)
    with pytest.raises(OutOfPages):
        prefill(held, D * 2)  # even all that can be evicted is not enough
    assert (small.num_pages, pool.num_used) == (1, 3)
    assert contents(held) == contents(prefill(index.pool, [*A, *D, *D]))
    small.clear()


def test_unused_pages_leave_before_a_prefix_whose_end_is_in_use(new_pool: Callable[..., PagePool]) -> None:
    """However many: those that are looked at together are fewer."""
    index = PrefixIndex(new_pool(1100), "m")
    used = prefill(index.pool, range(12))
    index.insert(used)
    end = used[8:]  # whose page keeps the two before it
    del used
    for number in range(1000):
        index.insert(prefill(index.pool, range(100 + 4 * number, 104 + 4 * number)))
    assert index.evict(700) == 700
    assert len(index.match(range(12))) == 12
    del end
    index.clear()
