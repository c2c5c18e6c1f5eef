"""An answer that is prefilled in one engine and decoded in another is that of one engine, to the bit."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.cluster.wire.pairs import Pair, local
from tests.engine.test_engine import CASES
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.methods import METHODS, Method, Plain, method
from twostroke.methods.method import Prompt

PROMPT = [7, 9, 11] * 9
OPTIONS: dict[str, Any] = {"max_tokens": 16, "ignore_eos": True}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 2, "repetition_penalty": 1.2}


@pytest.mark.parametrize("chosen", CASES, ids=repr)
def test_every_method(chosen: Method, pair: Callable[..., Pair]) -> None:
    both = pair(max_step_tokens=7, prefix_index="off", **dict.fromkeys(chosen.companions, "int8"))
    for sampling in ({}, SAMPLED):
        options = OPTIONS | sampling
        moved = both.moved(PROMPT, chosen, **options)
        assert sorted(moved, key=order) == sorted(local(both.first, PROMPT, chosen, **options), key=order)
    assert both.sender.num_offers == 0
    assert (both.first.pool.num_used, both.second.pool.num_used) == (0, 0)


def order(token: Any) -> tuple[int, int]:
    return token.choice, token.index


class Loop(Plain, name="a loop of the tests"):
    """Goes on after its first decode, and does not say so."""

    side_by_side = False

    def program(self, prompt: Prompt) -> Program:
        stroke = Decode((yield Prefill(prompt)), max_tokens=3)
        run = yield [stroke, stroke] if self.side_by_side else stroke
        yield Decode(run.kv)


METHODS.pop(Loop.name)  # for this file alone


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_technique_has_to_say_that_it_goes_on(
    side_by_side: bool, pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "side_by_side", side_by_side)
    both = pair()
    with pytest.raises(InvalidRequest, match="its class needs `goes_on = True`"):
        both.prefilled(PROMPT, Loop())
    assert both.sender.num_offers == 0
    monkeypatch.setattr(Loop, "goes_on", True)
    monkeypatch.setattr(Loop, "side_by_side", False)
    assert both.moved(PROMPT, Loop(), **OPTIONS) == local(both.first, PROMPT, Loop(), **OPTIONS)


@pytest.mark.parametrize("first", ["partrep", "compress:ratio=0.2+last=0"])
def test_what_goes_on_from_more_than_a_value_is_refused(first: str, pair: Callable[..., Pair]) -> None:
    both = pair()
    text = both.first.tokenizer.encode("\n\n".join(f"the fox {n} jumps over the dog" for n in "abcdefgh"))
    with pytest.raises(InvalidRequest, match="let one process do both"):
        both.prefilled(text, method("compose", first=first, then="drop:window=9"))
    assert both.sender.num_offers == 0


TAUGHT = [one for one in CASES if one.name in ("overfill", "refresh") and getattr(one, "when", "") != "mc-dropout"]


@pytest.mark.parametrize("chosen", TAUGHT, ids=repr)
def test_the_teacher_is_in_another_process(chosen: Method, pair: Callable[..., Pair]) -> None:
    """One model prefills and refreshes, the other has the student's weights alone."""
    both = pair(first={"student": "int8"}, second={"weights": "int8"})
    for sampling in ({}, {"temperature": 1.0, "seed": 3, "logprobs": 2, "n": 2}):
        options = OPTIONS | sampling
        moved = both.student(PROMPT, chosen, **options)
        assert sorted(moved, key=order) == sorted(local(both.first, PROMPT, chosen, **options), key=order)
    assert both.sender.num_offers == 0
