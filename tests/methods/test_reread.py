"""Re-reading is the prompt, the paper's phrase, and the prompt again."""

from collections.abc import Callable
from typing import Any

from twostroke.api.llm import LLM
from twostroke.methods import Reread


def test_the_prompt_that_is_entered(tiny_llm: Callable[..., LLM]) -> None:
    llm = tiny_llm()
    question = "the quick brown fox?"
    options: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    whole = [
        *llm.tokenizer.encode(question),
        *llm.tokenizer.encode("\nRead the question again: ", add_bos=False),
        *llm.tokenizer.encode(question),
    ]
    assert llm.generate([question], method=Reread(), **options)[0].text == llm.generate([whole], **options)[0].text
    asked = llm.tokenizer.encode_chat([{"role": "user", "content": question}])
    assert asked.turn is not None
    again = [*asked[: asked.turn.start], *whole, *asked[asked.turn.stop :]]
    made = llm.generate([asked], method=Reread(scope="turn"), **options)[0]
    assert made.text == llm.generate([again], **options)[0].text
