"""An answer that another engine has begun goes on with the tokens that it would have had there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.engine.test_engine import CASES
from tests.samplings import Falling, samplings
from twostroke.api.llm import LLM
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.methods import Method
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]
PROMPT = [7, 9, 11] * 9
SAMPLINGS = samplings(min_tokens=15)


@pytest.fixture
def exact_llm(tiny_llm: TinyLLM) -> TinyLLM:
    """Models on the native backend, whose results are the same bits under every schedule."""
    return partial(tiny_llm, "qwen3", weights="bf16")


def request(llm: LLM, chosen: Method | None = None, **fields: Any) -> Request:
    asked: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True} | fields
    return llm.request(PROMPT, SamplingParams(**asked), chosen)


def answer(llm: LLM, asked: Request) -> list[Token]:
    llm.engine.run([asked])
    asked.raise_error()
    return list(asked.events)


@pytest.mark.thinned
@pytest.mark.parametrize("chosen", CASES, ids=repr)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "sampled"])
def test_every_method_goes_on_at_every_place(chosen: Method, sampling: dict[str, Any], exact_llm: TinyLLM) -> None:
    open_tiny = partial(exact_llm, **dict.fromkeys(chosen.companions, "int8"))
    first, second = open_tiny(), open_tiny(max_step_tokens=7)
    whole = answer(first, request(first, chosen, **sampling))
    for cut in (1, 5, 19):
        rest = request(second, chosen, **sampling)
        rest.take_over([token.id for token in whole[:cut]])
        assert answer(second, rest) == whole[cut:], cut


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=list(SAMPLINGS))
def test_all_that_depends_on_earlier_tokens_goes_on(sampling: dict[str, Any], exact_llm: TinyLLM) -> None:
    llm = exact_llm()
    whole = answer(llm, request(llm, **sampling))
    for cut in range(len(whole)):
        rest = request(llm, **sampling)
        rest.take_over([token.id for token in whole[:cut]])
        assert answer(llm, rest) == whole[cut:]


def test_a_constraint_goes_on(exact_llm: TinyLLM) -> None:
    llm = exact_llm()
    whole = answer(llm, request(llm, constraint=Falling, temperature=1.0, seed=5))
    assert whole[-1].finish_reason == "stop"
    for cut in range(len(whole)):
        rest = request(llm, constraint=Falling, temperature=1.0, seed=5)
        rest.take_over([token.id for token in whole[:cut]])
        assert answer(llm, rest) == whole[cut:]


def test_a_stop_string_is_found_across_the_place(exact_llm: TinyLLM) -> None:
    """Also text that is held back: the beginning of a stop string, and bytes of a character that is not whole."""
    llm = exact_llm()
    free = answer(llm, request(llm, temperature=1.5, seed=2))
    text = "".join(token.text for token in free)
    stop = text[len(text) // 2 : len(text) // 2 + 4]
    whole = answer(llm, request(llm, temperature=1.5, seed=2, stop=stop))
    assert whole[-1].stop == stop
    for cut in range(len(whole)):
        rest = request(llm, temperature=1.5, seed=2, stop=stop)
        rest.take_over([token.id for token in whole[:cut]])
        assert answer(llm, rest) == whole[cut:]


def test_an_answer_that_has_ended_has_no_more_tokens(exact_llm: TinyLLM) -> None:
    llm = exact_llm()
    whole = answer(llm, request(llm))
    rest = request(llm)
    rest.take_over([token.id for token in whole])
    assert answer(llm, rest) == []
    assert rest.choices[0].output.finish_reason == "length"


def test_another_models_answer_is_refused_where_it_is_sampled_again(exact_llm: TinyLLM) -> None:
    llm = exact_llm(student="int8")
    chosen = next(one for one in CASES if one.name == "refresh" and getattr(one, "when", "") == "entropy")
    whole = answer(llm, request(llm, chosen))
    rest = request(llm, chosen)
    rest.take_over([whole[0].id ^ 1])
    with pytest.raises(InvalidRequest, match="give every worker the same model"):
        answer(llm, rest)


def test_several_choices_go_on_each_at_its_place(exact_llm: TinyLLM) -> None:
    sampled: dict[str, Any] = {"n": 3, "temperature": 1.0, "seed": 3}
    llm = exact_llm()
    whole = [[token for token in answer(llm, request(llm, **sampled)) if token.choice == i] for i in range(3)]
    for cuts in ((0, 0, 1), (20, 7, 0), (6, 6, 5), (20, 20, 19)):
        rest = request(llm, **sampled)
        rest.take_over(*([token.id for token in tokens[:cut]] for tokens, cut in zip(whole, cuts, strict=True)))
        made = answer(llm, rest)
        for i, cut in enumerate(cuts):
            assert [token for token in made if token.choice == i] == whole[i][cut:]


def test_only_a_new_request_takes_over_one_answer_for_each_choice(exact_llm: TinyLLM) -> None:
    llm = exact_llm()
    with pytest.raises(InvalidRequest):
        request(llm, n=2).take_over([5])
    begun = request(llm)
    answer(llm, begun)
    with pytest.raises(InvalidRequest):
        begun.take_over([5])
