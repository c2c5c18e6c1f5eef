"""Long answers end with "length" at the context's end or the pool's, and keep every token; prompts are refused."""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.thinning import examples
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.engine import shortages
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Emit, Prefill, Program
from twostroke.errors import ContextLengthExceeded, InvalidRequest, OutOfPages
from twostroke.methods import Method, method
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]
LONG: dict[str, Any] = {"max_tokens": None, "ignore_eos": True}
PAGES = 10  # 160 entries
FEW = 8  # and every token of them costs each technique a step
PROMPT = [7, 9, 11] * 8
AT_NIGHT = partial(pytest.param, marks=pytest.mark.nightly)  # each has the parts of one that runs each time
CASES: list[Any] = [
    method("plain"),
    method("repeat"),
    AT_NIGHT(method("repeat", keep="all")),
    AT_NIGHT(method("repeat", keep="first", offset="wrong")),
    method("reread"),
    method("snap", window=4, budget=12),
    method("tova", budget=12),
    method("overfill"),
    method("student"),
    method("best-of", candidates=3),
    AT_NIGHT(method("refresh", every=5)),
    AT_NIGHT(method("refresh", when="probe", every=5, threshold=0.001)),
    method("refresh", when="mc-dropout", every=5, threshold=0.5, passes=3),
    method("speculative"),
    AT_NIGHT(method("speculative", draft="student")),
    method("speculative", draft="draft"),
]


@pytest.fixture(autouse=True)
def nobody_gives_pages_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other thread holds any, so there is nothing to wait for."""
    monkeypatch.setattr(shortages, "HOLD_S", 0.05)


def small(tiny_llm: TinyLLM, pages: int = PAGES, **options: Any) -> LLM:
    page_bytes = tiny_llm().pool.page_bytes
    return tiny_llm(**({"kv_bytes": pages * page_bytes, "prefix_index": "off"} | options))


def ids(llm: LLM, prompt: list[int], **options: Any) -> list[list[int]]:
    outputs = llm.generate([prompt], **(LONG | options))[0].outputs
    assert {output.finish_reason for output in outputs} == {"length"}
    assert all(token.finish_reason is None for output in outputs for token in output.tokens[:-1])
    return [[token.id for token in output.tokens] for output in outputs]


@pytest.mark.parametrize("chosen", CASES, ids=repr)
def test_an_answer_that_outgrows_the_pool_ends_with_length(chosen: Method, tiny_llm: TinyLLM) -> None:
    """With every technique, whole or as a stream, alone or beside others; the tokens are those of a large pool."""
    companions: dict[str, Any] = dict.fromkeys(chosen.companions, "int8")
    llm, large = small(tiny_llm, FEW, **companions), tiny_llm(prefix_index="off", **companions)
    sampling: dict[str, Any] = {"method": chosen, "temperature": 1.0, "seed": 5}
    (made,) = ids(llm, PROMPT, **sampling)
    assert 20 < len(made) <= FEW * 16 - (12 if chosen.name in ("snap", "tova") else len(PROMPT))
    if chosen.name in ("plain", "overfill", "student", "speculative"):
        assert len(made) == FEW * 16 - len(PROMPT), "all of the pool is used"
    if chosen.name != "best-of":  # whose candidates end elsewhere
        assert large.generate([PROMPT], max_tokens=len(made), ignore_eos=True, **sampling)[0].tokens[-1].id == made[-1]
    assert llm.pool.num_used == 0
    streamed = list(llm.stream(PROMPT, **LONG, **sampling))
    assert [token.id for token in streamed] == made
    assert [token.finish_reason for token in streamed] == [None] * (len(made) - 1) + ["length"]
    answers = llm.generate([PROMPT] * 3, **LONG, **sampling)
    assert [[token.id for token in answer.tokens] for answer in answers] == [made] * 3
    assert {answer.finish_reason for answer in answers} == {"length"}
    assert llm.engine.preemptions > 0 or chosen.name == "reread", "whose prompt takes most of the pool"
    assert llm.pool.num_used == 0


@pytest.mark.parametrize("chosen", CASES, ids=repr)
def test_neither_hits_nor_preemptions_shorten_it(chosen: Method, tiny_llm: TinyLLM) -> None:
    """An answer that fills the pool has the length that it has alone in a cold engine."""
    companions: dict[str, Any] = dict.fromkeys(chosen.companions, "int8")
    sampling: dict[str, Any] = {"method": chosen, "temperature": 1.0, "seed": 5}
    wanted = ids(small(tiny_llm, FEW, **companions), PROMPT, **sampling)
    llm = small(tiny_llm, FEW, prefix_index="radix", **companions)
    llm.generate([PROMPT], max_tokens=9, ignore_eos=True)
    assert ids(llm, PROMPT, **sampling) == wanted, "behind a hit"
    assert [[token.id for token in llm.stream(PROMPT, **LONG, **sampling)]] == wanted, "behind all of its own pages"
    cold = small(tiny_llm, FEW, **companions)
    held = [one.prefill([3] * 20) for one in (llm, cold)]  # no second beginning brings these two pages back
    assert ids(llm, PROMPT, **sampling) == ids(cold, PROMPT, **sampling), "beside a value of two pages"
    del held
    for most in (12, 30, 60):  # when the other ends, more or less of what it had computed is still indexed
        llm = small(tiny_llm, FEW, prefix_index="radix", **companions)
        params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=1.0, seed=5)
        other, mine = (
            llm.request([8] * 20, SamplingParams(max_tokens=most, ignore_eos=True)),
            llm.request(PROMPT, params, chosen),
        )
        llm.engine.run([other, mine])
        assert [mine.choices[0].output.ids] == wanted, f"beside an answer of {most} tokens"


@pytest.mark.parametrize("family", ["gemma3", "lfm2", AT_NIGHT("mistral"), AT_NIGHT("qwen3_5"), AT_NIGHT("granite4")])
def test_windows_and_states_do_not_shorten_it(family: str, tmp_path: Path) -> None:
    """What a prompt's value keeps of them is not why an answer ends, nor where chunks of it ended."""
    path = str(write_model(family, tmp_path))
    with LLM(path, threads=1) as large:
        geometry, size, page_bytes = large.pool.geometry, large.pool.page_size, large.pool.page_bytes
    pages = geometry.answer_pages(len(PROMPT) + 80, size)
    room = geometry.max_entries(pages, size)
    every: list[dict[str, Any]] = [{"prefix_index": "off"}, {}, {"max_step_tokens": 7}]
    for options in every:
        with LLM(path, threads=1, kv_bytes=pages * page_bytes, **options) as llm:
            (made,) = ids(llm, PROMPT)
            assert len(made) == room - len(PROMPT)
            assert ids(llm, PROMPT) == [made]
            assert ids(llm, PROMPT, method=method("speculative", adaptive=False)) == [made]
            other = llm.request([8] * 20, SamplingParams(max_tokens=40, ignore_eos=True))
            mine = llm.request(PROMPT, SamplingParams(**LONG))
            llm.engine.run([other, mine])
            assert mine.choices[0].output.ids == made


