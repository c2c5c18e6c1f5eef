"""Techniques over two processes: one runs their prefills, the other decodes.

What crosses is the value that a technique decodes from, so prompt repetition sends its last copy only. A technique that
goes on after its first decode (`Method.goes_on`) needs the result of its prefill, and that crosses.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.cluster.wire.offer import ValueOffer
from twostroke.cluster.wire.receiver import ReceivedValue, Receiver
from twostroke.engine.strokes import Await, Decode, Prefill, Prefilled, Program, Stroke, driven
from twostroke.errors import InvalidRequest, OutOfPages
from twostroke.kv.attention import NO_QUERIES
from twostroke.kv.cache import KVCache
from twostroke.kv.pages import HOST
from twostroke.methods.method import Method, Prompt

NO_LOGITS = np.empty((0, 0), np.float32)
NEEDS_MORE = "this technique needs more of its first prefill than a value: let one process do both"
CARRIED = ("model", "recompute", "stream")  # fields of a decode that go along with its value


def prefill_program(method: Method, prompt: Prompt, offer: ValueOffer) -> Program:
    """A technique's strokes up to what crosses, which goes out while it is computed. The result is the value.

    Raises InvalidRequest: the technique goes on after its first decode, and does not say so; or it goes on from more
    than a value and queries.
    """
    program = method.program(prompt)
    try:
        asked: Any = next(program)
        while not isinstance(asked, Decode):
            if isinstance(asked, list) and any(isinstance(one, Decode) for one in asked):
                raise _goes_on(method)
            if method.goes_on and not _makes_a_value(asked):
                raise InvalidRequest(NEEDS_MORE)
            if isinstance(asked, Prefill) and asked.after is None:
                asked = replace(asked, progress=partial(_grown, method, prompt, offer))
            result = yield asked
            if method.goes_on:
                kv, queries = (result, NO_QUERIES) if isinstance(result, KVCache) else (result.kv, result.queries)
                offer.complete(kv, queries=queries)
                return kv
            asked = program.send(result)
            del result
        if asked != Decode(asked.kv, **{name: getattr(asked, name) for name in CARRIED}):
            raise _goes_on(method)
        offer.complete(asked.kv, {"decode": {name: getattr(asked, name) for name in CARRIED}})
        return asked.kv
    except (GeneratorExit, OutOfPages):  # preempted or cancelled, or to be preempted; `PrefillRole.ended` tells the end
        offer.pause()
        raise
    except BaseException as error:
        offer.fail(f"its prefill failed: {error}")
        raise
    finally:
        program.close()


def decode_program(method: Method, prompt: Prompt, arrival: "SharedArrival") -> Program:
    """A technique's strokes from its first decode on, after the value that `arriving` brings.

    What keeps the value from coming is raised in the program (see `Receiver.receive`).
    """
    received: ReceivedValue = yield Await(arrival.start)
    if not method.goes_on:
        kv, fields = received.kv, received.state["decode"]
        del received
        yield Decode(kv, **fields)
        return None
    results = [received]
    del received  # it would keep the pages that the technique lets go of

    def answer(asked: Any) -> Program:  # the first stroke is a prefill, which was computed elsewhere
        return _result(asked, results.pop()) if results else (yield asked)

    return (yield from driven(method.program(prompt), answer))


def or_recompute(program: Program, method: Method, prompt: Prompt) -> Program:
    """A program that receives, or all of the technique here if the value does not come."""
    try:
        return (yield from program)
    except WireError:
        pass
    return (yield from method.program(prompt))


def student_program(program: Program, prefill: Callable[[Prefill], Future[ReceivedValue]]) -> Program:
    """A technique's strokes in an engine that has the student only, as its own model.

    Entries of the technique's own model, the teacher, are what `prefill` brings from elsewhere (`remote_prefill`).
    """

    def here(stroke: Stroke) -> Stroke:
        if isinstance(stroke, Prefill) and stroke.model is None:
            return Await(partial(prefill, stroke))
        if isinstance(stroke, Prefill | Decode) and stroke.model == "student":
            return replace(stroke, model=None)
        return stroke

    def answer(asked: Any) -> Program:
        if isinstance(asked, list):
            results = yield [here(one) for one in asked]
            return [_joined(*two) for two in zip(asked, results, strict=True)]
        return _joined(asked, (yield here(asked)))

    return driven(program, answer)


def _joined(stroke: Any, result: Any) -> Any:
    """A stroke's result: of a prefill that was computed elsewhere, the value that it goes on from and what came."""
    if isinstance(stroke, Prefill) and isinstance(result, ReceivedValue) and stroke.after is not None:
        return stroke.after + result.kv
    return result


