"""What a prediction is held against: prefills, decode steps and mixed load that no calibration has seen."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class VerificationCell:
    """One measurement."""

    # "prefill" (TTFT of a prompt alone), "decode" (ITL of `batch` sequences), or "mixed" (TTFT of a prompt beside
    # `batch` sequences that decode, and their ITL meanwhile)
    kind: str
    prompt: int = 0  # tokens of the prompt
    budget: int = 512  # tokens of a step at most
    # batch, context: sequences that decode, and the entries that each of them has
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


PREFILLS = ((128, 512), (384, 512), (900, 512), (1800, 512), (1800, 128), (1800, 2048), (3600, 512), (7900, 512))
DECODES = ((1, 150), (1, 1500), (1, 3000), (1, 7900), (2, 700), (3, 3000), (5, 250), (8, 100), (8, 1500))
MANY = ((16, 350), (16, 1500))
MIXED = ((900, 128, 2, 700), (900, 512, 6, 300), (1800, 256, 4, 1500))
# Prompts of 128 to 8,000 tokens, steps of 128 to 2,048, 1 to 16 sequences, contexts to 8,000.
CELLS: Sequence[VerificationCell] = (
    *(VerificationCell("prefill", *one) for one in PREFILLS),
    *(VerificationCell("decode", batch=batch, context=context) for batch, context in DECODES + MANY),
    *(VerificationCell("mixed", *one) for one in MIXED),
)
QUICK: Sequence[VerificationCell] = [one for one in CELLS if one.longest < 2000 and one.entries < 8000]