@pytest.mark.parametrize("family", ["qwen3", "lfm2", AT_NIGHT("gemma3"), AT_NIGHT("granite4-hybrid")])
def test_in_any_company(family: str, tmp_path: Path) -> None:
    """Requests that share beginnings and a small pool have the answers that each has alone in a cold engine."""
    path, methods = str(write_model(family, tmp_path)), [{}, {"adaptive": False}, {"draft": "student", "guesses": 4}]
    with LLM(path, threads=1) as large:
        geometry, size, page_bytes = large.pool.geometry, large.pool.page_size, large.pool.page_bytes
    for seed in range(examples(4)):
        rng = random.Random(seed)
        pages = geometry.answer_pages(rng.choice([60, 100, 180]), size)
        options: dict[str, Any] = {"threads": 1, "student": "int4", "kv_bytes": pages * page_bytes}
        text, room = [rng.randrange(3, 300) for _ in range(120)], geometry.max_entries(pages, size)
        asked = [
            (
                text[: rng.randrange(1, min(room - 1, 100))] + rng.choices(range(3, 300), k=rng.randrange(2)),
                SamplingParams(
                    max_tokens=rng.choice([None, 40]), ignore_eos=True, temperature=0.9, seed=rng.randrange(9)
                ),
                method("speculative", **rng.choice(methods)) if rng.random() < 0.5 else method("plain"),
            )
            for _ in range(rng.randrange(2, 6))
        ]
        alone: list[list[Token]] = []
        for prompt, params, chosen in asked:
            with LLM(path, prefix_index="off", **options) as llm:
                alone.append(llm.generate([prompt], params, method=chosen)[0].tokens)
        with LLM(path, max_step_tokens=rng.choice([7, 512]), kv_host=rng.choice([0, 8]) * page_bytes, **options) as llm:
            for _ in range(2):
                requests = [llm.request(*one) for one in asked]
                llm.engine.run(requests)
                assert [list(request.events) for request in requests] == alone
            assert llm.pool.num_used == llm.engine.cached_pages(llm.pool)


