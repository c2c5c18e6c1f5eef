"""A front end, which does as Dynamo's does: it routes, hands the value's handle on, and sends again what is lost."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tests.chaos.tasks import Process, Task
from twostroke.cluster.dynamo_request import DynamoRequest
from twostroke.cluster.wire.channel import WireError
from twostroke.engine.output import Token
from twostroke.engine.router import RoutedCall
from twostroke.errors import EngineStopped, InvalidRequest, KVError
from twostroke.study.traffic.requests import TrafficRequest

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
        kind: one of `kinds`.
        deadline: when it has to be over. leaves_at: when its user goes away.
        tokens: of each choice, in order. given: the ids of all choices, in the order in which they came.
        at: the workers that have it now, by role. lease: that of its value.
        fate: "answered", "failed", "left", "its front end died"; None before.
        line: why it has failed.
        moves: how often it was sent again.
    """

    kind: str
    parsed: DynamoRequest
    arrival: TrafficRequest
    deadline: float
    leaves_at: float | None
    tokens: list[list[Token]] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    at: dict[str, Worker] = field(default_factory=dict)
    lease: str = ""
    fate: str | None = None
    line: str = ""
    moves: int = 0
    streams: list[Stream] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = [[] for _ in range(self.parsed.params.n)]


class Stream:
    """What one worker says of one request, in order."""

    def __init__(self, fleet: Fleet, worker: Worker, pages: int, client: Client, task: Task) -> None:
        self.fleet, self.worker, self.client = fleet, worker, client
        self._pages, self._task = pages, task
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
        self.wake()

    def wake(self) -> None:
        self.fleet.tasks.wake(self._task)

    def take(self, until: float | None) -> tuple[str, tuple[Any, ...]] | None:
        """The next news; None at `until`, or when the front end has died. Raises Lost."""
        tasks = self.fleet.tasks
        while not self._news:
            if self.client.fate is not None or (until is not None and tasks.events.now >= until):
                return None
            tasks.park(until)
        what, about = self._news.popleft()
        if what == "lost":
            raise Lost(*about)
        return what, about

    def drop(self) -> None:
        self.dropped = True
        self.fleet.streams[self.worker].pop(self, None)
        self.fleet.routers[self.worker.role].done(self.worker, self._pages)
        self._link.carry(lambda: self.worker.cancel(self), self._last)


class Front:
    """Attributes: clients: all that have come."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.process = Process("front end")
        self.clients: list[Client] = []

    @property
    def waiting(self) -> list[Client]:
        """The clients that do not know their fate."""
        return [client for client in self.clients if client.fate is None]

    def come(self, client: Client) -> None:
        self.clients.append(client)
        self.fleet.tasks.start(self.process, lambda: self._serve(client))

    def die(self) -> None:
        """It dies, and another one is there at once. Connections end, and workers learn of it."""
        for client in self.waiting:
            self.fleet.hit("the front end restarts", client)
            client.fate = "its front end died"
            for stream in client.streams:
                stream.wake()

    def _serve(self, client: Client) -> None:
        tasks = self.fleet.tasks
        while client.fate is None:
            try:
                self._try(client)
            except Lost:
                client.moves += 1
                tasks.sleep(RETRY_S)
            finally:
                for stream in client.streams:
                    stream.drop()
                client.streams.clear()
                client.at.clear()
                client.lease = ""

    def _try(self, client: Client) -> None:
        parsed = replace(client.parsed, given=tuple(client.given))
        first = self._send(client, "prefill", parsed, None)
        handed = None
        if first is not None:
            news = first.take(client.leaves_at)
            if news is None:
                self._leave(client)
                return
            what, (handed,) = news
            assert what == "handle"
        elif client.parsed.method.companions:
            raise Lost("no prefill worker, and a student cannot do without its teacher")
        second = self._send(client, "decode", parsed, handed)
        if second is None:
            raise Lost("no decode worker")
        while client.fate is None:
            news = second.take(client.leaves_at)
            if news is None:
                self._leave(client)
                return
            self._take(client, *news[1])

    def _leave(self, client: Client) -> None:
        if client.fate is None:
            client.fate = "left"
            self.fleet.hit("the client leaves", client)

    def _send(self, client: Client, role: str, parsed: DynamoRequest, handed: dict[str, Any] | None) -> Stream | None:
        """Send a request to a worker. None: there is no worker."""
        fleet, task = self.fleet, self.fleet.tasks.current
        assert task is not None
        router = fleet.routers[role]
        tokens = client.arrival.prompt_tokens + client.arrival.output_tokens
        pages = -(-tokens // fleet.plan.sizes[role].page_size)
        worker = router.choose(RoutedCall(pages, ()))
        if worker is None:
            fleet.happened[f"no {role} worker"] += 1
            return None
        stream = Stream(fleet, worker, pages, client, task)
        client.streams.append(stream)
        client.at[role] = worker
        fleet.network.link(self.process, worker.process).carry(lambda: worker.ask(parsed, handed, stream))
        if worker.process.dead:
            fleet.happened["sent to a dead worker"] += 1
        return stream

    def _take(self, client: Client, tokens: list[Token], done: bool, error: Exception | None) -> None:
        if client.fate is not None:  # its front end has died
            return
        if tokens and not client.given:
            self.fleet.begins(self.fleet.ANSWERS, client)
        for token in tokens:
            mine = client.tokens[token.choice]
            assert token.index == len(mine), f"token {token.index} comes after {len(mine)}"
            mine.append(token)
            client.given.append(token.id)
        if isinstance(error, WireError | EngineStopped):
            raise Lost(str(error))
        if error is not None:
            assert isinstance(error, KVError | InvalidRequest), error
            client.fate, client.line = "failed", str(error)
        elif done:
            client.fate = "answered"
