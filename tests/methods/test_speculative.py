"""Speculation changes the speed of tokens, never the tokens, at any temperature."""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.test_guess_judge import DearRows
from tests.methods.watching import PROMPT, needs_native, runs_of
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.engine.output import Token
from twostroke.errors import InvalidRequest
from twostroke.methods import Method, OverFill, Plain, Speculative, method
from twostroke.sampling.draw import Draw, Noise
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.sampler import distribution, sample

Native = Callable[..., LLM]
TEXT = (PROMPT + PROMPT[:7]) * 2
METHODS = [
    Speculative(),
    Speculative(guesses=3, adaptive=False),
    Speculative("student"),
    Speculative("student", guesses=9, adaptive=False),
    Speculative("draft", guesses=2, adaptive=False),
    Speculative("draft"),
]
SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 6},
    {"temperature": 0.3, "seed": 2, "logprobs": 3},
    {"temperature": 1.0, "seed": 1, "top_p": 0.8, "top_k": 20, "n": 3},
    {"temperature": 0.5, "seed": 3, "presence_penalty": 1.5, "frequency_penalty": 0.3, "repetition_penalty": 1.3},
    {"temperature": 0.4, "seed": 4, "min_tokens": 20, "ignore_eos": False, "stop": ("e", "th"), "max_tokens": 60},
    {"max_tokens": 1},
    {"max_tokens": 2},
]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A draft model of another geometry."""
    sizes = {"num_hidden_layers": 1, "head_dim": 64, "num_attention_heads": 2}
    return f"{write_model('llama', tmp_path_factory.mktemp('draft'), seed=4, **sizes)}@int8"


def tokens(llm: LLM, chosen: Method, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[list[Token]]:
    fields: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    fields |= sampling
    made = llm.generate(prompts, method=chosen, **fields)
    return [output.tokens for completion in made for output in completion.outputs]


@needs_native
@pytest.mark.thinned
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: "-".join(sampling) or "greedy")
@pytest.mark.parametrize("chosen", METHODS, ids=repr)
def test_bit_for_bit_the_plain_answer(chosen: Method, sampling: dict[str, Any], native_llm: Native, other: str) -> None:
    """Ids, texts, log-probabilities, alternatives and ends, alone and batched, chunked and prefix-hit."""
    options = {"student": "int4", "draft": other}
    prompts = [TEXT, PROMPT, [7]]
    expected = [tokens(native_llm(), Plain(), [prompt], **sampling) for prompt in prompts]
    llm = native_llm(**options)
    assert [tokens(llm, chosen, [prompt], **sampling) for prompt in prompts] == expected
    llm = native_llm(**options, max_step_tokens=6, prefix_index="radix")
    for _ in range(2):
        assert tokens(llm, chosen, prompts, **sampling) == list(itertools.chain(*expected))


@needs_native
@pytest.mark.parametrize("chosen", METHODS, ids=repr)
def test_the_kv_is_the_plain_answers(chosen: Speculative, native_llm: Native, other: str) -> None:
    llm = native_llm(student="int4", draft=other)
    text = TEXT * 2  # long enough for a lookup to be right a few times
    made, runs, facts = runs_of(llm, chosen, text, max_tokens=50)
    final = runs[-1].kv
    whole = llm.prefill([*text, *made[:-1]])
    assert final.tokens == whole.tokens
    assert (final.entries() == whole.entries()).all()
    assert final.canonical_length(llm.model.id) == len(final)
    if chosen.adaptive or chosen.draft == "lookup":
        return
    assert facts.accepted < facts.guessed
    # A round yields the accepted guesses and one more token, except the last, which may end with a guess.
    assert 1 + facts.rounds + facts.accepted in (50, 51)
    assert facts.accepted or chosen.draft == "draft"  # random weights guess at random


@needs_native
@pytest.mark.parametrize("role", ["student", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_that_knows_is_always_right(role: str, temperature: float, native_llm: Native) -> None:
    llm = native_llm(**{role: "int8"})
    chosen = Speculative(role, guesses=3, adaptive=False)
    _, _, facts = runs_of(llm, chosen, PROMPT, temperature=temperature, seed=1, max_tokens=41)
    assert facts.accepted == facts.guessed == 30
    assert facts.rounds == 10


@needs_native
def test_how_many_are_guessed(native_llm: Native) -> None:
    """Always the most where no judge says less; none past the request's end."""
    llm = native_llm(student="int4")
    _, runs, _ = runs_of(llm, Speculative("student", guesses=3, adaptive=False), PROMPT, max_tokens=60)
    left = 59
    for draft, run in zip(runs[1::2], runs[2::2], strict=True):
        assert len(draft.tokens) == min(3, left)
        left -= len(run.tokens)


@needs_native
@pytest.mark.parametrize("source", ["lookup", "student", "draft"])
def test_where_no_guess_pays_few_are_tried(source: str, native_llm: Native, other: str) -> None:
    """Tokens are then decoded many at once, between looks that are ever rarer."""
    llm = native_llm(student="int4", draft=other)
    forecast = llm.engine.forecast = DearRows()
    made, _, facts = runs_of(llm, Speculative(source), TEXT * 2, max_tokens=300)
    assert forecast.asked
    assert made == runs_of(llm, Plain(), TEXT * 2, max_tokens=300)[0]
    assert facts.guessed == facts.rounds <= 300 // 33