def test_a_candidate_behind_a_hit_ends_where_it_ends_cold(tiny_llm: TinyLLM) -> None:
    """It is entered again without the hit, and its last token still finds no page."""

    def program() -> Program:
        kv = yield Prefill(PROMPT)
        run = yield Decode(kv, emit=False)
        yield Emit(run.sampled, run.finish_reason)

    llm, answers = small(tiny_llm, FEW, prefix_index="radix"), list[list[int]]()
    held = llm.prefill([3] * 20)
    for _ in range(2):
        request = Request(program, SamplingParams(**LONG), llm.tokenizer)
        llm.engine.run([request])
        answers.append([token.id for token in request.events])
    assert len(answers[0]) > 60
    assert answers[1] == answers[0]
    del held


def test_several_choices(tiny_llm: TinyLLM) -> None:
    """Each choice gets as far as it would get alone."""
    llm = small(tiny_llm)
    made = ids(llm, PROMPT, n=3, temperature=1.0, seed=2)
    assert [len(one) for one in made] == [PAGES * 16 - len(PROMPT)] * 3
    large = tiny_llm().generate([PROMPT], n=3, temperature=1.0, seed=2, max_tokens=len(made[0]), ignore_eos=True)[0]
    assert made == [[token.id for token in output.tokens] for output in large.outputs]


def test_dropping_goes_on_beyond_the_pool(tiny_llm: TinyLLM) -> None:
    """A technique with a bounded number of entries has room for any number of tokens."""
    llm = small(tiny_llm, pages=6)
    chosen = method("drop", window=20, every=4)
    answer = llm.generate([PROMPT], method=chosen, max_tokens=300, ignore_eos=True)[0]
    assert (len(answer.tokens), answer.finish_reason) == (300, "length")
    tight = small(tiny_llm, pages=2)
    (made,) = ids(tight, PROMPT[:8], method=method("drop", window=200, every=4))
    assert len(made) <= 2 * 16 - 8
    assert [t.id for t in tight.stream(PROMPT[:8], method=method("drop", window=200, every=4), **LONG)] == made


@pytest.mark.parametrize("index", ["off", "radix"])
def test_two_that_fit_alone_and_not_together_both_finish(index: str, tiny_llm: TinyLLM) -> None:
    llm, large = small(tiny_llm, prefix_index=index), tiny_llm()
    prompts, most = [[5] * 20, [6] * 30, [8] * 25], 120
    answers = llm.generate(prompts, max_tokens=most, ignore_eos=True)
    wanted = large.generate(prompts, max_tokens=most, ignore_eos=True)
    assert [[t.id for t in a.tokens] for a in answers] == [[t.id for t in a.tokens] for a in wanted]
    assert [len(answer.tokens) for answer in answers] == [most] * 3
    assert llm.engine.preemptions > 0


def test_values_that_the_caller_holds_leave_less_room(tiny_llm: TinyLLM) -> None:
    """Tokens that come one by one: the last one says that it is the last."""
    llm = small(tiny_llm)
    held = llm.prefill([3] * 50)  # 4 of 10 pages
    for count in (1, 15, 16, 17, 40):
        streamed = list(llm.stream([5] * count, **LONG))
        assert len(streamed) == 6 * 16 - count + 1, "the last token needs no entry"
        assert streamed[-1].finish_reason == "length"
        assert (len(llm.generate([[5] * count], **LONG)[0].tokens)) == len(streamed)
    decoding = llm.decode(held, **LONG)
    tokens = list(decoding)
    assert (len(tokens), tokens[-1].finish_reason) == (160 - 50, "length")
    assert decoding.kv.tokens == [3] * 50 + [token.id for token in tokens[:-1]]
    assert decoding.kv.pending == tokens[-1].id
    other = llm.prefill([4] * 8, after=None) if llm.pool.num_free else None
    assert other is None, "the values hold all pages"
    del decoding
    with pytest.raises(OutOfPages, match="drop values that are no longer used"):
        llm.generate([[5] * 100])
    assert llm.engine.report.prefill == 0, "refused before any of it is computed"
    assert len(llm.generate([[5] * 90], **LONG)[0].tokens) == 7


LIMITS = [(2048, 200), (160, PAGES)]  # by the context; by the pool


