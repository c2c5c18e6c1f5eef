"""An answer that runs until the test has done with it."""

import time

from twostroke.api.llm import LLM

LONG = {"max_tokens": 1900, "ignore_eos": True}  # of a server of these tests it takes longer than `eventually` waits
PAUSE_S, LATER_S = 0.04, 0.4  # before each of the first steps, whose tokens tests look at, and of the others
FIRST = 500


def num_long(llm: LLM) -> int:
    """Number of answers of `LONG` that run. A page also asks for attention, in a step that runs beside them."""
    return sum(choice.request.params.max_tokens == LONG["max_tokens"] for choice in llm.engine.choices)


def unhurried(llm: LLM) -> LLM:
    """The model, whose engine pauses before each step while an answer of `LONG` runs: no machine is so quick, and no
    test so slow, that it is over first."""
    engine, step, steps = llm.engine, llm.engine.step, 0

    def paused() -> bool:
        nonlocal steps
        long = num_long(llm)
        if long:
            time.sleep(PAUSE_S if steps < FIRST else LATER_S)
        steps = steps + 1 if long else 0
        return step()

    engine.step = paused
    return llm
