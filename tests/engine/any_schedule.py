"""One tiny model, any schedule: what the tests of layers share that do not hold K and V of every token."""

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv.cache import KVCache
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams

PROMPT = [3 + 7 * i % 180 for i in range(200)]
SAMPLING = SamplingParams(max_tokens=8, temperature=0.8, seed=7, ignore_eos=True, logprobs=2)
METHODS = {
    "plain": method("plain"),
    "repeat": method("repeat", sinks=3),
    "best-of": method("best-of", candidates=2),
    "speculative": method("speculative", guesses=3, adaptive=False),
    "drop": method("drop", window=30, every=4, by="attention", observed=8),
    "key-norm": method("drop", window=30, every=4, by="key-norm"),
    "snap": method("snap", window=4, budget=40),
}
Asked = tuple[int, str]  # tokens of PROMPT, and a method
ENDS = st.lists(st.integers(1, 199), min_size=1, max_size=5)
INDEXES = st.sampled_from(["off", "radix"])


def asked_lists(lengths: list[int]) -> st.SearchStrategy[list[Asked]]:
    one = st.tuples(st.sampled_from(lengths), st.sampled_from(sorted(METHODS)))
    return st.lists(one, min_size=1, max_size=5)


class AnySchedule:
    """A model, written into a directory when it is first needed, and the answers to requests that are alone."""

    def __init__(self, write: Callable[[Path], Path], kv_dtype: str = "auto", kv_groups: str = "auto") -> None:
        self.kv_dtype, self.kv_groups = kv_dtype, kv_groups
        self.directory = functools.cache(lambda: str(write(Path(tempfile.mkdtemp()))))
        self._page_bytes = functools.cache(lambda: self._open(pages=None).pool.page_bytes)
        self.model = functools.cache(self._open)
        self._answer_alone = functools.cache(lambda asked: self._answers(self.model(), [asked], 4096)[0])

    def _open(self, index: str = "off", pages: int | None = 1000, threads: int = 1, backend: str = "native") -> LLM:
        options: dict[str, Any] = {"prefix_index": index, "threads": threads}
        options |= {"kv_dtype": self.kv_dtype, "kv_groups": self.kv_groups}
        options["kv_bytes"] = None if pages is None else pages * self._page_bytes()
        return LLM(self.directory(), backend=backend, weights="int8" if backend == "native" else "stored", **options)

    def _answers(self, llm: LLM, asked: list[Asked], chunk: int) -> list[Answer]:
        requests = [llm.request(PROMPT[:length], SAMPLING, METHODS[name]) for length, name in asked]
        return answers(llm, requests, SchedulerConfig(max_step_tokens=chunk))

    def check(self, asked: list[Asked], chunk: int, place: tuple[str, int, int]) -> None:
        """Requests together, in chunks, in a place (index, pages, threads), have the bits of each alone."""
        llm = self.model(*place)
        assert self._answers(llm, asked, chunk) == [self._answer_alone(one) for one in asked]
        assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)

    def check_cuts(self, ends: list[int], more: int, index: str, same: Callable[[KVCache, KVCache], bool]) -> None:
        """A value that is cut back and extended, again and again, is `same` as a fresh one, and goes on as it does."""
        llm = self.model(index)
        kv, tokens = llm.prefill(PROMPT), PROMPT
        for end in ends:
            end = min(end, len(tokens))
            kv, tokens = llm.prefill(PROMPT[:more], kv[:end]), [*tokens[:end], *PROMPT[:more]]
        fresh = self.model().prefill(tokens)
        assert (kv.tokens, kv.complete) == (tokens, True)
        assert kv.canonical_length(llm.model.id) == len(tokens)
        assert same(kv, fresh)
        params = SamplingParams(max_tokens=5, ignore_eos=True, logprobs=2)
        assert list(llm.decode(kv, params=params)) == list(self.model().decode(fresh, params=params))

    def check_no_leak(self) -> None:
        for llm in (self.model(), self.model("radix")):
            assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)
