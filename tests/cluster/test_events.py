"""A router that follows the events knows the pages that the index holds, at every moment."""

from collections.abc import Callable

import numpy as np
import pytest

from twostroke.cluster.events import Events
from twostroke.kv.cache import KVCache
from twostroke.llm import LLM

TinyLLM = Callable[..., LLM]


class Router:
    """The blocks of one worker, as a router keeps them: the tokens from the first on, by hash."""

    def __init__(self) -> None:
        self.known: dict[int, tuple[int, ...]] = {}
        self.removed = 0

    def publish_stored(
        self,
        token_ids: list[int],
        num_block_tokens: list[int],
        block_hashes: list[int],
        parent_hash: int | None = None,
    ) -> None:
        before = () if parent_hash is None else self.known[parent_hash]
        for size, hash in zip(num_block_tokens, block_hashes, strict=True):
            assert -(1 << 63) <= hash < 1 << 63
            assert hash not in self.known, "told twice"
            before += tuple(token_ids[:size])
            token_ids = token_ids[size:]
            self.known[hash] = before
        assert not token_ids

    def publish_removed(self, block_hashes: list[int]) -> None:
        self.removed += len(block_hashes)
        for hash in block_hashes:
            del self.known[hash]


def agree(router: Router, llm: LLM) -> None:
    index = llm.model.index
    assert index is not None
    assert len(router.known) == index.num_pages
    for tokens in router.known.values():
        assert len(index.longer(KVCache.empty(llm.pool), np.array(tokens, np.int32))) == len(tokens)


@pytest.mark.parametrize("host", [None, 1 << 16])
@pytest.mark.parametrize("index", ["radix", "hash"])
def test_the_router_knows_what_the_index_holds(index: str, host: int | None, tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(prefix_index=index, kv_bytes=40 * 16 * 768, kv_host=host)
    router = Router()
    assert llm.model.index is not None
    events = Events(llm.model.index, router)
    for turn in range(24):
        shared = [3 + turn % 3] * 40
        llm.generate([[*shared, *range(turn, turn + 50)]], max_tokens=30, ignore_eos=True)
        agree(router, llm)
    assert router.removed > 0
    events.close()
    known = dict(router.known)
    llm.generate([[9] * 64], max_tokens=2)
    assert router.known == known
