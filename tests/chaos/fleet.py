"""A fleet of one seed: workers, their network, a front end, clients, and what goes wrong."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from tests.chaos.front import Client, Front
from tests.chaos.matrix import Matrix
from tests.chaos.network import Link, Network
from tests.chaos.reads import Luck, Reads
from tests.chaos.standin import Sizes
from tests.chaos.tasks import Task, Tasks
from tests.chaos.worker import Worker
from twostroke.cluster.wire.transport import Tcp, Transport
from twostroke.engine.router import LeastLoaded, RoundRobin, Router
from twostroke.study.simulate.virtual_time import EventQueue

ROLES = ("prefill", "decode")
AWAITED = 0.8  # share of faults that wait for a moment of a client
MOST_AWAITED = 2  # faults that wait for one moment
FEW = 16  # events


@dataclass(frozen=True)
class Plan:
    """What a fleet is made of, and what goes wrong until `until_s`.

    Attributes:
        kinds: of faults that happen, about `gap_s` seconds apart.
        student: whether decode workers have the student alone.
        sizes: of workers of each role. transports: one of "nixl", "tcp" for each new worker, drawn.
        latency_s: of the network; room: bytes that a stream takes before they are read.
        notice_s: seconds until a front end knows of a death; down_s: until another worker comes.
        lost: share of what a receiver says that is lost, with the connection. damaged, page_s: see `Luck`.
    """

    seed: int
    kinds: tuple[str, ...]
    student: bool
    gap_s: float
    until_s: float
    counts: dict[str, int]
    sizes: dict[str, Sizes]
    transports: tuple[str, ...]
    router: str
    latency_s: float
    room: int
    notice_s: float
    down_s: float
    lost: float
    damaged: float
    page_s: float


class Fleet:
    """All of it.

    Attributes:
        happened: how often each thing did. matrix: which fault hit which kind of request.
        workers: those that live. leases: whose value each is.
    """

    MOMENTS = MOVES, ANSWERS = "its value moves", "its first token has come"

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.events = EventQueue()
        self.tasks = Tasks(self.events)
        # Each kind of chance has numbers of its own, so that one more of one kind does not change the others.
        self._faults, network, reads, self._drawn, self._lost = (
            random.Random(f"{what} {plan.seed}") for what in ("faults", "network", "reads", "transports", "lost")
        )
        self.network = Network(self.tasks, network, plan.latency_s, plan.room, self._loses)
        self._luck = Luck(reads, plan.damaged, plan.page_s)
        self.happened: Counter[str] = Counter()
        self.matrix: Matrix = Matrix()
        self.leases: dict[str, Client] = {}
        self.transports: dict[str, Reads] = {}
        self.front = Front(self)
        self.workers: list[Worker] = []
        self.streams: dict[Worker, dict[Any, None]] = {}
        self.steps = 0  # of workers that are gone
        self._numbers, self._closed = 0, False
        self._awaited = {moment: deque[str](maxlen=MOST_AWAITED) for moment in self.MOMENTS}  # kinds of faults
        self.routers: dict[str, Router[Worker]] = {}
        for role in ROLES:
            self.routers[role] = RoundRobin() if plan.router == "round-robin" else LeastLoaded()
            for _ in range(plan.counts[role]):
                self._join(role)
        self._next_fault()

    def transport(self, worker: Worker) -> Transport:
        if self._drawn.choice(self.plan.transports) == "tcp":
            return Tcp()
        made = Reads(self.network, worker.process, self._luck, self.happened)
        made.worker = worker
        self.transports[worker.process.name] = made
        return made

    @property
    def num_steps(self) -> int:
        return self.steps + sum(worker.steps for worker in self.workers)

    def _join(self, role: str) -> None:
        if self._closed:  # a worker that joins now would never end
            return
        worker = Worker(self, self._numbers, role, self.plan.sizes[role], self.plan.student)
        self._numbers += 1
        self.workers.append(worker)
        self.streams[worker] = {}
        self.routers[role].join(worker)

    # What goes wrong --------------------------------------------------------------------------------------------------

    def _next_fault(self) -> None:
        moment = self.events.now + self._faults.expovariate(1 / self.plan.gap_s)
        if moment < self.plan.until_s and self.plan.kinds:
            self.events.at(moment, self._fault)

    def hit(self, fault: str, client: Client) -> None:
        self.matrix[fault, client.kind] += 1

    def _fault(self) -> None:
        kind = self._faults.choice(self.plan.kinds)
        if self._faults.random() < AWAITED:
            often = (self.MOVES, self.ANSWERS, self.ANSWERS)  # values move again and again
            moment = self.MOVES if kind == "silence" else self._faults.choice(often)
            self._awaited[moment].append(kind)
        else:
            self._strike(kind, None)
        self._next_fault()

    def begins(self, what: str, client: Client) -> None:
        """One of `MOMENTS` of a client has come."""
        now = self.events.now
        if self._awaited[what] and now < self.plan.until_s:
            moment = now + self._faults.choice((0.0, 0.002, 0.01, 0.05))
            self.events.at(moment, partial(self._strike, self._awaited[what].popleft(), client))

    def _strike(self, kind: str, client: Client | None) -> None:
        """A fault of a kind, of the workers that have the client's request if there are any."""
        rng = self._faults
        among = [worker for worker in self.workers if not worker.closing and not worker.process.stopped]
        chosen = [] if client is None else [worker for worker in client.at.values() if worker in among]
        if kind in ("kill", "vanish", "drain", "stop"):
            if among:
                getattr(self, f"_{kind}")(rng.choice(chosen or among))
        elif kind == "silence":
            pairs = [(one, other) for one in among for other in among if one.role > other.role]
            between = [pair for pair in pairs if {*pair} == {*chosen}]
            if pairs:
                self._silence(*rng.choice(between or pairs))
        elif kind == "front end":
            self.happened["front end dies"] += 1
            self.front.die()

    def _loses(self, waits: Task) -> bool:
        """Whether what is said to a task is lost, with its connection: what a receiver says to a task that sends."""
        lease = next((worker.sending[waits] for worker in self.workers if waits in worker.sending), None)
        if lease is None or self.events.now > self.plan.until_s or self._lost.random() >= self.plan.lost:
            return False
        self.hit("what the receiver says is lost", self.leases[lease])
        return True

    def _moving(self, prefill: Worker, decode: Worker) -> list[Client]:
        """The clients whose value moves between two workers."""
        clients = [self.leases[lease] for lease in prefill.sending.values()]
        return [client for client in clients if client.at.get("decode") is decode]

    def _count(self, what: str, worker: Worker) -> None:
        """What a fault has hit."""
        state = "idle"
        if worker.prefilling is not None:
            if worker.prefilling.sender.channels:
                state = "while it sends"
            elif worker.streams:
                state = "while it prefills"
            elif worker.offers:
                state = "while it holds a value"
        elif worker.transfers:
            state = "while it receives"
        elif worker.streams:
            state = "while it decodes"
        self.happened[f"{what} of a {worker.role} worker {state}"] += 1

    def _kill(self, worker: Worker) -> None:
        self._count("death", worker)
        self._end(worker)
        self.network.die(worker.process)

    def _vanish(self, worker: Worker) -> None:
        """Its machine is gone: nobody is told."""
        self._count("loss", worker)
        self._end(worker)
        for link in self.network.links_of(worker.process):
            link.cut()

    def _end(self, worker: Worker) -> None:
        for client in self.front.waiting:
            if client.at.get("prefill") is worker:
                self.hit(f"prefill dies {worker.phase(client.lease)} the transfer", client)
            elif client.at.get("decode") is worker and client.given:
                self.hit("decode dies", client)
        worker.tell_ends()
        self.tasks.kill(worker.process)
        self.workers.remove(worker)
        self.steps += worker.steps
        self.events.at(self.events.now + self.plan.notice_s, partial(self._notice, worker))

    def _notice(self, worker: Worker) -> None:
        """The front end learns that a worker is gone."""
        self.routers[worker.role].leave(worker)
        for stream in list(self.streams[worker]):
            stream.put("lost", "the worker has died")
        self.events.at(self.events.now + self.plan.down_s, partial(self._join, worker.role))

    def _drain(self, worker: Worker) -> None:
        self._count("end", worker)
        self.routers[worker.role].leave(worker)
        worker.close()

    def ended(self, worker: Worker) -> None:
        """A worker has closed in order."""
        worker.tell_ends()
        self.steps += worker.steps
        self.workers.remove(worker)
        self.network.die(worker.process)
        worker.process.dead = True
        for stream in list(self.streams[worker]):
            stream.put("lost", "the worker has ended")
        self.events.at(self.events.now + self.plan.down_s, partial(self._join, worker.role))

    def _stop(self, worker: Worker) -> None:
        """SIGSTOP, and later SIGCONT."""
        self._count("stop", worker)
        self.tasks.stop(worker.process)
        seconds = self._faults.choice((0.3, 3.0, 15.0, 45.0))
        self.events.at(self.events.now + seconds, partial(self.tasks.go_on, worker.process))

    def _silence(self, prefill: Worker, decode: Worker) -> None:
        link: Link = self.network.link(prefill.process, decode.process)
        if link.silent:
            return
        seconds = self._faults.choice((0.3, 3.0, 15.0, 45.0))
        self.happened["a network that is silent" + (" for long" if seconds > 5 else "")] += 1
        for client in self._moving(prefill, decode):
            self.hit("the network stalls", client)
        link.fail()
        self.events.at(self.events.now + seconds, link.heal)

    # The end ----------------------------------------------------------------------------------------------------------

    def over(self) -> bool:
        """Whether every client knows its fate, and nobody holds anything for anybody."""
        return all(client.fate is not None for client in self.front.clients) and all(one.idle for one in self.workers)

    def close(self) -> None:
        self._closed = True
        for process in [self.front.process, *(worker.process for worker in self.workers)]:
            self.tasks.kill(process)
        while self.tasks.alive and self.events.step():
            pass

    def run(self, clients: list[Client], heard: Callable[[], None]) -> None:
        """Until all is over. `heard` is called after every few events."""
        for client in clients:
            self.events.at(client.arrival.at, partial(self.front.come, client))
        last = max(client.arrival.at for client in clients)
        while all(self.events.step() for _ in range(FEW)):
            heard()
            if self.events.now > max(last, self.plan.until_s) and self.over():
                return
