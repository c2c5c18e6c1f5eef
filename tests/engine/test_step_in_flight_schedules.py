"""One step in flight under random schedules: the same bits as when tokens are read at once."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.late import late
from tests.thinning import examples
from tests.tiny import VOCAB, write_model
from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.kv.cache import KVCache
from twostroke.methods import Method, method
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

PAGE_BYTES = 3 * 2 * 2 * 64 * 2 * 16


class Evens:
    """A constraint on even ids, which is over after seven tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def mask(self) -> np.ndarray:
        return np.arange(VOCAB) % 2 == 0

    def advance(self, token: int) -> None:
        self.tokens.append(token)

    @property
    def finished(self) -> bool:
        return len(self.tokens) >= 7


COMMON: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 7}
ENDS: dict[str, Any] = COMMON | {"stop_token_ids": tuple(range(0, VOCAB, 6))}  # after about six tokens
SAMPLINGS = {
    "length": SamplingParams(**COMMON, ignore_eos=True),
    "greedy": SamplingParams(max_tokens=20),
    "ends": SamplingParams(**ENDS),
    "logprobs": SamplingParams(**ENDS, logprobs=2),
    "penalties": SamplingParams(**ENDS, repetition_penalty=1.5, presence_penalty=0.5),
    "filtered": SamplingParams(**ENDS, top_p=0.8, min_tokens=4),
    "stops": SamplingParams(**COMMON, stop=("e", "t"), ignore_eos=True),
    "constraint": SamplingParams(**COMMON, constraint=Evens),
}
METHODS: dict[str, Method] = {
    "plain": method("plain"),
    "best-of": method("best-of", candidates=2),
    "repeat": method("repeat", sinks=3),
    "refresh": method("refresh", every=3),
    "entropy": method("refresh", when="entropy", threshold=6.8, every=2),
    "drop": method("drop", window=9, every=4, by="attention"),
    "speculative": method("speculative"),
    "draft": method("speculative", draft="draft"),
    "student": method("student"),
}
Asked = tuple[int, str, str]  # a prompt's length, a technique, how tokens are sampled
ASKED = st.tuples(st.sampled_from([1, 15, 16, 17, 40]), st.sampled_from(sorted(METHODS)), st.sampled_from([*SAMPLINGS]))
Models = Callable[[str, int, bool], LLM]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("flight"), head_dim=64, num_attention_heads=2)


@pytest.fixture(scope="module")
def models(directory: Path) -> Iterator[Models]:
    devices = []

    @functools.cache
    def opened(index: str, pages: int, is_late: bool) -> LLM:
        options: dict[str, Any] = {"backend": "native", "weights": "int8", "student": "int2", "draft": "int4"}
        llm = LLM(str(directory), prefix_index=index, kv_bytes=pages * PAGE_BYTES, threads=1, **options)
        if is_late:
            devices.append(late(llm))
        return llm

    yield opened
    for device in devices:
        device.close()


@pytest.fixture(scope="module")
def alone(models: Models) -> Callable[[Asked], Answer]:
    @functools.cache
    def answer(asked: Asked) -> Answer:
        """Of an engine that reads at once."""
        llm = models("off", 256, False)
        return answers(llm, requests(llm, [asked]), SchedulerConfig(max_step_tokens=4096, in_flight=False))[0]

    return answer


def requests(llm: LLM, asked: list[Asked]) -> list[Request]:
    return [llm.request(prompt(length), SAMPLINGS[how], METHODS[name]) for length, name, how in asked]


def prompt(length: int) -> list[int]:
    return [(i * i * 7 + 5) % (VOCAB - 2) + 2 for i in range(length)]


def known_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a prefix index gets an entry whose token nobody knows yet."""
    for model in llm.engine.models.values():
        if (index := model.index) is not None:

            def insert(kv: KVCache, insert: Callable[[KVCache], Any] = index.insert) -> Any:
                assert kv.token_array.min(initial=0) >= 0
                return insert(kv)

            monkeypatch.setattr(index, "insert", insert)


@settings(max_examples=examples(20))
@given(
    asked=st.lists(ASKED, min_size=1, max_size=5),
    chunk=st.sampled_from([1, 7, 50, 512]),
    place=st.sampled_from([("off", 16), ("off", 256), ("radix", 16), ("radix", 256)]),
    is_late=st.booleans(),
    apart=st.sampled_from([0, 0, 1, 3]),
)
def test_any_schedule(
    asked: list[Asked],
    chunk: int,
    place: tuple[str, int],
    is_late: bool,
    apart: int,
    models: Models,
    alone: Callable[[Asked], Answer],
) -> None:
    """Tokens, texts, log-probabilities, keys and values are those of an engine that reads at once, to the bit."""
    llm = models(*place, is_late)
    with pytest.MonkeyPatch.context() as patch:
        known_tokens(llm, patch)
        found = answers(llm, requests(llm, asked), SchedulerConfig(max_step_tokens=chunk, in_flight=True), apart)
    assert found == [alone(one) for one in asked]
    for model in llm.engine.models.values():
        assert model.pool.num_used == llm.engine.cached_pages(model.pool)
