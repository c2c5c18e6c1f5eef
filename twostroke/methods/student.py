"""The student by itself, as a baseline for techniques that give it the teacher's KV (`overfill`, `refresh`)."""

from dataclasses import dataclass

from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt


@dataclass(frozen=True)
class Student(Method, name="student"):
    """The student prefills the prompt and decodes the answer; the engine's own model computes nothing."""

    @property
    def companions(self) -> tuple[str, ...]:
        return ("student",)

    def kept_so_far(self, prompt: Prompt, kv: KVCache) -> KVCache:
        return kv

    def program(self, prompt: Prompt) -> Program:
        kv = yield Prefill(prompt, model="student")
        yield Decode(kv, model="student")