@needs_native
def test_what_another_answer_said_is_guessed(native_llm: Native) -> None:
    """A second answer to the same question is known, to requests of the same salt alone."""
    llm = native_llm()
    chosen, params = Speculative(adaptive=False), SamplingParams(max_tokens=60, ignore_eos=True)

    def accepted(salt: bytes) -> int:
        request = llm.request(PROMPT, params, chosen)
        request.cache_salt = salt
        llm.engine.finish([llm.engine.submit(request)])
        return request.result.accepted

    first = accepted(b"")
    assert accepted(b"") > max(40, first)
    assert accepted(b"other") == first
    assert accepted(b"other") > 40


@needs_native
def test_the_context_fills_up(native_llm: Native) -> None:
    llm = native_llm(student="int4", kv_bytes=64 << 20)
    for chosen in (Speculative("student", guesses=20), Speculative()):
        made = tokens(llm, chosen, [[5] * 2040], max_tokens=None)[0]
        assert made == tokens(llm, Plain(), [[5] * 2040], max_tokens=None)[0]
        assert (len(made), made[-1].finish_reason) == (8, "length")


def chi_square(counts: Counter[Any], expected: dict[Any, float]) -> tuple[float, int]:
    """(statistic, degrees of freedom) over the outcomes expected at least 5 times, with the others merged."""
    total = sum(counts.values())
    cells = [(counts[key], total * p) for key, p in expected.items() if total * p >= 5]
    rest = (total - sum(seen for seen, _ in cells), total - sum(wanted for _, wanted in cells))
    cells += [rest] if rest[1] > 1 else []
    return sum((seen - wanted) ** 2 / wanted for seen, wanted in cells), len(cells) - 1


def far(statistic: float, freedom: int) -> bool:
    """Whether chance gives this in less than one of 30,000 trials (Wilson and Hilferty 1931: 4 standard deviations)."""
    return (statistic / freedom) ** (1 / 3) > 1 - 2 / (9 * freedom) + 4 * (2 / (9 * freedom)) ** 0.5


def test_a_draft_guesses_nearly_as_well_as_can_be() -> None:
    """Tokens drawn from two distributions with the same noise are equal with probability at least (1 - d) / (1 + d).

    d is the total variation distance; 1 - d is the upper bound (Daliri et al. 2025, arXiv:2408.07978).
    """
    rng, trials = np.random.default_rng(0), 4000
    for spread in (0.1, 1.0, 3.0):
        target = rng.standard_normal(40).astype(np.float32) * 2
        guessing = target + rng.standard_normal(40).astype(np.float32) * spread
        draws = [
            Draw(SamplingParams(temperature=0.7), Noise.of(0.7, b"seed", index), index, np.zeros(0, np.int32), [])
            for index in range(trials)
        ]
        made, guessed = (
            [one.id for one in sample(np.broadcast_to(row, (trials, 40)), draws)] for row in (target, guessing)
        )
        same = np.mean([a == b for a, b in zip(made, guessed, strict=True)])
        weights = [np.exp(row / 0.7) for row in (target, guessing)]
        most = float(np.minimum(*(each / each.sum() for each in weights)).sum())
        error = 4 * 0.5 / trials**0.5
        assert most / (2 - most) - error < same < most + error


@needs_native
def test_sampled_answers_follow_the_models_distribution(native_llm: Native) -> None:
    """The frequencies of all outcomes of three tokens, against the product of the model's probabilities."""
    llm = native_llm(student="int2")
    fields: dict[str, Any] = {"temperature": 1.0, "top_k": 3, "max_tokens": 3, "ignore_eos": True}
    params, expected = SamplingParams(**fields), {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, probability in expected.items():
            tail = llm.prefill([*PROMPT, *text]).tail
            assert tail is not None
            assert tail.logits is not None
            weights, ids = distribution(tail.logits, params)
            longer |= {(*text, i): probability * w for i, w in zip(ids.tolist(), weights.tolist(), strict=True)}
        expected = longer

    def counts(chosen: Method) -> Counter[tuple[int, ...]]:
        made = tokens(llm, chosen, [PROMPT], seed=9, n=1000, **fields)
        return Counter(tuple(token.id for token in answer) for answer in made)

    for chosen in (Speculative("student"), Plain()):
        assert not far(*chi_square(counts(chosen), expected))
    assert far(*chi_square(counts(OverFill()), expected))


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"draft": "oracle"}, "draft must be one of lookup, student, draft"),
        ({"guesses": 33}, "guesses must be an integer from 1 to 32"),
        ({"adaptive": 1}, "adaptive must be true or false"),
        ({"context": 0}, "context must be an integer from 1"),
    ],
)
def test_bad_parameters(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        method("speculative", **parameters)


def test_a_draft_with_a_shorter_context_is_refused(tiny_llm: Native, tmp_path: Path) -> None:
    short = write_model("llama", tmp_path, max_position_embeddings=512)
    with pytest.raises(InvalidRequest, match="it has 512 positions"):
        tiny_llm(draft=str(short))
