"""Log-probabilities of given texts equal those of a full matrix of logits, however they are computed."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from tests.conftest import no_page_may_be_lost
from twostroke.api.llm import LLM
from twostroke.api.scoring import encode_pair
from twostroke.backends import lazy_logits
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.scores import score
from twostroke.sampling.statistics import log_softmax

OpenTiny = Callable[..., LLM]
TOKENS = [*range(5, 60)]
WHY_NOT = library.unavailable()
needs_native = pytest.mark.skipif(WHY_NOT is not None, reason=f"no native backend: {WHY_NOT}")


@pytest.fixture
def exact() -> Iterator[LLM]:
    """A model on a backend whose bits do not depend on the schedule."""
    llm = LLM("smollm2-135m", backend="native", kv_bytes=32 << 20, threads=1)
    yield llm
    no_page_may_be_lost([llm])


def prefilled(llm: LLM, *strokes: Any) -> list[Any]:
    """The results of strokes, one after another; a function of the last result is called for its stroke."""

    def program() -> Program:
        made: list[Any] = []
        for stroke in strokes:
            asked: Any = stroke(made[-1]) if callable(stroke) else stroke
            made.append((yield asked))
        return made

    request = Request(program, SamplingParams(), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    return request.result


def expected(llm: LLM, tokens: list[int]) -> np.ndarray:
    """Log-probabilities [n, vocab] after each token, from all logits at once."""
    [made] = prefilled(llm, Prefill(tokens, logits="all"))
    return log_softmax(made.logits)


def _one(stroke: Prefill) -> Program:
    yield stroke


def test_scores_equal_all_logits(tiny_llm: OpenTiny) -> None:
    llm = tiny_llm(prefix_index="off")
    rows_ = expected(llm, TOKENS)
    [made] = prefilled(llm, Prefill(TOKENS, logprobs=3))
    assert made.scores[0] is None, "nothing precedes the first token"
    assert len(made.scores) == len(TOKENS)
    for place, one in enumerate(made.scores[1:], 1):
        row = rows_[place - 1]
        assert one.id == TOKENS[place]
        assert one.logprob == pytest.approx(row[one.id], abs=1e-5)
        assert one.rank == 1 + (row > row[one.id]).sum()
        assert [id for id, _ in one.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [value for _, value in one.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-5)


@needs_native
def test_chunked_or_whole_and_with_prefix_hits_the_bits_are_equal(exact: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of a step, pieces of rows in the head, and prefixes from the index change nothing on an exact backend."""
    llm = exact
    index = llm.model.index
    assert index is not None
    [whole] = prefilled(llm, Prefill(TOKENS, logprobs=2))
    for chunk in (1, 7, 30):
        index.clear()
        llm.engine.config = SchedulerConfig(max_step_tokens=chunk)
        [made] = prefilled(llm, Prefill(TOKENS, logprobs=2))
        assert made.scores == whole.scores
    for start in (0, 1, 17, 40, 54):
        [made] = prefilled(llm, Prefill(TOKENS, logprobs=2, scored_from=start))
        assert made.scores == whole.scores[start:], "hits leave out what is scored"
    monkeypatch.setattr(lazy_logits, "SCORED_ROWS", 5)
    llm.engine.config = SchedulerConfig(max_step_tokens=16)
    [made] = prefilled(llm, Prefill(TOKENS, logprobs=2))
    assert made.scores == whole.scores


def test_a_hit_covers_what_is_not_scored(tiny_llm: OpenTiny) -> None:
    llm = tiny_llm(page_size=4)
    prefilled(llm, Prefill(TOKENS))

    def cached(start: int) -> int:
        request = Request(lambda: _one(Prefill(TOKENS, logprobs=0, scored_from=start)), SamplingParams(), llm.tokenizer)
        llm.engine.finish([llm.engine.submit(request)])
        return request.cached_tokens

    assert cached(0) == 0
    assert cached(1) == 0
    assert cached(21) == 20, "all pages before the row that scores token 21"
    assert cached(20) == 16


@needs_native
def test_scores_continue_a_value(exact: LLM) -> None:
    """The first token's row is the value's tail; without one, the last entry is computed again."""
    llm = exact
    [whole] = prefilled(llm, Prefill(TOKENS, logprobs=1))

    def behind(cut: Callable[[KVCache], KVCache]) -> tuple[Any, ...]:
        return prefilled(llm, Prefill(TOKENS[:30]), lambda kv: Prefill(TOKENS[30:], cut(kv), logprobs=1))[1].scores

    assert behind(lambda kv: kv) == whole.scores[30:]
    assert behind(lambda kv: kv[:29] + kv[29:30]) == whole.scores[30:]
    assert behind(lambda kv: kv.with_tail(None)) == whole.scores[30:]


