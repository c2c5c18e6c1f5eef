"""Which of several engines gets a call."""

from dataclasses import dataclass

from twostroke.engine.router import KvAware, LeastLoaded, RoundRobin, RoutedCall
from twostroke.kv.kv_events import page_names, root_of


@dataclass(frozen=True)
class Worker:
    number: int


A, B, C = map(Worker, range(3))


def call(pages: int, tokens: int = 0) -> RoutedCall:
    return RoutedCall(pages, page_names(range(tokens), 16))


def test_round_robin() -> None:
    router = RoundRobin[Worker]()
    assert router.choose(call(1)) is None
    for one in (A, B, C):
        router.join(one)
    assert [router.choose(call(1)) for _ in range(4)] == [A, B, C, A]
    router.leave(B)
    assert {router.choose(call(1)) for _ in range(4)} == {A, C}


def test_least_loaded() -> None:
    router = LeastLoaded[Worker]()
    assert router.choose(call(1)) is None
    for one in (A, B):
        router.join(one)
    assert [router.choose(one) for one in (call(20), call(2), call(2))] == [A, B, B]
    router.done(A, 20)
    assert router.choose(call(20)) is A
    router.leave(B)
    router.done(B, 2)
    assert router.choose(call(2)) is A


def test_kv_aware() -> None:
    """The holder of a prompt gets it unless it has much more to do."""
    router = KvAware[Worker]()
    for one in (A, B):
        router.join(one)
    names = list(page_names(range(160), 16))
    router.tell(B, [(True, name) for name in names])
    assert router.choose(call(12, 176)) is B
    assert router.overlaps(names) == [((B,), 10)]
    assert router.choose(call(12, 176)) is A  # the other has 12 pages to serve
    router.tell(B, [(False, name) for name in names[4:]])
    assert router.overlaps(names) == [((B,), 4)]
    router.leave(B)
    assert not router.overlaps(names)


def test_pages_of_salts_have_names_of_their_own() -> None:
    tokens = range(64)
    plain, mine, yours = (set(page_names(tokens, 16, root_of(salt))) for salt in (b"", b"mine", b"yours"))
    assert len(plain | mine | yours) == 12
