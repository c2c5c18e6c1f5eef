"""The engine: batching, chunking, preemption, cancellation and errors do not change answers."""

import gc
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Decode, Emit, Prefill, Program
from twostroke.engine.timings import Pace
from twostroke.errors import GeometryMismatch, InvalidRequest, OutOfPages
from twostroke.methods import METHODS, Method, method
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]
PROMPTS = [[7, 9, 11] * n for n in (1, 9, 30)]


@pytest.fixture(autouse=True)
def no_garbage_collector() -> Iterator[None]:
    """Pages must be freed as soon as the last holder drops a value, without a collection of cycles."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def ids(llm: LLM, prompts: list[list[int]], **options: Any) -> list[list[list[int]]]:
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True} | options
    completions = llm.generate(prompts, **asked)
    return [[[token.id for token in output.tokens] for output in c.outputs] for c in completions]


@contextmanager
def pages_used(llm: LLM) -> Generator[list[int]]:
    """A list of the pages that are in use after each allocation."""
    allocate, used = llm.pool.allocate, list[int]()

    def counted(count: int, *groups: Any) -> list[int]:
        pages = allocate(count, *groups)
        used.append(llm.pool.num_used)
        return pages

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.pool, "allocate", counted)
        yield used


def run(llm: LLM, program: Callable[[], Program], **fields: Any) -> Request:
    request = Request(program, SamplingParams(**fields), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    return request


# Each method with its defaults, and with parameters that change its program.
CASES: list[Method] = [
    *(method(name) for name in sorted(METHODS)),
    method("drop", window=9, every=4),
    method("drop", times=2, keep="last", window=9, every=4, by="key-norm"),
    method("drop", window=9, every=4, by="attention"),
    method("drop", times=2, keep="last", window=9, every=4, by="attention", observed=3),
    method("snap", window=4, budget=12),
    method("snap", times=2, keep="last", sinks=2, window=4, budget=12, kernel=3),
    method("snap", window=4, budget=12, per="head"),
    method("keydiff", times=2, keep="last", sinks=2, budget=9, offset="wrong"),
    method("lagkv", lag=3, ratio=0.7),
    method("chunkkv", budget=12, newest=3, chunk=4),
    method("critical-kv", by="heavy-hitters", budgets="ada", budget=12, newest=3),
    method("duo-attention", sinks=2, recent=5),
    method("triattention", budget=12, newest=3, every=5),
    method("compose", first="partrep", then="tova:budget=12"),
    method("compose", first="reread", then="drop:window=9+every=4"),
    method("kvzip", times=2, keep="last", budget=12, part=7),
    method("finch", budget=12, question=3, chunk=40),
    method("rkv", budget=12, every=5, window=3),
    method("expected-attention", times=2, keep="last", budget=9, newest=2),
    method("heavy-hitters", times=2, keep="last", sinks=2, budget=9, mean=True),
    method("repeat", times=(" and ", ""), keep="first", offset="wrong"),
    method("refresh", every=3),
    method("refresh", when="entropy", every=2, threshold=6.5, window=3),
    method("refresh", when="budget", every=2, budget=500),
    method("refresh", when="probe", every=5, threshold=0.001),
    method("refresh", when="mc-dropout", every=5, threshold=0.5, passes=3),
    method("speculative", draft="student"),
    method("speculative", draft="draft"),
    method("compress", last=0, segment=8),
    method("compress", last=0, segment=8, scorer="draft"),
]


@pytest.mark.thinned
@pytest.mark.parametrize("chosen", CASES, ids=repr)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3, "n": 2}], ids=["greedy", "sampled"])
def test_every_method_under_every_schedule(chosen: Method, sampling: dict[str, Any], tiny_llm: TinyLLM) -> None:
    """Alone, batched, chunked, prefix-hit, preempted and streamed give the same tokens."""
    tiny_llm = partial(tiny_llm, **dict.fromkeys(chosen.companions, "int8"))
    plain = tiny_llm(prefix_index="off")
    with pages_used(plain) as used:
        expected = [ids(plain, [prompt], method=chosen, **sampling)[0] for prompt in PROMPTS]
    assert ids(plain, PROMPTS, method=chosen, **sampling) == expected, "batched"
    assert plain.pool.num_used == 0
    assert ids(tiny_llm(max_step_tokens=5), PROMPTS, method=chosen, **sampling) == expected, "chunked"
    warm = tiny_llm()
    for state in ("cold", "warm"):
        assert ids(warm, PROMPTS, method=chosen, **sampling) == expected, state
    indexes = [model.index for model in warm.engine.models.values()]
    assert sum(index.hit_tokens for index in indexes if index is not None) > 0
    streamed: dict[int, list[int]] = {}
    for token in plain.stream(PROMPTS[1], method=chosen, max_tokens=24, ignore_eos=True, **sampling):
        streamed.setdefault(token.choice, []).append(token.id)
    assert [streamed[choice] for choice in sorted(streamed)] == expected[1], "streamed"
    # Room for hardly more than the largest request: short ones that begin with a page each soon need two.
    tight = tiny_llm(kv_bytes=(max(used) + 1) * plain.pool.page_bytes)
    crowd, answers = PROMPTS[:1] * 6 + PROMPTS, expected[:1] * 6 + expected
    assert ids(tight, crowd, method=chosen, **sampling) == answers, "short of pages"
    assert tight.engine.preemptions > 0
    assert tight.pool.num_used == tight.engine.cached_pages(tight.pool)


def test_what_is_no_program_is_one_line(tiny_llm: TinyLLM) -> None:
    """A method without a yield, and a stroke that is none."""
    llm = tiny_llm(prefix_index="off")

    def other() -> Program:
        yield cast("Any", 5)

    for program, message in (
        (lambda: 5, "is a generator, whose body has a yield, not int"),
        (other, "and ReadWeights, not int"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            run(llm, cast("Any", program))
    assert (llm.engine.num_running, llm.pool.num_used) == (0, 0)


def test_an_empty_prompt_is_refused_before_any_technique(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(student="int8", draft="int8")
    for chosen in CASES:
        with pytest.raises(InvalidRequest, match="the prompt is empty: give at least one token"):
            llm.request([], SamplingParams(), chosen)


def test_preempted_again_and_again(tiny_llm: TinyLLM) -> None:
    """Ten requests in room for two and a half end with the same tokens as alone."""
    prompts = [[k + 2] * 20 for k in range(10)]
    plain = tiny_llm(prefix_index="off")
    expected = [ids(plain, [prompt], max_tokens=60)[0] for prompt in prompts]
    tight = tiny_llm(kv_bytes=13 * plain.pool.page_bytes, prefix_index="off")
    assert ids(tight, prompts, max_tokens=60) == expected
    assert tight.engine.preemptions > 3
    assert tight.pool.num_used == 0


def test_a_program_that_finds_no_page_starts_again(tiny_llm: TinyLLM) -> None:
    """Joining parts of two pages takes a page, which a younger request gives up. If there is none, the answer ends."""
    page_bytes = tiny_llm().pool.page_bytes

    def joining() -> Program:
        one, other = yield [Prefill([5] * 10), Prefill([5] * 10)]
        run = yield Decode(one, max_tokens=30)
        return (run.kv[:5] + other[5:]).tokens

    for pages, fails in [(5, False), (4, True)]:
        llm = tiny_llm(kv_bytes=pages * page_bytes, prefix_index="off")
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        first = llm.engine.submit(Request(joining, params, llm.tokenizer))
        second = llm.engine.submit(llm.request([7] * 4, SamplingParams(max_tokens=60, ignore_eos=True)))
        llm.engine.finish([first, second])
        assert llm.engine.preemptions > 0
        assert first.result == (None if fails else [5] * 10)
        assert first.events[-1].finish_reason == ("length" if fails else None), "its text is kept"
        assert len(first.events) == 30
        assert len(second.events) == 60
        assert llm.pool.num_used == 0


def test_choices_share_the_prompts_pages(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(prefix_index="off")
    prompt = [5] * 160  # ten whole pages
    peak = 0
    for _ in llm.stream(prompt, n=8, temperature=1.0, max_tokens=10, ignore_eos=True):
        peak = max(peak, llm.pool.num_used)
    assert peak == 10 + 8
    assert llm.pool.num_used == 0


def test_prefill_and_decode_share_pages_with_what_they_extend(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(prefix_index="off")
    kv = llm.prefill([5] * 40)
    assert llm.pool.num_used == 3
    decoding = llm.decode(kv, max_tokens=3, ignore_eos=True)
    made = [token.id for token in decoding]
    assert decoding.kv.tokens == kv.tokens + made[:-1]
    assert decoding.kv.pending == made[-1]
    assert llm.pool.num_used == 3  # written after the last entry, in a page that kv also holds
    again = [token.id for token in llm.decode(kv, max_tokens=3, ignore_eos=True)]
    assert again == made
    longer = llm.prefill([9, 9], after=decoding.kv)
    assert longer.tokens == [*kv.tokens, *made, 9, 9]
    del kv, decoding, longer
    assert llm.pool.num_used == 0


def test_pending_and_recomputed_starts_agree(tiny_llm: TinyLLM) -> None:
    """A pending token and a value without tail continue the same text."""
    llm = tiny_llm()
    kv = llm.prefill([5, 6, 7, 8])
    whole = [token.id for token in llm.decode(kv, max_tokens=12, ignore_eos=True)]
    first = llm.decode(kv, max_tokens=5, ignore_eos=True)
    head = [token.id for token in first]
    assert head + [token.id for token in llm.decode(first.kv, max_tokens=7, ignore_eos=True)] == whole
    cut = llm.prefill([5, 6, 7, 8, 9, 10])[:4]
    assert cut.tail is None
    assert [token.id for token in llm.decode(cut, max_tokens=12, ignore_eos=True)] == whole


def test_every_choice_continues_its_own_values(tiny_llm: TinyLLM) -> None:
    """Values of different choices may have the same address in turn; they must not be confused."""
    llm = tiny_llm()
    right: list[bool] = []

    def program() -> Program:
        kv = yield Prefill([5, 6, 7])
        for _ in range(6):
            run = yield Decode(kv, max_tokens=3, emit=False)
            after = run.kv
            expected = [*after.tokens, after.pending, 8, 9]
            del run, kv
            kv = yield Prefill([8, 9], after)
            del after
            right.append(kv.tokens == expected)
        yield Emit(())

    for seed in range(5):
        run(llm, program, n=4, temperature=1.5, seed=seed, max_tokens=100, ignore_eos=True)
    assert right == [True] * (5 * 4 * 6)


def test_a_recomputed_entry_stays_where_it_was(tiny_llm: TinyLLM) -> None:
    """Also after a gap in the positions."""
    llm = tiny_llm()
    kv = llm.prefill(list(range(5, 21)))
    gap = kv[:2] + kv[8:9]
    decoding = llm.decode(gap, max_tokens=2, ignore_eos=True)
    list(decoding)
    assert decoding.kv.positions == [0, 1, 8, 9]
    assert llm.prefill([], after=gap).positions == [0, 1, 8]
    assert llm.prefill([], after=gap).tail is not None
    assert [t.id for t in llm.decode(kv[:4] + kv[4:16], max_tokens=4, ignore_eos=True)] == [
        t.id for t in llm.decode(kv, max_tokens=4, ignore_eos=True)
    ]


def test_penalties_see_every_token_before_the_first(tiny_llm: TinyLLM) -> None:
    """A pending or recomputed token counts like one that was entered."""
    llm = tiny_llm()
    whole = llm.prefill([5, 6, 7, 8])
    options: dict[str, Any] = {"max_tokens": 12, "repetition_penalty": 3.0, "ignore_eos": True}
    expected = [t.id for t in llm.decode(whole, **options)]
    assert [t.id for t in llm.decode(llm.prefill([5, 6, 7, 8, 9])[:-1], **options)] == expected
    options["max_tokens"] = 4
    first = llm.decode(whole, **options)
    head = [t.id for t in first]
    options["max_tokens"] = 8
    assert head + [t.id for t in llm.decode(first.kv, **options)] == expected


def test_dropping_an_iterator_frees_the_pages(tiny_llm: TinyLLM) -> None:
    """Also before its first token."""
    llm = tiny_llm(prefix_index="off")
    kv = llm.prefill([5] * 20)
    decoding = llm.decode(kv, max_tokens=5)
    assert llm.engine.num_waiting == 1
    del decoding, kv
    assert (llm.engine.num_waiting, llm.pool.num_used) == (0, 0)


def test_decoding_does_not_starve_a_prefill(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(max_step_tokens=1)
    params = SamplingParams(max_tokens=200, ignore_eos=True)
    long, short = (llm.engine.submit(llm.request([5, 6, 7], params)) for _ in range(2))
    while not short.events:
        llm.engine.step()
    assert not long.done
    for request in (long, short):
        llm.engine.cancel(request)


def test_tokens_emitted_at_once_have_no_pace(tiny_llm: TinyLLM) -> None:
    completion = tiny_llm().generate([[5, 6, 7]], method=method("best-of"), max_tokens=5, ignore_eos=True)[0]
    assert completion.timings.in_bulk
    assert Pace.of(completion.timings, 3).decode_tokens_per_second is None


def test_stopping_early_frees_the_pages(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(prefix_index="off")
    stream = llm.stream([5] * 50, max_tokens=100, ignore_eos=True)
    next(stream)
    assert llm.pool.num_used > 0
    stream.close()
    assert llm.pool.num_used == 0
    assert (llm.engine.num_running, llm.engine.num_waiting) == (0, 0)


def test_a_failing_program_ends_alone(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(prefix_index="off")

    def failing() -> Program:
        kv = yield Prefill([5, 6])
        yield Decode(kv, max_tokens=2)
        raise RuntimeError("a mistake in a technique")

    good = llm.engine.submit(llm.request([7, 8], SamplingParams(max_tokens=9, ignore_eos=True)))
    bad = llm.engine.submit(Request(failing, SamplingParams(ignore_eos=True), llm.tokenizer))
    with pytest.raises(RuntimeError, match="a mistake"):
        llm.engine.finish([bad, good])
    assert good.error is None
    assert len(good.events) == 9
    assert good.done
    assert llm.pool.num_used == 0


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda llm: llm.prefill([]), InvalidRequest, "empty"),
        (lambda llm: llm.prefill([5, 100_000]), InvalidRequest, "token ids must be from 0 to 383"),
        (lambda llm: llm.prefill([5, -1]), InvalidRequest, "token ids must be"),
        (lambda llm: llm.prefill([5] * 3000), InvalidRequest, "2048"),
        (lambda llm: llm.generate("text"), InvalidRequest, "list of prompts"),
        (lambda llm: llm.generate([[5]], max_token=3), InvalidRequest, "max_token"),
        (lambda llm: llm.generate([[5]], temperature=-1), InvalidRequest, "temperature"),
        (lambda llm: list(llm.decode(llm.prefill([5])[1:])), InvalidRequest, "no entries"),
        (lambda llm: llm.prefill([1.9, 2]), InvalidRequest, "a list of token ids"),
        (lambda llm: llm.prefill(["a", "b"]), InvalidRequest, "a list of token ids"),
        (lambda llm: llm.prefill(None), InvalidRequest, "a text or a list of token ids, not None"),
        (lambda llm: llm.prefill("a", after="b"), InvalidRequest, "KVCache is needed"),
        (lambda llm: llm.decode("abc"), InvalidRequest, "KVCache is needed"),
        (lambda llm: llm.generate(["a"], method="repeat"), InvalidRequest, "twostroke.method"),
        (lambda llm: llm.generate([[5]], logit_bias={10**6: 1.0}), InvalidRequest, "logit_bias"),
        (lambda llm: list(llm.decode(llm.prefill([5]), stop_token_ids=[10**6])), InvalidRequest, "stop_token_ids"),
        (lambda llm: LLM(str(llm.path.parent), kv_bytes=1 << 60), OutOfPages, "give it less"),
        (lambda llm: LLM(str(llm.path.parent), page_size=cast(Any, "a")), InvalidRequest, "page_size"),
        (lambda llm: run(llm, lambda: iter_of(Prefill([5], model="other"))), InvalidRequest, "no model 'other'"),
        (lambda llm: run(llm, lambda: iter_of("stroke")), InvalidRequest, "not str"),
    ],
)
def test_bad_requests(ask: Callable[[LLM], object], error: type[Exception], message: str, tiny_llm: TinyLLM) -> None:
    """Each is refused in one line, and the engine continues."""
    llm = tiny_llm(prefix_index="off")
    with pytest.raises(error, match=message) as caught:
        ask(llm)
    assert "\n" not in str(caught.value)
    del caught
    assert len(llm.generate([[5, 6]], max_tokens=3, ignore_eos=True)[0].tokens) == 3


def iter_of(*strokes: object) -> Program:
    yield from strokes  # pyright: ignore[reportReturnType]


def test_values_of_other_geometry_are_refused(tiny_llm: TinyLLM) -> None:
    llama, qwen = tiny_llm("llama"), tiny_llm("qwen3")
    with pytest.raises(GeometryMismatch, match=r"KV heads of 16. is not .3 layers of 2 KV heads of 32"):
        qwen.prefill([5], after=llama.prefill([6]))


def test_a_request_larger_than_the_pool_fails_and_the_rest_goes_on(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(kv_bytes=5 * tiny_llm().pool.page_bytes)
    small = llm.engine.submit(llm.request([7, 8], SamplingParams(max_tokens=30, ignore_eos=True)))
    with pytest.raises(OutOfPages, match="kv_bytes"):
        llm.generate([[5] * 100])
    llm.engine.finish([small])
    assert len(small.events) == 30


def test_values_held_by_the_caller_are_never_taken(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(kv_bytes=6 * tiny_llm().pool.page_bytes)
    held = llm.prefill([5] * 64)
    before = held.entries()
    with pytest.raises(OutOfPages):
        llm.generate([[6] * 64])
    assert (held.entries() == before).all()
    assert len(list(llm.decode(held, max_tokens=20, ignore_eos=True))) == 20


def test_the_context_fills_up(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm(kv_bytes=64 << 20)
    completion = llm.generate([[5] * 2040], max_tokens=None, ignore_eos=True)[0]
    assert len(completion.tokens) == 8  # of positions 2040 to 2047; the last token is not entered
    assert completion.finish_reason == "length"


def test_emit_after_candidates(tiny_llm: TinyLLM) -> None:
    """Candidates are not streamed. Emitted tokens go to the caller once, up to the request's end."""
    llm = tiny_llm()

    def program() -> Program:
        kv = yield Prefill([5, 6, 7])
        runs = yield [Decode(kv, emit=False, stream=i, max_tokens=4) for i in range(3)]
        assert [len(r.tokens) for r in runs] == [4, 4, 4]
        ended = yield Emit(runs[1].sampled)
        assert not ended
        ended = yield Emit(runs[2].sampled)
        assert ended
        run = yield Decode(runs[2].kv)
        assert run.tokens == []
        return runs

    request = run(llm, program, temperature=1.0, seed=1, max_tokens=6, ignore_eos=True)
    runs = request.result
    assert [token.id for token in request.events] == [*runs[1].tokens, *runs[2].tokens[:2]]
    assert request.events[-1].finish_reason == "length"


def test_until_sees_statistics(tiny_llm: TinyLLM) -> None:
    llm = tiny_llm()

    def program() -> Program:
        kv = yield Prefill([5, 6, 7])
        return (yield Decode(kv, until=lambda sampled: len(sampled) == 4, stats=True, keep_logits=True))

    request = run(llm, program, ignore_eos=True)
    assert len(request.result.tokens) == 4
    for sampled in request.result.sampled:
        probabilities = torch.from_numpy(sampled.logits).softmax(-1).double()
        assert sampled.top_probability == pytest.approx(float(probabilities.max()), rel=1e-4)
        assert sampled.entropy == pytest.approx(float(-(probabilities * probabilities.log2()).sum()), rel=1e-3)


def test_timings(tiny_llm: TinyLLM) -> None:
    completion = tiny_llm().generate([[5, 6, 7]], max_tokens=5, ignore_eos=True)[0]
    timings = completion.timings
    assert timings.scheduled is not None
    assert timings.finished is not None
    assert timings.arrival <= timings.scheduled <= timings.tokens[0] <= timings.finished
    assert len(timings.itls) == 4
    assert timings.tpot == pytest.approx(sum(timings.itls) / 4)
