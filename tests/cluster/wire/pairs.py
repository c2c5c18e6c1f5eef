"""A model that prefills and one that decodes, with a wire between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.patience import PATIENCE_S
from twostroke.api.llm import LLM
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.offer import ValueOffer
from twostroke.cluster.wire.receiver import Receiver
from twostroke.cluster.wire.sender import Sender
from twostroke.cluster.wire.split_programs import (
    SharedArrival,
    decode_program,
    or_recompute,
    prefill_program,
    remote_prefill,
    student_program,
)
from twostroke.cluster.wire.transport import Transport
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.kv.cache import KVCache
from twostroke.methods import Method, Plain
from twostroke.methods.method import Prompt
from twostroke.sampling.params import SamplingParams

SECRET = "a secret of the tests"
SOON_S = PATIENCE_S


Opened = Callable[[LLM], Transport | None]


class Pair:
    """Two models in one process; values go from the first to the second."""

    def __init__(
        self, first: LLM, second: LLM, transport: Callable[[LLM], Transport | None] = lambda llm: None
    ) -> None:
        self.first, self.second = first, second
        self.sender = Sender(
            first.pool, first.model.id, secret=SECRET, transport=transport(first), compute=self._compute
        )
        self.receiver = Receiver(second.pool, second.model.id, secret=SECRET, transport=transport(second))

    def prefilled(self, prompt: list[int], method: Method | None = None, **terms: Any) -> ValueOffer:
        """An offer of what crosses; the first model has computed it."""
        offer = self.sender.offer(**terms)
        program = prefill_program(method or Plain(), self._prompt(prompt), offer)
        self.first.engine.run([Request(lambda: program, SamplingParams(), self.first.tokenizer)])
        return offer

    def request(
        self,
        offer: ValueOffer | ValueHandle,
        prompt: list[int],
        method: Method | None = None,
        here: bool = False,
        **fields: Any,
    ) -> Request:
        """The second model's request, which goes on from there; with `here`, it computes what does not come."""
        params, handle = SamplingParams(**fields), offer if isinstance(offer, ValueHandle) else offer.handle
        arrival = SharedArrival(lambda: self.receiver.receive(handle), params.n)
        chosen, asked = method or Plain(), self._prompt(prompt)

        def program() -> Program:
            rest = decode_program(chosen, asked, arrival)
            return or_recompute(rest, chosen, asked) if here else rest

        return Request(program, params, self.second.tokenizer, len(prompt))

    def moved(self, prompt: list[int], method: Method | None = None, **fields: Any) -> list[Token]:
        """The answer to a prompt that one model prefills and the other continues."""
        request = self.request(self.prefilled(prompt, method), prompt, method, **fields)
        self.second.engine.run([request])
        return list(request.events)

    def student(self, prompt: list[int], method: Method, **fields: Any) -> list[Token]:
        """The answer if the first model is the teacher, and the second, the student, has no teacher."""
        handle, params = self.prefilled(prompt, method).handle, SamplingParams(**fields)
        arrival = SharedArrival(lambda: self.receiver.receive(handle, release=False), params.n)
        teacher, asked = remote_prefill(self.receiver, handle), self._prompt(prompt)
        request = Request(
            lambda: student_program(decode_program(method, asked, arrival), teacher),
            params,
            self.second.tokenizer,
            len(prompt),
        )
        self.second.engine.run([request])
        assert self.receiver.release(handle)
        return list(request.events)

    def _compute(self, kv: KVCache, tokens: list[int], logits: Any) -> KVCache:
        def program() -> Program:
            return (yield Prefill(tokens, kv, logits=logits))

        request = Request(program, SamplingParams(), self.first.tokenizer)
        self.first.engine.run([request])
        return request.result

    def close(self) -> None:
        self.receiver.close()
        self.sender.close()

    def _prompt(self, prompt: list[int]) -> Prompt:
        return Prompt(prompt, self.first.tokenizer)


def local(llm: LLM, prompt: list[int], method: Method | None = None, **fields: Any) -> list[Token]:
    request = llm.request(prompt, SamplingParams(**fields), method)
    llm.engine.run([request])
    return list(request.events)