def remote_prefill(receiver: Receiver, handle: ValueHandle) -> Callable[[Prefill], Future[ReceivedValue]]:
    """Prefills after a value that its sender holds too: the sender computes them, and the new entries come here.

    Raises InvalidRequest for a prefill whose result is more than a value.
    """

    def prefill(stroke: Prefill) -> Future[ReceivedValue]:
        if stroke.after is None or stroke.queries is not None or not _makes_a_value(stroke):
            raise InvalidRequest(NEEDS_MORE)
        return receiver.extend(handle, stroke.after, stroke.tokens, stroke.logits)

    return prefill


class SharedArrival:
    """One value for all choices of a request. It is received once, and kept in the host until each has it."""

    def __init__(self, receive: Callable[[], Future[ReceivedValue]], choices: int = 1) -> None:
        """`receive`: begins to receive it; called again if a choice was preempted after it had the value."""
        self._receive, self._choices = receive, choices
        self._lock = threading.Lock()
        self._incoming: Future[ReceivedValue] | None = None
        self._served = 0
        self._waiting: list[_Waiter] = []

    def start(self) -> Future[ReceivedValue]:
        waiter = _Waiter(self)
        with self._lock:
            if self._incoming is None:
                self._incoming, self._served = self._receive(), 0
            incoming = self._incoming
            self._waiting.append(waiter)
        incoming.add_done_callback(self._deliver)
        return waiter

    def left(self, waiter: "_Waiter") -> None:
        """A choice waits no longer."""
        with self._lock:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            incoming = self._incoming
            if self._waiting or incoming is None:
                return
            self._incoming = None
        incoming.cancel()

    def _deliver(self, incoming: Future[ReceivedValue]) -> None:
        failed = incoming.cancelled() or incoming.exception() is not None
        with self._lock:
            waiting, self._waiting = self._waiting, []
            self._served += len(waiting)
            if self._incoming is incoming:
                more = not failed and self._served < self._choices
                self._incoming = _aside(incoming.result()) if more else None
        for waiter in waiting:
            if incoming.cancelled():
                waiter.set_exception(WireError("nobody wanted the value any more"))
            elif (error := incoming.exception()) is not None:
                waiter.set_exception(error)
            else:
                waiter.set_result(incoming.result())


def _aside(received: ReceivedValue) -> Future[ReceivedValue] | None:
    """The value for choices that have not started, in the host: they must not keep others from finding pages."""
    future = Future[ReceivedValue]()
    try:
        future.set_result(replace(received, kv=received.kv.to(HOST)))
    except OutOfPages:  # there is no memory
        return None
    return future


class _Waiter(Future[ReceivedValue]):
    def __init__(self, arrival: SharedArrival) -> None:
        super().__init__()
        self._arrival = arrival

    def cancel(self) -> bool:
        self._arrival.left(self)
        return super().cancel()


def _makes_a_value(asked: Any) -> bool:
    """Whether it is one prefill that gives no logits, scores or hidden states, which do not cross."""
    if not isinstance(asked, Prefill) or asked.logits == "all":
        return False
    return asked.logprobs is None and asked.states is None and asked.hidden is None


def _goes_on(method: Method) -> InvalidRequest:
    return InvalidRequest(f"method {method.name} goes on after its first decode: its class needs `goes_on = True`")


def _grown(method: Method, prompt: Prompt, offer: ValueOffer, kv: KVCache) -> None:
    """Send what is computed so far of a value, if it is certain that the decode will need it."""
    kept = kv if method.goes_on else method.kept_so_far(prompt, kv)
    if kept is not None:
        offer.extend(kept)


def _result(asked: Any, received: ReceivedValue) -> KVCache | Prefilled:
    """What a prefill would have given here."""
    assert isinstance(asked, Prefill)
    return received.kv if asked.queries is None else Prefilled(received.kv, NO_LOGITS, received.queries)
