"""Many prompts share prefixes, in several threads, over tiers that misbehave: none ever gets another's content."""

import os
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engine.tiered import PAGE_BYTES, Opener, lower, without_tiers
from tests.kv.tiers.memory_store import MemoryStore
from tests.thinning import examples
from tests.watching import Bits
from twostroke.api.llm import LLM
from twostroke.backends.interface import PAGE
from twostroke.backends.native import library
from twostroke.kv.tiers.tiers import Tiers
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

ASKED = int(os.environ.get("TWOSTROKE_SOAK", examples(24)))  # prompts in all
SHARED = 16  # tokens of a piece; prompts are made of pieces, so they share prefixes of every length
PARAMS = SamplingParams(max_tokens=20, temperature=0.8, seed=11, ignore_eos=True)

Seen = tuple[list[int], list[str]]  # an answer's tokens, and the bits of its KV


def prompts(rng: random.Random) -> list[list[int]]:
    """A tree: at each depth a prompt takes one of two pieces; some end within a page."""
    pieces = [[rng.randrange(3, 300) for _ in range(SHARED)] for _ in range(12)]
    made: list[list[int]] = []
    for _ in range(24):
        depth = rng.randrange(1, 7)
        tokens = [token for i in range(depth) for token in pieces[2 * i + rng.randrange(2)]]
        made.append(tokens[: len(tokens) - rng.choice([0, 0, 3])])
    return made


def answered(llm: LLM, tokens: list[int]) -> Seen:
    request = llm.request(tokens, PARAMS)
    bits = Bits(request)
    llm.engine.run([request])
    return [token.id for token in request.events], bits.seen


class Trouble:
    """A store that now and then is slow, loses pages, gives a part, fails, or is full."""

    def __init__(self, store: MemoryStore, rng: random.Random) -> None:
        self._store, self._rng, self._lock = store, rng, threading.Lock()
        self._never = threading.Event()
        store.before, store.loses = self._call, True

    def _call(self, what: str) -> None:
        with self._lock:
            kind = self._rng.randrange(12)
            self._store.share = self._rng.choice([0.4, 1.0, 1.0])
            self._store.most_bytes = self._rng.choice([40 * PAGE_BYTES, 1 << 40, 1 << 40])
            leaves = list(self._store.pages)[-3:]
        if kind == 0:
            self._never.wait(0.05)
        elif kind == 1 and what == "read":
            for key in leaves:  # the last written: a page goes only after those that follow it
                self._store.pages.pop(key, None)
        elif kind == 2 and what != "write":
            raise OSError("injected")


def test_nobody_gets_anothers_content(opener: Opener) -> None:
    rng = random.Random("radix")
    asked = prompts(rng)
    with without_tiers(64) as plain:
        expected = [answered(plain, tokens) for tokens in asked]
        disk, remote = MemoryStore("disk"), MemoryStore("remote")
        llm = opener(Tiers(5 * PAGE_BYTES, disk, remote), pages=14)
        pages = {}
        for tokens in asked:
            kv = plain.prefill(tokens)
            frames = [plain.pool.frame(page) for page in kv.table[:, PAGE].tolist()]
            names = lower(llm).names(kv.token_array)
            for name, page in zip(names, plain.pool.memory.read_pages(frames), strict=False):
                pages[name.key] = bytes(page)
            del kv
    for store in (disk, remote):
        Trouble(store, random.Random(f"radix {store.tier}"))

    def ask(i: int) -> bool:
        return answered(llm, asked[i]) == expected[i]

    order = [rng.randrange(len(asked)) for _ in range(ASKED)]
    with ThreadPoolExecutor(3) as threads:
        assert all(threads.map(ask, order))
    counters = [llm.tiers.host_counters, disk.counters, remote.counters]
    for i in rng.choices(range(len(asked)), k=500):  # which tier has a page is a matter of time: ask until each had one
        if all(one.read().pages_in for one in counters):
            break
        assert ask(i)
    assert llm.tiers.flush(60)
    for store in (disk, remote):
        wrong = [key for (_, key), page in store.pages.items() if pages.get(key, page) != page]
        assert not wrong
        assert len([key for _, key in store.pages if key in pages]) > 10
    assert all(one.read().pages_in for one in counters)
