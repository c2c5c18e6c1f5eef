"""Compose: the prompt of one technique, and what another keeps of it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.methods.watching import PROMPT, needs_native, runs_of
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.methods import Compose, Compress, Method, PartRep, Prompt, method
from twostroke.sampling.params import SamplingParams

Native = Callable[..., LLM]


@needs_native
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("plain", "keydiff:budget=9"),
        ("repeat:keep=all", "snap:budget=20+window=4+per=head"),
        ("partrep:ratio=0.5", "expected-attention:budget=20"),
        ("partrep:ratio=0.5", "drop:window=12+every=4"),
        ("reread", "critical-kv:budget=20+newest=4"),
    ],
)
def test_the_second_gets_the_prompt_of_the_first(first: str, then: str, native_llm: Native) -> None:
    llm = native_llm()
    name, _, rest = first.partition(":")
    (whole,) = runs_of(llm, method(name, **dict([rest.split("=")] if name == "repeat" else [])), PROMPT, max_tokens=1)[
        1
    ]
    if name == "partrep":
        (whole,) = runs_of(llm, PartRep(ratio=0.5), PROMPT, max_tokens=1)[1]
    made, runs, _ = runs_of(llm, Compose(first=first, then=then), PROMPT)
    key, _, options = then.partition(":")
    parameters = {k: int(v) if v.isdigit() else v for k, v in (pair.split("=") for pair in options.split("+"))}
    expected, others, _ = runs_of(llm, method(key, **parameters), whole.kv.tokens)
    assert made == expected
    assert (runs[-1].kv.entries() == others[-1].kv.entries()).all()


@needs_native
def test_a_first_technique_may_score_passages_side_by_side(native_llm: Native) -> None:
    llm = native_llm()
    text = "\n\n".join(f"the quick {name} fox jumps over the lazy dog" for name in "abcdefghij")
    (whole,) = runs_of(llm, Compress(ratio=0.4), llm.tokenizer.encode(text), max_tokens=1)[1]
    composed = llm.generate([text], method=Compose(first="compress:ratio=0.4", then="tova"), max_tokens=8)[0]
    assert composed.text == llm.generate([whole.kv.tokens], method=method("tova"), max_tokens=8)[0].text


@needs_native
def test_nothing_is_computed_twice(native_llm: Native) -> None:
    llm = native_llm()
    asked: list[int] = []

    def counted(technique: Method) -> Program:
        program, result = technique.program(Prompt(PROMPT, llm.tokenizer)), None
        while True:
            try:
                stroke = program.send(result)
            except StopIteration:
                return
            asked.extend([len(stroke.tokens)] if isinstance(stroke, Prefill) else [])
            result = yield stroke

    request = Request(lambda: counted(Compose(then="tova:budget=9")), SamplingParams(max_tokens=2), llm.tokenizer)
    llm.engine.finish([llm.engine.submit(request)])
    assert asked == [2 * len(PROMPT), 1], "the last token's queries are computed again"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"then": "none"}, "there is no method 'none'"),
        ({"then": "n" * 50_000}, "there is no method 'nnn"),
        ({"then": "snap:much=3"}, "method snap has no parameter 'much'"),
        ({"then": "snap:budget"}, "budget must be an integer"),
        ({"first": "compose:first=" * 50_000}, "first must be another technique"),
        ({"first": ""}, "first must be"),
        ({"first": None}, "first must be"),
        ({"then": 3}, "then must be"),
        ({"then": "keydiff:ratio=nan"}, "ratio must be a number"),
    ],
)
def test_bad_parameters_are_one_line(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as error:
        method("compose", **parameters)
    assert len(str(error.value)) < 2000
    assert "\n" not in str(error.value)


@needs_native
@pytest.mark.parametrize("first", ["repeat", "keydiff:budget=9", "best-of"])
def test_a_first_technique_that_drops_is_refused(first: str, native_llm: Native) -> None:
    llm = native_llm()
    with pytest.raises(InvalidRequest, match=f"compose: {first} must keep all that it prefills"):
        llm.generate([PROMPT], method=Compose(first=first), max_tokens=4)
    assert len(llm.generate([PROMPT], max_tokens=4, ignore_eos=True)[0].tokens) == 4


def test_what_it_needs_is_what_its_parts_need() -> None:
    both = Compose(first="compress:scorer=draft", then="keydiff:budgets=ada")
    assert (both.companions, both.by_head, both.biased) == (("draft",), True, True)
    assert not Compose(then="drop").by_head
    assert (Compose(then="drop").goes_on, Compose(first="drop").goes_on) == (True, False)
    assert (Compose(then="d2o").makes_entries, Compose(then="tova").makes_entries) == (True, False)
