"""What a prediction is held against: prefills, decode steps and mixed load that no calibration has seen."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class VerificationCell:
    """One measurement.

    Attributes:
        kind: "prefill" (TTFT of a prompt alone), "decode" (ITL of `batch` sequences), or "mixed" (TTFT of a prompt
            beside `batch` sequences that decode, and their ITL meanwhile).
        prompt: tokens of the prompt.
        budget: tokens of a step at most.
        batch, context: sequences that decode, and the entries that each of them has.
    """

    kind: str
    prompt: int = 0
    budget: int = 512
    batch: int = 0
    context: int = 0

    @property
    def name(self) -> str:
        beside = f"{self.batch} x {self.context:,} entries"
        if self.kind == "decode":
            return beside
        alone = f"{self.prompt:,} tokens in steps of {self.budget:,}"
        return alone if self.kind == "prefill" else f"{alone} beside {beside}"

    @property
    def entries(self) -> int:
        """KV entries that it needs at once, about."""
        return self.prompt + self.batch * (self.context + 64)

    @property
    def longest(self) -> int:
        """Tokens of its longest sequence."""
        return max(self.prompt, self.context) + 64

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def _prefill(prompt: int, budget: int = 512) -> VerificationCell:
    return VerificationCell("prefill", prompt, budget)


def _decode(batch: int, context: int) -> VerificationCell:
    return VerificationCell("decode", batch=batch, context=context)


def _mixed(prompt: int, budget: int, batch: int, context: int) -> VerificationCell:
    return VerificationCell("mixed", prompt, budget, batch, context)


# Prompts of 128 to 8,000 tokens, steps of 128 to 2,048, 1 to 16 sequences, contexts to 8,000.
CELLS: Sequence[VerificationCell] = (
    _prefill(128),
    _prefill(384),
    _prefill(900),
    _prefill(1800),
    _prefill(1800, 128),
    _prefill(1800, 2048),
    _prefill(3600),
    _prefill(7900),
    _decode(1, 150),
    _decode(1, 1500),
    _decode(1, 3000),
    _decode(1, 7900),
    _decode(2, 700),
    _decode(3, 3000),
    _decode(5, 250),
    _decode(8, 100),
    _decode(8, 1500),
    _decode(16, 350),
    _decode(16, 1500),
    _mixed(900, 128, 2, 700),
    _mixed(900, 512, 6, 300),
    _mixed(1800, 256, 4, 1500),
)
QUICK: Sequence[VerificationCell] = (
    _prefill(128),
    _prefill(384),
    _prefill(900),
    _prefill(900, 128),
    _prefill(1800),
    _decode(1, 150),
    _decode(1, 1500),
    _decode(2, 700),
    _decode(5, 250),
    _decode(8, 700),
    _decode(16, 350),
    _mixed(900, 128, 2, 700),
    _mixed(900, 512, 6, 300),
)
