"""Prompt repetition, with the first copy sliced off before decoding.

Leviathan et al. 2025, "Prompt Repetition Improves Non-Reasoning LLMs" (arXiv:2512.14982): the prompt twice, so that
its tokens see all of it. FARS 2026, "Prefill Twice, Decode Once" (PTDO): decode from the last copy's KV alone, at
the positions it has. The sinks are this project's extension, after StreamingLLM (Xiao et al. 2023).
"""

from dataclasses import dataclass

from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.methods.method import Method, require_choice, require_int


@dataclass(frozen=True)
class Repeat(Method, name="repeat"):
    """Prefill the prompt `times` times, decode from the last copy.

    The first token comes from the whole cache (its logits are the prefill's), every later one from what is kept.

    Attributes:
        times: how many copies are prefilled; 1 is the plain request.
        sinks: how many of the very first entries are kept besides the last copy.
        keep: "last" copy, or "all" (full repetition, the baseline of both papers).
    """

    times: int = 2
    sinks: int = 0
    keep: str = "last"

    def __post_init__(self) -> None:
        require_int(self, "times", 1, 64)  # or a request over HTTP could ask for a list as long as memory
        require_int(self, "sinks", 0)
        require_choice(self, "keep", ("last", "all"))

    def program(self, prompt: list[int]) -> Program:
        kv = yield Prefill(prompt * self.times)
        if self.keep == "last":
            start = len(kv) - len(prompt)
            kv = kv[: min(self.sinks, start)] + kv[start:]
        yield Decode(kv)
