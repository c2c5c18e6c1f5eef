"""What each role makes of a request: both strokes, the first alone, or the second alone."""

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

from twostroke.api.llm import LLM
from twostroke.backends.page_memory import HostMemory
from twostroke.cluster.dynamo_request import DynamoRequest
from twostroke.cluster.kv_sources import PEER, Computing, estimate_local, estimate_peer
from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.offer import ValueOffer
from twostroke.cluster.wire.receiver import IncomingValue, ReceivedValue, Receiver
from twostroke.cluster.wire.runtime import SYSTEM, Runtime
from twostroke.cluster.wire.sender import LOOPBACK, Sender
from twostroke.cluster.wire.split_programs import (
    SharedArrival,
    decode_program,
    or_recompute,
    prefill_program,
    remote_prefill,
    student_program,
)
from twostroke.cluster.wire.transport import Transport
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.tiers.speed import TransferSpeed
from twostroke.methods import Plain, Prompt
from twostroke.sampling.params import SamplingParams

log = logging.getLogger(__name__)
HANDLE = "twostroke"  # the key of a handle in Dynamo's `disaggregated_params`
READY = "ready_s"  # the key of the prefill worker's prediction
WIRE_LATENCY_S, WIRE_BYTES_PER_S = 5e-3, 500e6  # of the wire, until values have come


class Role(Protocol):
    """A role that answers: `Both`, or `Decoding`."""

    def request(self, parsed: DynamoRequest, handed: Mapping[str, Any] | None) -> Request:
        """For the engine, from its first token on. `handed`: what the prefill worker has handed over, or None.

        Raises InvalidRequest.
        """
        ...

    def ended(self, handed: Mapping[str, Any] | None) -> None:
        """The request is over. Does not wait."""
        ...

    def close(self) -> None: ...


class AggregatedRole:
    """Both strokes here."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def request(self, parsed: DynamoRequest, handed: Mapping[str, Any] | None) -> Request:
        return parsed.request(self._llm)

    def ended(self, handed: Mapping[str, Any] | None) -> None:
        pass

    def close(self) -> None:
        pass


class PrefillRole:
    """The first stroke: a technique's prefills up to its first decode. The value goes out while it is computed."""

    def __init__(
        self, llm: LLM, host: str = LOOPBACK, transport: Transport | None = None, runtime: Runtime = SYSTEM
    ) -> None:
        self._llm, self._computing = llm, llm.engine.prefill_seconds(llm.model)
        self.sender = Sender(
            llm.pool, llm.model.id, host=host, transport=transport, compute=self._compute, runtime=runtime
        )

    def request(self, parsed: DynamoRequest) -> tuple[Request, ValueOffer]:
        """For the engine, and what it fills. Raises InvalidRequest."""
        llm, prompt = self._llm, Prompt(parsed.prompt, self._llm.tokenizer)
        llm.model.require_room(len(prompt))
        parsed.params.check_vocabulary(llm.config.vocab_size)
        offer = self.sender.offer()
        request = Request(
            lambda: prefill_program(parsed.method, prompt, offer), SamplingParams(), llm.tokenizer, len(prompt)
        )
        request.priority = parsed.priority
        return request, offer

    def handed(self, parsed: DynamoRequest, offer: ValueOffer) -> dict[str, Any]:
        """What goes to the decode worker: the value's handle, and the seconds until it is predicted to be whole."""
        way = estimate_local(self._llm.model, parsed.prompt, self._computing, stores=False)
        return {HANDLE: offer.handle.to_json(), READY: way.seconds}

    @staticmethod
    def ended(request: Request, offer: ValueOffer) -> None:
        """Nobody waits for the request any more, or it is done: an offer that it will not fill is told so."""
        if not request.done:
            offer.fail("its request was cancelled")
        elif request.error is not None:
            offer.fail(f"its prefill failed: {request.error}")

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


