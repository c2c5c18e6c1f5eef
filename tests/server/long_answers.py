"""An answer that runs until the test has done with it."""

import time

from twostroke.api.llm import LLM

LONG = {"max_tokens": 1900, "ignore_eos": True}  # of a server of these tests it takes longer than `eventually` waits
PAUSE_S = 0.04


def unhurried(llm: LLM) -> LLM:
    """The model, whose engine pauses before each step while an answer of `LONG` runs: no machine is so quick, and no
    test so slow, that it is over first."""
    engine, step = llm.engine, llm.engine.step

    def paused() -> bool:
        if any(choice.request.params.max_tokens == LONG["max_tokens"] for choice in engine.choices):
            time.sleep(PAUSE_S)
        return step()

    engine.step = paused
    return llm
