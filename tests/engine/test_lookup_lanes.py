"""Decodes that guess all along: right guesses and wrong ones, under any schedule, change no bit of tokens or values."""

import functools
import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.engine import test_windows
from tests.engine.any_schedule import PROMPT, AnySchedule
from tests.thinning import examples
from tests.tiny import VOCAB, write_model
from tests.watching import Answer, answers
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.lookup import LookupGuesses
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Decode, Decoded, Lookup, Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.methods import Method, method
from twostroke.methods.speculative import Speculation
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

tiny = partial(write_model, "llama", head_dim=64, num_attention_heads=2)
KINDS = {
    "plain": AnySchedule(tiny),
    "int8": AnySchedule(tiny, "int8"),
    "windows": AnySchedule(test_windows.write),
    "states": AnySchedule(partial(write_model, "qwen3_5")),
    "latent": AnySchedule(partial(write_model, "deepseek_v3")),
}
COMMON: dict[str, Any] = {"max_tokens": 24, "temperature": 0.8, "seed": 7}
SAMPLINGS = {
    "ids": SamplingParams(**COMMON, ignore_eos=True),
    "logprobs": SamplingParams(**COMMON, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(**COMMON, ignore_eos=True, presence_penalty=0.7, min_tokens=3),
    "ends": SamplingParams(**COMMON, stop_token_ids=tuple(range(0, VOCAB, 9))),
    "stops": SamplingParams(**COMMON, stop=("e", "t"), ignore_eos=True),
}
LOOKUP = method("speculative", guesses=6, adaptive=False)
Asked = tuple[int, str]  # tokens of PROMPT, and how tokens are sampled


@functools.cache
def alone(kind: str, asked: Asked) -> Answer:
    """The plain answer."""
    llm = KINDS[kind].model()
    return answers(llm, requests(llm, [asked], method("plain")), SchedulerConfig(max_step_tokens=4096))[0]


def requests(llm: LLM, asked: Sequence[Asked], chosen: Method) -> list[Request]:
    return [llm.request(PROMPT[:length], SAMPLINGS[how], chosen) for length, how in asked]


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    yield
    for one in KINDS.values():
        one.check_no_leak()


def half_right(kind: str, asked: Sequence[Asked], patch: pytest.MonkeyPatch) -> None:
    """Let lookups find what will be said, with a wrong token now and then."""
    texts = [[*PROMPT[: one[0]], *(token.id for token in alone(kind, one)[0])] for one in asked]
    turn = itertools.count()

    def guesses(self: LookupGuesses, most: int) -> list[int]:
        ids = self.text.ids
        follows = next((text[len(ids) :] for text in texts if text[: len(ids)] == ids), [])[:most]
        if follows and (wrong := next(turn) % 5) < len(follows):
            follows[wrong] = (follows[wrong] + 1) % VOCAB
        return follows

    patch.setattr(LookupGuesses, "guesses", guesses)
    patch.setattr(LookupGuesses, "found", True)


PLACES = st.sampled_from([("off", 0, 1), ("radix", 0, 2), ("radix", 1000, 1), ("radix", 0, 1)])  # 0 pages: few
FEW = {"states": 92}  # pages for one or two of the longest; 60 of other kinds


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    asked=st.lists(
        st.tuples(st.sampled_from([2, 24, 63, 64, 65, 100, 150]), st.sampled_from([*SAMPLINGS])), min_size=1, max_size=5
    ),
    chunk=st.sampled_from([1, 7, 30, 512]),
    place=PLACES,
    in_flight=st.booleans(),
)
def test_any_schedule(kind: str, asked: list[Asked], chunk: int, place: tuple[str, int, int], in_flight: bool) -> None:
    index, pages, threads = place
    expected, llm = [alone(kind, one) for one in asked], KINDS[kind].model(index, pages or FEW.get(kind, 60), threads)
    config = SchedulerConfig(max_step_tokens=chunk, in_flight=in_flight)
    with pytest.MonkeyPatch.context() as patch:
        half_right(kind, asked, patch)
        assert answers(llm, requests(llm, asked, LOOKUP), config) == expected
    assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)


@pytest.mark.parametrize("kind", KINDS)
def test_guesses_are_tried(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above would say nothing."""
    llm, asked = KINDS[kind].model(), [(64, "ids"), (100, "penalties")]
    half_right(kind, asked, monkeypatch)
    for request in requests(llm, asked, LOOKUP):
        llm.engine.run([request])
        facts = request.result
        assert isinstance(facts, Speculation)
        assert 10 < facts.accepted < facts.guessed
        assert facts.rounds + facts.accepted >= 20


def test_a_round_is_told_to_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = KINDS["plain"].model()
    half_right("plain", [(64, "ids")], monkeypatch)
    seen: list[Decoded] = []

    def program() -> Program:
        kv = yield Prefill(PROMPT[:64])
        seen.append((yield Decode(kv, lookup=Lookup(6, judged=False))))

    llm.engine.run([Request(program, SAMPLINGS["ids"], llm.tokenizer, 64)])
    tokens, at = seen.pop().tokens, 1
    assert len(tokens) == 24
    llm.engine.run([Request(program, SAMPLINGS["ids"], llm.tokenizer, 64)])
    for one in (made := seen.pop()).rounds:
        assert list(one.guesses[: one.stood]) == tokens[at : at + one.stood]
        assert list(one.guesses[one.stood :][:1]) != tokens[at + one.stood :][:1] or one.stood == len(one.guesses)
        at += one.stood + 1
    assert made.tokens == tokens
    assert len(made.kv) == 64 + 23


@pytest.mark.parametrize("wanted", [{"guesses": [1]}, {"queries": 2}, {"states": 1}], ids=str)
def test_what_a_lookup_cannot_give(wanted: dict[str, Any]) -> None:
    llm = KINDS["plain"].model()

    def program() -> Program:
        yield Decode((yield Prefill([1, 2, 3])), lookup=Lookup(), **wanted)

    with pytest.raises(InvalidRequest, match="takes no guesses, and returns no queries and no hidden states"):
        llm.engine.run([Request(program, SamplingParams(), llm.tokenizer, 3)])


def test_guesses_take_no_pages_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a pool is full nobody guesses, and each answer is as long as alone."""
    plain = lengths(method("plain"))
    half_right("plain", [(64, "ids")], monkeypatch)
    assert lengths(LOOKUP) == plain == [30 * 16 - 64] * 2


def lengths(chosen: Method) -> list[int]:
    """Of two answers that do not fit together."""
    llm, params = (
        KINDS["plain"].model("off", 30, 1),
        SamplingParams(max_tokens=1000, temperature=0.8, seed=7, ignore_eos=True),
    )
    asked = [llm.request(PROMPT[:64], params, chosen) for _ in range(2)]
    return [len(events) for events, _ in answers(llm, asked, SchedulerConfig())]