class DecodeRole:
    """The second stroke, after a value that a prefill worker has computed.

    Where the value does not come, or comes from a model with another identity, the prompt is prefilled here, unless the
    model is a student: then the request fails with WireError, and Dynamo sends it to a prefill worker again. An answer
    that another worker has begun takes the value from there, or makes it here, whichever is predicted to be sooner
    (`kv_sources.py`).

    Attributes:
        wire: how quickly values come.
        taken_over: number of answers that other workers had begun, by where most of the prompt's KV comes from.
    """

    def __init__(
        self,
        llm: LLM,
        student: bool = False,
        transport: Transport | None = None,
        computing: Computing | None = None,
        runtime: Runtime = SYSTEM,
    ) -> None:
        """`student`: the model is the student of the prefill workers' model, their teacher's.

        `computing`: predicts prefills; None: by what the model's steps take here, which is measured now.
        """
        self._llm, self._student = llm, student
        self._computing = None if student else computing or llm.engine.prefill_seconds(llm.model)
        if isinstance(memory := llm.pool.memory, HostMemory):
            memory.populate()  # else the first values that come delay the streams that decode
        self.wire, self.taken_over = TransferSpeed(WIRE_LATENCY_S, WIRE_BYTES_PER_S), Counter[str]()
        self.receiver = Receiver(
            llm.pool, llm.model.id, transport=transport, same_identity=not student, runtime=runtime
        )
        self._releasing = runtime.workers("release", 4)

    def request(self, parsed: DynamoRequest, handed: Mapping[str, Any] | None) -> Request:
        if self._student and "student" not in parsed.method.companions:
            raise InvalidRequest(f"the decode workers have a student alone, and method {parsed.method.name} has none")
        if handed is None:
            if self._student:
                raise InvalidRequest("there is no prefill worker, and a student cannot do without its teacher")
            return parsed.request(self._llm)
        llm, method, prompt = self._llm, parsed.method, Prompt(parsed.prompt, self._llm.tokenizer)
        llm.model.require_room(len(prompt))
        parsed.params.check_vocabulary(llm.config.vocab_size)
        if not self._student:
            llm.require_method(method)
        try:
            handle = ValueHandle.from_json(handed.get(HANDLE))
        except WireError as error:
            log.warning("a value did not come: %s", error)
            if self._student:
                raise
            return parsed.request(llm)
        if parsed.given and not self._from_peer(parsed, handed):
            self._releasing.submit(lambda: self.receiver.release(handle))
            return parsed.request(llm)
        arrival = SharedArrival(lambda: self._receive(handle), parsed.params.n)

        def program() -> Program:  # without a result, which would keep pages for as long as the request is known
            received = decode_program(method, prompt, arrival)
            if self._student:
                yield from student_program(received, remote_prefill(self.receiver, handle))
            else:
                yield from or_recompute(received, method, prompt)

        request = Request(program, parsed.params, llm.tokenizer, len(prompt))
        request.priority = parsed.priority
        return request

    def ended(self, handed: Mapping[str, Any] | None) -> None:
        if self._student and handed is not None:
            handle = ValueHandle.from_json(handed.get(HANDLE))
            self._releasing.submit(lambda: self.receiver.release(handle))

    def close(self) -> None:
        self._releasing.close(5.0)
        self.receiver.close()

    def _from_peer(self, parsed: DynamoRequest, handed: Mapping[str, Any]) -> bool:
        """Whether an answer that another worker has begun takes its prompt's value from the prefill worker.

        A technique's strokes are not predicted: its value is taken.
        """
        ready_s = handed.get(READY)
        if self._computing is None or ready_s is None or parsed.method != Plain():
            self.taken_over[PEER] += 1
            return True
        peer = estimate_peer(self._llm.model, parsed.prompt, ready_s, self.wire)
        here = estimate_local(self._llm.model, parsed.prompt, self._computing)
        chosen = peer if peer.seconds < here.seconds else here
        self.taken_over[chosen.source] += 1
        log.info("taken over with KV from %s: from the peer %s, here %s", chosen.source, peer, here)
        return chosen is peer

    def _receive(self, handle: ValueHandle) -> IncomingValue:
        incoming = self.receiver.receive(handle, release=not self._student)
        incoming.add_done_callback(self._tell)
        return incoming

    def _tell(self, incoming: "IncomingValue | Any") -> None:
        """A line for the log, and a measurement of the wire."""
        if incoming.cancelled():
            return
        if (error := incoming.exception()) is not None:
            log.warning("a value did not come: %s", error)
            return
        came: ReceivedValue = incoming.result()
        self.wire.read(came.bytes_received, came.moving_s + self.wire.latency_s)
        log.info("a value of %d entries came: %d bytes in %.3f s", len(came.kv), came.bytes_received, came.seconds)
