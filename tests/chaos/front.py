"""A front end, which does as Dynamo's does: it routes, hands the value's handle on, and sends again what is lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from tests.chaos.tasks import Process, Task
from twostroke.cluster.asked import Asked
from twostroke.engine.track import Token
from twostroke.errors import EngineStopped, InvalidRequest, KVError
from twostroke.simulation.call import Call
from twostroke.traffic.requests import Arrival
from twostroke.wire.channel import WireError

if TYPE_CHECKING:
    from tests.chaos.fleet import Fleet
    from tests.chaos.worker import Worker

RETRY_S = 0.1


class Lost(Exception):
    """A worker has died, or takes no requests."""


@dataclass(eq=False)
class Client:
    """A request as its user sees it.

    Attributes:
        tokens: of each choice, in order. finish: of each choice; None while it is not over.
        deadline: when it has to be over. leaves_at: when its user goes away.
        fate: "answered", "failed", "left"; None before.
        line: why it has failed.
        moves: how often it was sent again.
    """

    asked: Asked
    arrival: Arrival
    deadline: float
    leaves_at: float | None
    tokens: list[list[int]]
    finish: list[str | None]
    fate: str | None = None
    line: str = ""
    moves: int = 0
    streams: list[Stream] = field(default_factory=list)


class Stream:
    """What one worker says of one request, in order."""

    def __init__(self, fleet: Fleet, worker: Worker, call: Call, client: Task) -> None:
        self.fleet, self.worker, self._call, self._client = fleet, worker, call, client
        fleet.streams[worker][self] = None
        self._link = fleet.network.link(fleet.front.process, worker.process)
        self._last = 0.0
        self._news: deque[tuple[str, tuple[Any, ...]]] = deque()
        self.dropped = False

    def tell(self, what: str, *about: Any) -> None:
        """The worker says something."""
        self._last = self._link.carry(lambda: self.put(what, *about), self._last)

    def put(self, what: str, *about: Any) -> None:
        self._news.append((what, about))
        self.fleet.tasks.wake(self._client)

    def take(self, until: float | None) -> tuple[str, tuple[Any, ...]] | None:
        """The next news; None at `until`. Raises Lost."""
        tasks = self.fleet.tasks
        while not self._news:
            if until is not None and tasks.events.now >= until:
                return None
            tasks.park(until)
        what, about = self._news.popleft()
        if what == "lost":
            raise Lost(*about)
        return what, about

    def drop(self) -> None:
        self.dropped = True
        self.fleet.streams[self.worker].pop(self, None)
        self.fleet.routers[self.worker.role].done(cast(Any, self.worker), self._call)
        self._link.carry(lambda: self.worker.cancel(self), self._last)


class Front:
    """Attributes: clients: all that have come."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.process = Process("front end")
        self.clients: list[Client] = []

    def come(self, client: Client) -> None:
        self.clients.append(client)
        self.fleet.tasks.start(self.process, lambda: self._serve(client))

    def _serve(self, client: Client) -> None:
        tasks = self.fleet.tasks
        while client.fate is None:
            try:
                self._try(client)
            except Lost:
                if len(client.tokens) > 1 and any(client.tokens):  # of Dynamo: several choices are not sent again
                    client.fate, client.line = "failed", "a worker has died, and the request has several choices"
                client.moves += 1
                tasks.sleep(RETRY_S)
            finally:
                for stream in client.streams:
                    stream.drop()
                client.streams.clear()

    def _try(self, client: Client) -> None:
        given = tuple(client.tokens[0]) if len(client.tokens) == 1 else ()
        asked = replace(client.asked, given=given)
        first = self._send(client, "prefill", asked, None)
        handed = None
        if first is not None:
            news = first.take(client.leaves_at)
            if news is None:
                client.fate = "left"
                return
            what, (handed,) = news
            assert what == "handle"
        second = self._send(client, "decode", asked, handed)
        if second is None:
            raise Lost("no decode worker")
        while client.fate is None:
            news = second.take(client.leaves_at)
            if news is None:
                client.fate = "left"
                return
            self._take(client, *news[1])

    def _send(self, client: Client, role: str, asked: Asked, handed: dict[str, Any] | None) -> Stream | None:
        """Send a request to a worker. None: there is no worker."""
        fleet, task = self.fleet, self.fleet.tasks.current
        assert task is not None
        router = fleet.routers[role]
        call = Call(0, client.arrival, fleet.events.now)
        chosen: Any = router.choose(call)
        if chosen is None:
            fleet.happened[f"no {role} worker"] += 1
            return None
        worker: Worker = chosen
        stream = Stream(fleet, worker, call, task)
        client.streams.append(stream)
        fleet.network.link(self.process, worker.process).carry(lambda: worker.ask(asked, handed, stream))
        if worker.process.dead:
            fleet.happened["sent to a dead worker"] += 1
        return stream

    def _take(self, client: Client, tokens: list[Token], done: bool, error: Exception | None) -> None:
        for token in tokens:
            mine = client.tokens[token.choice]
            assert token.index == len(mine), f"token {token.index} comes after {len(mine)}"
            mine.append(token.id)
            client.finish[token.choice] = token.finish_reason
        if isinstance(error, WireError | EngineStopped):
            raise Lost(str(error))
        if error is not None:
            assert isinstance(error, KVError | InvalidRequest), error
            client.fate, client.line = "failed", str(error)
        elif done:
            client.fate = "answered"
