"""The plain request, the shortest program."""

from dataclasses import dataclass

from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.methods.method import Method, Prompt


@dataclass(frozen=True)
class Plain(Method, name="plain"):
    """Prefill the prompt, decode the answer."""

    def kept_so_far(self, prompt: Prompt, kv: KVCache) -> KVCache:
        return kv

    def program(self, prompt: Prompt) -> Program:
        kv = yield Prefill(prompt)
        yield Decode(kv)
