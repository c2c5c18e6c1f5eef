"""PartRep is the prompt, and behind it the tokens that surprised the model most."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.methods import PartRep

QUESTION = "the quick brown fox jumps over the lazy dog, and over what?"
OPTIONS: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}


def surprising(llm: LLM, tokens: list[int], start: int, stop: int, count: int) -> list[int]:
    """The tokens of tokens[start:stop] whose probability behind those before them is least, in their order."""
    worth = [np.inf if at == 0 else -llm.score(tokens[:at], tokens[at : at + 1]).sum for at in range(start, stop)]
    chosen = sorted(sorted(range(len(worth)), key=lambda at: -worth[at])[:count])
    return [tokens[start + at] for at in chosen]


def test_the_prompt_that_is_entered(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm()
    between = llm.tokenizer.encode("\n", add_bos=False)
    whole = llm.tokenizer.encode(QUESTION)
    again = surprising(llm, whole, 0, len(whole), round(0.25 * len(whole)))
    made = llm.generate([QUESTION], method=PartRep(ratio=0.25), **OPTIONS)[0]
    assert made.text == llm.generate([[*whole, *between, *again]], **OPTIONS)[0].text
    asked = llm.tokenizer.encode_chat([{"role": "user", "content": QUESTION}])
    assert asked.turn is not None
    start, stop = asked.turn.start, asked.turn.stop
    again = surprising(llm, list(asked), start, stop, round(0.5 * (stop - start)))
    entered = [*asked[:stop], *llm.tokenizer.encode(" Again: ", add_bos=False), *again, *asked[stop:]]
    made = llm.generate([asked], method=PartRep(ratio=0.5, between=" Again: "), **OPTIONS)[0]
    assert made.text == llm.generate([entered], **OPTIONS)[0].text


@pytest.mark.parametrize("between", [3, None, ["a"], float("nan")])
def test_what_is_between_is_a_text(between: Any) -> None:
    with pytest.raises(InvalidRequest, match="partrep: between must be a text"):
        PartRep(between=between)