@pytest.mark.parametrize(("limit", "pages"), LIMITS)
def test_one_rule_at_the_limit(limit: int, pages: int, tiny_llm: TinyLLM) -> None:
    """A prompt and its answer take at most `max_model_len` tokens, so the longest prompt leaves room for one."""
    llm = small(tiny_llm, pages=pages)
    assert llm.max_model_len == limit
    for length in (limit - 2, limit - 1):
        for most in (None, 5, 1):
            wanted = min(limit - length, most or limit)
            (answer,) = llm.generate([[5] * length], max_tokens=most, ignore_eos=True)
            assert (len(answer.tokens), answer.finish_reason) == (wanted, "length")
            streamed = list(llm.stream([5] * length, max_tokens=most, ignore_eos=True))
            assert [token.finish_reason for token in streamed] == [None] * (wanted - 1) + ["length"]
            kv = llm.prefill([5] * length)
            tokens = list(llm.decode(kv, max_tokens=most, ignore_eos=True))
            assert (len(tokens), tokens[-1].finish_reason) == (wanted, "length")
            del kv
    for length in (limit, limit + 1):
        with pytest.raises(InvalidRequest, match=f"{length} tokens|past the 2048"):
            llm.generate([[5] * length])
        with pytest.raises(InvalidRequest):
            llm.stream([5] * length)
    full = llm.prefill([5] * limit)
    with pytest.raises(ContextLengthExceeded, match="the context is full"):
        list(llm.decode(full))
    with pytest.raises(InvalidRequest):
        llm.prefill([5] * (limit + 1))
    del full
    half = llm.prefill([5] * (limit - 3))
    decoding = llm.decode(half, max_tokens=2, ignore_eos=True)
    assert len(list(decoding)) == 2
    assert [token.finish_reason for token in llm.decode(decoding.kv, ignore_eos=True)] == ["length"]


def test_a_prompt_that_does_not_fit_is_refused_and_others_are_not_disturbed(tiny_llm: TinyLLM) -> None:
    llm = small(tiny_llm)
    running = llm.engine.submit(llm.request([7, 8], SamplingParams(max_tokens=50, ignore_eos=True)))
    llm.engine.step()
    with pytest.raises(ContextLengthExceeded, match="at most 159 leave room for an answer in the KV pool"):
        llm.generate([[5] * 160])
    with pytest.raises(ContextLengthExceeded, match="takes 180 KV entries, and the pool has 10 pages of 16"):
        llm.generate([[5] * 90], method=method("repeat"))
    assert llm.engine.preemptions == 0
    llm.engine.finish([running])
    assert len(running.events) == 50


def test_a_program_of_ones_own_keeps_what_it_made(tiny_llm: TinyLLM) -> None:
    """A prefill that finds no page after tokens were made ends the answer; so does a program that emits in parts."""
    llm = small(tiny_llm)

    def prefilling() -> Program:
        kv = yield Prefill([5] * 8)
        run = yield Decode(kv, max_tokens=20)
        others = []
        while True:
            others.append((yield Prefill([9] * 40)))
            run = yield Decode(run.kv, max_tokens=2)

    def emitting() -> Program:
        kv = yield Prefill([5] * 8)
        while True:
            run = yield Decode(kv, max_tokens=9, emit=False)
            yield Emit(run.sampled)
            kv = run.kv

    for program, least in ((prefilling, 20), (emitting, 140)):
        for streams in (False, True):
            request = Request(program, SamplingParams(**LONG), llm.tokenizer)
            llm.engine.submit(request)
            if streams:
                tokens = list(llm.engine.tokens(request))
            else:
                llm.engine.finish([request])
                tokens = list(request.events)
            assert len(tokens) >= least
            assert [token.finish_reason for token in tokens] == [None] * (len(tokens) - 1) + ["length"]
            assert [token.index for token in tokens] == list(range(len(tokens)))
            assert llm.pool.num_used == 0


def test_a_candidate_that_fills_the_context_ends_with_length(tiny_llm: TinyLLM) -> None:
    llm = small(tiny_llm, pages=400)
    answer = llm.generate([[5] * 2040], method=method("best-of", candidates=2), **LONG)[0]
    assert (len(answer.tokens), answer.finish_reason) == (8, "length")


def test_held_back_text_comes_with_the_last_token(tiny_llm: TinyLLM) -> None:
    """A stop string that has begun is text where the answer is cut off."""
    llm = small(tiny_llm, pages=3)
    held = llm.prefill([3] * 16)
    plain = llm.generate([PROMPT[:9]], **LONG)[0]
    stop = plain.text[-1] + "never"
    for tokens in (
        llm.generate([PROMPT[:9]], **LONG, stop=(stop,))[0].tokens,
        list(llm.stream(PROMPT[:9], **LONG, stop=(stop,))),
    ):
        assert "".join(token.text for token in tokens) == plain.text
        assert tokens[-1].finish_reason == "length"
    assert len(held) == 16
