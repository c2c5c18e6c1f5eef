"""Best-of-n: decode several candidates from one prefill, keep the likeliest (Stiennon et al. 2020, section 3)."""

from dataclasses import dataclass

from twostroke.engine.strokes import Decode, Emit, Prefill, Program
from twostroke.fields import integer
from twostroke.methods.method import Method, Prompt


@dataclass(frozen=True)
class BestOf(Method, name="best-of"):
    """Decode `candidates` answers side by side; the one of highest mean log-probability is emitted.

    The candidates share the prompt's pages and differ by their random streams, so at a temperature of 0 they
    are all equal.
    """

    goes_on = True

    candidates: int = integer(4, least=1, most=64)  # how many to decode

    def program(self, prompt: Prompt) -> Program:
        kv = yield Prefill(prompt)
        runs = yield [Decode(kv, emit=False, stream=i, stats=True) for i in range(self.candidates)]
        best = max(runs, key=lambda run: run.mean_logprob)
        yield Emit(best.sampled, best.finish_reason)
