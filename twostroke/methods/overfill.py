"""OverFill: a teacher prefills, a student of the same KV geometry decodes (Kim et al. 2025, arXiv:2508.08446)."""

from dataclasses import dataclass

from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.fields import flag
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt


@dataclass(frozen=True)
class OverFill(Method, name="overfill"):
    """Hand the teacher's KV of the prompt to the student. The teacher is the engine's own model.

    The last prompt token is entered once: the published sketch (Emara et al. 2025, "KV-Cache Refresh Methods for Long
    Generation") feeds it to the student again, behind the teacher's own entry of it.
    """

    # the student computes the last prompt entry itself and so gives the first token too; otherwise the teacher, whose
    # logits are at hand, gives it
    recompute: bool = flag(False)

    @property
    def companions(self) -> tuple[str, ...]:
        return ("student",)

    def kept_so_far(self, prompt: Prompt, kv: KVCache) -> KVCache:
        return kv

    def program(self, prompt: Prompt) -> Program:
        kv = yield Prefill(prompt)
        yield Decode(kv, model="student", recompute=self.recompute)
