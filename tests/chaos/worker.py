"""A worker process: an engine and its thread, the role of a cluster's worker, and what the front end asks of it."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tests.chaos.audit import audit
from tests.chaos.network import Machine
from tests.chaos.standin import ROLES, STUDENT_ALONE, Opened, Sizes
from tests.chaos.tasks import Process, Task, Workers
from twostroke.cluster.dynamo_request import DynamoRequest
from twostroke.cluster.interleaving import ChoiceInterleaver
from twostroke.cluster.roles import DecodeRole, PrefillRole
from twostroke.cluster.wire.arriving_pages import PageReservation
from twostroke.cluster.wire.channel import Channel, Message
from twostroke.cluster.wire.offer import ValueOffer
from twostroke.cluster.wire.sender import Sender
from twostroke.engine.request import Request
from twostroke.errors import EngineStopped, TwostrokeError

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet
    from tests.chaos.front import Stream

STEP_S, PROMPT_S, TOKEN_S = 2e-3, 2e-4, 5e-4  # of a step, and of each token of a prompt and each decode row in it
PYTHON_S = 1e-4  # of a step in which nothing is computed
IDLE_S = 1.0
STALLED_S = 0.05
EVERY = 4  # steps after which pages are counted
MOST_PREEMPTIONS = 500  # of a request at one worker; more would be churn
STOPPED = "the engine was stopped"


class Asking:
    """A request at a decode worker. Attributes: turns: whose turn it is to send a token. handed: of the prefill."""

    def __init__(self, interleaver: ChoiceInterleaver, handed: dict[str, Any] | None) -> None:
        self.interleaver, self.handed = interleaver, handed


class Worker:
    """Attributes: steps: of its engine. sending: the leases of the values that tasks send. sent: of those that went."""

    def __init__(self, fleet: Fleet, number: int, role: str, sizes: Sizes, student: bool) -> None:
        """`student`: decode workers have the student alone."""
        self.fleet, self.number, self.role = fleet, number, role
        self.process = Process(f"{role} {number}")
        self.tasks = fleet.tasks
        readers = Workers(self.tasks, self.process, 4)
        alone = student and role == "decode"
        self.llm = Opened(sizes, lambda: fleet.events.now, self._pause, readers, STUDENT_ALONE if alone else ROLES)
        self.process.locks.append(self.llm.pool.lock)
        self.transport = fleet.transport(self)
        self.sending: dict[Task, str] = {}
        self.sent: set[str] = set()
        runtime = Machine(fleet.network, self.process)
        llm = self.llm.as_llm
        self.prefilling = PrefillRole(llm, transport=self.transport, runtime=runtime) if role == "prefill" else None
        self.decoding = DecodeRole(llm, alone, transport=self.transport, runtime=runtime) if role == "decode" else None
        if self.prefilling is not None:
            self.prefilling.sender._send = self._watched(self.prefilling.sender)
        self.steps = self._not_audited = 0
        self.closing = self._stopped = False
        self.streams: dict[Request, Stream] = {}
        self.offer: dict[Stream, tuple[Request, ValueOffer]] = {}
        self._asking: dict[Stream, Asking] = {}
        self._elsewhere: dict[Task, Sequence[Request]] = {}  # requests of this worker's other threads, which wait
        self._commands: deque[Callable[[], object]] = deque()
        self._waits = False
        self.llm.engine.on_arrival = lambda: self.send(_look)
        self.llm.engine.run = self._run_elsewhere
        self._thread: Task = self.tasks.start(self.process, self._run)

    # What the front end asks ------------------------------------------------------------------------------------------

    def ask(self, parsed: DynamoRequest, handed: dict[str, Any] | None, stream: Stream) -> None:
        """A request has come. It is read in a thread of its own, as in a worker."""
        if self.process.dead:
            return
        if self.closing:
            stream.tell("lost", "it takes no more requests")
        elif self.prefilling is not None:
            self.tasks.start(self.process, lambda: self._prefill(parsed, stream))
        else:
            self.tasks.start(self.process, lambda: self._decode(parsed, handed, stream))

    def _prefill(self, parsed: DynamoRequest, stream: Stream) -> None:
        assert self.prefilling is not None
        try:
            request, offer = self.prefilling.request(parsed)
        except TwostrokeError as error:
            stream.tell("lost", str(error))
            return
        self.offer[stream] = request, offer
        stream.client.lease = offer.handle.lease
        self.fleet.leases[offer.handle.lease] = stream.client
        stream.tell("handle", self.prefilling.handed(parsed, offer))
        self.send(lambda: self._begin(request, stream))

    def _decode(self, parsed: DynamoRequest, handed: dict[str, Any] | None, stream: Stream) -> None:
        assert self.decoding is not None
        request = self.decoding.request(parsed, handed)
        self._asking[stream] = Asking(parsed.continued(request), handed)
        self.send(lambda: self._begin(request, stream))

    def cancel(self, stream: Stream) -> None:
        """The front end has dropped it."""
        if not self.process.dead:
            self.tasks.start(self.process, lambda: self._cancel(stream))

    def _cancel(self, stream: Stream) -> None:
        self.send(lambda: self._cancel_requests(stream))
        self._end_offer(stream)

    def _cancel_requests(self, stream: Stream) -> None:
        for request in [request for request, one in self.streams.items() if one is stream]:
            self.llm.engine.cancel(request)

    def _end_offer(self, stream: Stream) -> None:
        if stream in self.offer:
            PrefillRole.ended(*self.offer.pop(stream))

    def _over(self, stream: Stream) -> None:
        """Nothing of it runs here any more."""
        self._end_offer(stream)
        asking = self._asking.pop(stream, None)
        if asking is not None and self.decoding is not None:
            self.decoding.ended(asking.handed)

    # The engine's thread ----------------------------------------------------------------------------------------------

    def send(self, command: Callable[[], object]) -> None:
        self._commands.append(command)
        if self._waits:
            self.tasks.wake(self._thread)

    def _begin(self, request: Request, stream: Stream) -> None:
        if stream.dropped:
            self._over(stream)
            return
        request.timings.arrival = self.fleet.events.now
        try:
            self.llm.engine.submit(request)
        except EngineStopped as error:
            stream.tell("lost", str(error))
            return
        self.streams[request] = stream

    def _run(self) -> None:
        engine = self.llm.engine
        while not self.closing:
            while self._commands:
                self._commands.popleft()()
            began = self.fleet.events.now
            worked = bool(self.streams or self._elsewhere) and engine.step()
            self.steps += worked
            self._publish()
            self._count(worked)
            if worked or self._commands:
                if self.fleet.events.now == began:  # nothing was computed
                    self.tasks.sleep(PYTHON_S)
            else:
                pause = (engine.idle_timeout() or STALLED_S) if self.streams or self._elsewhere else IDLE_S
                self._waits = True
                self.tasks.park(self.fleet.events.now + pause)
                self._waits = False

    def _count(self, worked: bool) -> None:
        """Count pages after every so many steps, and when the engine comes to rest."""
        self._not_audited += worked
        if self._not_audited >= EVERY or (self._not_audited and not worked):
            self._not_audited = 0
            audit(self)
            if self.decoding is not None and self.decoding.receiver.num_quarantined:
                self.fleet.happened["counted beside pages in quarantine"] += 1

    def _publish(self) -> None:
        for request, stream in list(self.streams.items()):
            assert request.preemptions < MOST_PREEMPTIONS, "a request is preempted again and again"
            done, asking = request.done, self._asking.get(stream)
            tokens = [request.events.popleft() for _ in range(len(request.events))]
            if asking is not None:
                interleaver = asking.interleaver
                tokens = [due for token in tokens for due in interleaver.push(token)]
                tokens += list(interleaver.rest()) if done and request.error is None else []
            if tokens or done:
                stream.tell("tokens", tokens, done, request.error)
            if done:
                if self.role == "decode" and request.prefilled_tokens:
                    self.fleet.happened["a decode worker prefills"] += 1
                del self.streams[request]
                self._over(stream)
        for task, requests in self._elsewhere.items():
            if all(request.done for request in requests):
                self.tasks.wake(task)

    def _run_elsewhere(self, requests: Sequence[Request]) -> None:
        """`Engine.run` in another thread of the worker: the engine's own thread steps."""
        me = self.tasks.current
        assert me is not None
        self._elsewhere[me] = requests
        try:
            for request in requests:
                self.send(partial(self.llm.engine.submit, request))
            while not all(request.done for request in requests):
                if self._stopped:
                    raise EngineStopped(STOPPED)
                self.tasks.park()
        finally:
            del self._elsewhere[me]

    def _pause(self, prompt: int, rows: int) -> None:
        self.tasks.sleep(STEP_S + PROMPT_S * prompt + TOKEN_S * rows)

    def close(self) -> None:
        """SIGTERM: what runs is lost here, and goes on elsewhere. Nothing may be held afterwards."""
        self.closing = True
        self.send(_look)
        self.tasks.start(self.process, self._close)

    def _close(self) -> None:
        self.tasks.join(self._thread, None)
        for stream in self.streams.values():
            stream.tell("lost", STOPPED)
        self.llm.engine.close()
        self._stopped = True
        self._commands.clear()
        for task in self._elsewhere:
            self.tasks.wake(task)
        self.streams.clear()
        for stream in list(self._asking):
            self._over(stream)
        self.offer.clear()
        role = self.prefilling or self.decoding
        assert role is not None
        role.close()
        until = self.fleet.events.now + 100
        while self.transfers and self.fleet.events.now < until:  # in quarantine
            self.tasks.sleep(0.5)
        used, pins = self.llm.pool.num_used, len(self.llm.pool.pins)
        assert (used, pins) == (0, 0), f"{self.process.name} has ended and holds {used} pages, {pins} pins"
        self.fleet.ended(self)

    # Counting ---------------------------------------------------------------------------------------------------------

    def _watched(self, sender: Sender) -> Callable[..., None]:
        """`Sender._send`, with a note of what is sent."""
        send = sender._send

        def sending(channel: Channel, parsed: Message, offer: ValueOffer) -> None:
            task, lease = self.tasks.current, offer.handle.lease
            assert task is not None
            self.sending[task] = lease
            self.fleet.begins(self.fleet.MOVES, self.fleet.leases[lease])
            try:
                send(channel, parsed, offer)
                self.sent.add(lease)
            finally:
                del self.sending[task]

        return sending

    def phase(self, lease: str) -> str:
        """Where the transfer of a value is: "before", "during" or "after" it."""
        if lease in self.sending.values():
            return "during"
        return "after" if lease in self.sent else "before"

    @property
    def elsewhere(self) -> list[Request]:
        """Requests of this worker's other threads."""
        return [request for requests in self._elsewhere.values() for request in requests]

    @property
    def sends(self) -> bool:
        return self.prefilling is not None and bool(self.prefilling.sender.channels)

    @property
    def takes(self) -> bool:
        """Whether a value has come, and nobody has it yet."""
        return any(
            one._arrived_pages and one._reservation is not None and not one._reservation.pages for one in self.transfers
        )

    @property
    def offers(self) -> list[ValueOffer]:
        return [] if self.prefilling is None else list(self.prefilling.sender.offers.values())

    @property
    def transfers(self) -> list[Any]:
        return [] if self.decoding is None else list(self.decoding.receiver.transfers)

    @property
    def reservations(self) -> list[PageReservation]:
        return [one._reservation for one in self.transfers if one._reservation is not None]

    def landing_of(self, frame: int) -> PageReservation:
        """Whose page is in a frame."""
        return next(one for one in self.reservations if frame in self._frames(one))

    def must_be_reserved(self, reservation: PageReservation, frame: int) -> None:
        """What was read lands in a frame: it must still be reserved for it."""
        reserved = reservation in self.reservations and frame in self._frames(reservation)
        assert reserved, "a late read reaches a page of somebody else"

    def _frames(self, reservation: PageReservation) -> list[int]:
        return [self.llm.pool.frame(page) for page in reservation.pages]

    def tell_ends(self) -> None:
        """Count how its leases have ended, before it ends itself."""
        for lease, why in () if self.prefilling is None else self.prefilling.sender.ended.items():
            self.fleet.happened[f"offer: {why}"] += 1
            if why == "its lease has ended":
                self.fleet.hit("the lease is outlived", self.fleet.leases[lease])

    @property
    def idle(self) -> bool:
        held = self.streams or self._asking or self.offers or self.transfers or self.llm.engine.num_requests
        return not held and not self.sends  # a transfer holds its value for some seconds after the lease

    def must_be_empty(self) -> None:
        """Nobody wants anything any more: the prefix index alone may hold pages."""
        index = self.llm.model.index
        indexed = 0 if index is None else len(set(index.pages))
        used = self.llm.pool.num_used
        assert used == indexed, f"{self.process.name}: {used - indexed} pages are still held"
        assert not self.llm.pool.pins, f"{self.process.name}: pins are left"
        assert not {**self.offer, **self._asking}, f"{self.process.name}: requests are left"


def _look() -> None:
    pass