def test_the_matrix_never_exists(tiny_llm: OpenTiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most SCORED_ROWS rows of logits exist at once, in a step of any size."""
    llm = tiny_llm(max_step_tokens=512)
    monkeypatch.setattr(lazy_logits, "SCORED_ROWS", 16)
    compiled: Any = llm.model.compiled
    seen: list[int] = []
    logits = compiled.logits

    def watched(hidden: Any) -> Any:
        seen.append(len(hidden))
        return logits(hidden)

    monkeypatch.setattr(compiled, "logits", watched)
    tokens = [int(id) for id in np.random.default_rng(0).integers(3, 200, 400)]
    prefilled(llm, Prefill(tokens, logprobs=1))
    assert max(seen) == 16
    assert sum(seen) == 399


def test_score_ranks_ties_by_id() -> None:
    made = score(np.array([[1.0, 3.0, 3.0, 0.0]], np.float32).repeat(4, 0), [0, 1, 2, 3], 2)
    assert [one.rank for one in made] == [3, 1, 2, 4]
    assert [one.greedy for one in made] == [False, True, False, False]
    assert [id for id, _ in made[0].top] == [1, 2]


@pytest.fixture
def llm(tiny_llm: OpenTiny) -> LLM:
    return tiny_llm()


@needs_native
def test_llm_score(exact: LLM) -> None:
    """Equal to the full matrix, alone, as a list, and with the prompts' entries shared."""
    llm = exact
    prompt, answers = "the quick brown", [" fox", " dog jumps", " fox jumps"]
    single = [llm.score(prompt, answer) for answer in answers]
    assert llm.score(prompt, answers) == single
    assert llm.score([prompt] * 3, answers) == single
    for answer, made in zip(answers, single, strict=True):
        pair = encode_pair(llm.tokenizer, prompt, answer)
        rows_ = expected(llm, [*pair.prompt, *pair.continuation])[len(pair.prompt) - 1 : -1]
        assert made.tokens == pair.continuation
        wanted = [float(row[id]) for row, id in zip(rows_, made.tokens, strict=True)]
        assert made.logprobs == pytest.approx(wanted, abs=1e-5)
        assert made.sum == pytest.approx(sum(wanted), abs=1e-4)
        assert made.greedy == all(row.argmax() == id for row, id in zip(rows_, made.tokens, strict=True))
    greedy = llm.generate([prompt], max_tokens=5, ignore_eos=True)[0].tokens
    ids = llm.encode(prompt)
    assert llm.score(ids, [token.id for token in greedy]).greedy
    assert not llm.score(ids, [token.id for token in greedy[:-1]] + [(greedy[-1].id + 1) % 200]).greedy


def test_what_score_refuses(llm: LLM) -> None:
    with pytest.raises(InvalidRequest, match="continuation is empty"):
        llm.score("the", "")
    with pytest.raises(InvalidRequest, match="2 prompts and 1 continuations"):
        llm.score(["a", "b"], ["c"])
    with pytest.raises(InvalidRequest, match="a list of continuations"):
        llm.score(["a", "b"], "c")
    with pytest.raises(InvalidRequest, match=r"token ids must be from 0 to \d+, not 1000000"):
        llm.score([5], [10**6])
    with pytest.raises(InvalidRequest, match="a text or a list of token ids"):
        llm.score([5, 6], [[7], [8.5]])  # pyright: ignore[reportCallIssue, reportArgumentType]
    assert llm.score("the", []) == []


def test_the_border_is_that_of_lm_eval(llm: LLM) -> None:
    """Whole encoded, split behind the prompt's tokens; whitespace at the prompt's end belongs to the continuation."""
    tokenizer = llm.tokenizer
    whole = tokenizer.encode("the quick fox", add_bos=tokenizer.add_bos)
    for prompt, continuation in (("the quick", " fox"), ("the quick ", "fox")):
        pair = encode_pair(tokenizer, prompt, continuation)
        assert pair.prompt + pair.continuation == whole
        assert pair.prompt == tokenizer.encode("the quick", add_bos=tokenizer.add_bos)
    empty = encode_pair(tokenizer, "", "the quick fox")
    assert empty.continuation == tokenizer.encode("the quick fox", add_bos=False)
    assert len(empty.prompt) == 1


def test_generate_with_prompt_logprobs(llm: LLM) -> None:
    """The answer is that of a plain request, and the prompt's scores come with it, for every n; 0 tokens are fine."""
    plain = llm.generate([TOKENS], max_tokens=8, n=2, temperature=1.0, seed=3)[0]
    made = llm.generate([TOKENS], max_tokens=8, n=2, temperature=1.0, seed=3, prompt_logprobs=2)[0]
    assert [one.text for one in made.outputs] == [one.text for one in plain.outputs]
    assert plain.prompt_scores is None
    assert made.prompt_scores is not None
    assert made.prompt_scores == prefilled(llm, Prefill(TOKENS, logprobs=2))[0].scores
    none = llm.generate([TOKENS], max_tokens=0, prompt_logprobs=2)[0]
    assert none.prompt_scores == made.prompt_scores
    assert (none.text, none.tokens, none.finish_reason) == ("", [], "length")
    assert llm.generate([TOKENS], max_tokens=0)[0].finish_reason == "length"
    refused: list[dict[str, Any]] = [{"prompt_logprobs": 1}, {"max_tokens": 0}]
    for fields in refused:
        with pytest.raises(InvalidRequest, match="cannot be combined with method repeat"):
            llm.generate([TOKENS], method=method("repeat"), **fields)
