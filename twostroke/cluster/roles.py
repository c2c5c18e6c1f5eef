"""What each role makes of a request: both strokes, the first alone, or the second alone."""

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from twostroke.cluster.asked import Asked
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.llm import LLM
from twostroke.methods import Prompt
from twostroke.sampling.params import SamplingParams
from twostroke.wire.handle import Handle
from twostroke.wire.outgoing import Outgoing
from twostroke.wire.programs import Arriving, across, or_here, prefilled_by, receiving, sending
from twostroke.wire.receiver import Incoming, Received, Receiver
from twostroke.wire.sender import LOOPBACK, Sender
from twostroke.wire.surroundings import HERE, Surroundings
from twostroke.wire.transport import Transport

log = logging.getLogger(__name__)
HANDLE = "twostroke"  # the key of a handle in Dynamo's `disaggregated_params`


class Role(Protocol):
    """A role that answers: `Both`, or `Decoding`."""

    def request(self, asked: Asked, handed: Mapping[str, Any] | None) -> Request:
        """For the engine. `handed`: what the prefill worker has handed over, or None. Raises InvalidRequest."""
        ...

    def ended(self, handed: Mapping[str, Any] | None) -> None:
        """The request is over. Does not wait."""
        ...

    def close(self) -> None: ...


class Both:
    """Both strokes here."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def request(self, asked: Asked, handed: Mapping[str, Any] | None) -> Request:
        return asked.request(self._llm)

    def ended(self, handed: Mapping[str, Any] | None) -> None:
        pass

    def close(self) -> None:
        pass


class Prefilling:
    """The first stroke: a technique's prefills up to its first decode. The value goes out while it is computed."""

    def __init__(
        self, llm: LLM, host: str = LOOPBACK, transport: Transport | None = None, around: Surroundings = HERE
    ) -> None:
        self._llm = llm
        self.sender = Sender(
            llm.pool, llm.model.id, host=host, transport=transport, compute=self._compute, around=around
        )

    def request(self, asked: Asked) -> tuple[Request, Outgoing]:
        """For the engine, and what it fills. Raises InvalidRequest."""
        llm, prompt = self._llm, Prompt(asked.prompt, self._llm.tokenizer)
        llm.model.require_room(len(prompt))
        asked.params.check_vocabulary(llm.config.vocab_size)
        outgoing = self.sender.offer()
        request = Request(lambda: sending(asked.method, prompt, outgoing), SamplingParams(), llm.tokenizer, len(prompt))
        request.priority = asked.priority
        return request, outgoing

    @property
    def idle(self) -> bool:
        """Whether nothing is held for anybody."""
        return self.sender.num_offers == 0

    def close(self) -> None:
        self.sender.close()

    def _compute(self, kv: KVCache, tokens: list[int], logits: Any) -> KVCache:
        """The teacher's entries of an answer. Called by the sender's threads."""

        def program() -> Program:
            return (yield Prefill(tokens, kv, logits=logits))

        request = Request(program, SamplingParams(), self._llm.tokenizer)
        self._llm.engine.run([request])
        request.raise_error()
        return request.result


class Decoding:
    """The second stroke, after a value that a prefill worker has computed.

    Where the value does not come, the prompt is prefilled here, unless the model is a student: then the request fails
    with WireError, and Dynamo sends it to a prefill worker again.
    """

    def __init__(
        self, llm: LLM, student: bool = False, transport: Transport | None = None, around: Surroundings = HERE
    ) -> None:
        """`student`: the model is the student of the prefill workers' model, their teacher's."""
        self._llm, self._student = llm, student
        self.receiver = Receiver(llm.pool, llm.model.id, transport=transport, around=around)
        self._releasing = ThreadPoolExecutor(4, thread_name_prefix="release")

    def request(self, asked: Asked, handed: Mapping[str, Any] | None) -> Request:
        if self._student and "student" not in asked.method.companions:
            raise InvalidRequest(f"the decode workers have a student alone, and method {asked.method.name} has none")
        if handed is None:
            if self._student:
                raise InvalidRequest("there is no prefill worker, and a student cannot do without its teacher")
            return asked.request(self._llm)
        llm, method, prompt = self._llm, asked.method, Prompt(asked.prompt, self._llm.tokenizer)
        llm.model.require_room(len(prompt))
        asked.params.check_vocabulary(llm.config.vocab_size)
        if not self._student:
            llm.require_companions(method)
        handle = Handle.from_json(handed.get(HANDLE))
        arriving = Arriving(lambda: self._receive(handle), asked.params.n)

        def program() -> Program:  # without a result, which would keep pages for as long as the request is known
            received = receiving(method, prompt, arriving)
            if self._student:
                yield from across(received, prefilled_by(self.receiver, handle))
            else:
                yield from or_here(received, method, prompt)

        request = Request(program, asked.params, llm.tokenizer, len(prompt))
        request.priority = asked.priority
        if asked.given:
            request.take_over(asked.given)
        return request

    def ended(self, handed: Mapping[str, Any] | None) -> None:
        if self._student and handed is not None:
            self._releasing.submit(self.receiver.release, Handle.from_json(handed.get(HANDLE)))

    def close(self) -> None:
        self._releasing.shutdown()
        self.receiver.close()

    def _receive(self, handle: Handle) -> Incoming:
        incoming = self.receiver.receive(handle, release=not self._student)
        incoming.add_done_callback(_tell)
        return incoming


def _tell(incoming: "Incoming | Any") -> None:
    """A line for the log."""
    if incoming.cancelled():
        return
    if (error := incoming.exception()) is not None:
        log.warning("a value did not come: %s", error)
        return
    came: Received = incoming.result()
    log.info("a value of %d entries came: %d bytes in %.3f s", len(came.kv), came.bytes_received, came.seconds)
