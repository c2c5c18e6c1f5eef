"""Sockets between simulated processes: bytes come late, in pieces, not at all; connections break, or fall silent.

A stream keeps its order, as TCP does. What TCP does about a network that has failed is in `Link`.
"""

from __future__ import annotations

import errno
import random
import socket
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from tests.chaos.tasks import Condition, Killed, Process, Task, Tasks, Workers
from twostroke.cluster.wire.channel import LIFE
from twostroke.cluster.wire.runtime import Address

SILENCE_S = dict(LIFE)[socket.TCP_USER_TIMEOUT] / 1000  # after which a connection is given up


class Link:
    """The network between two processes.

    Attributes:
        silent: nothing gets through. What was under way comes when it heals, unless that takes too long.
        epoch: how often it was given up.
    """

    def __init__(self, tasks: Tasks, rng: random.Random, latency_s: float) -> None:
        self._tasks, self._rng, self._latency_s = tasks, rng, latency_s
        self.silent = self._cut = False
        self.epoch = self._times = 0
        self._held: list[Callable[[], None]] = []
        self.sockets: dict[Socket, None] = {}

    def carry(self, action: Callable[[], None], after: float = 0.0) -> float:
        """Do something at the other side, not before `after`. Returns when, if nothing goes wrong."""
        delay = self._latency_s * (1 + self._rng.expovariate(1.0))
        moment = max(after, self._tasks.events.now + delay)
        self._tasks.events.at(moment, partial(self._come, action, self.epoch))
        return moment

    def _come(self, action: Callable[[], None], epoch: int) -> None:
        if epoch != self.epoch:
            return
        if self.silent:
            self._held.append(action)
        else:
            action()

    def fail(self) -> None:
        self.silent = True
        self._times += 1
        self._tasks.events.at(self._tasks.events.now + SILENCE_S, partial(self._give_up, self._times))

    def cut(self) -> None:
        """One side is gone for good."""
        self._cut = True
        self.fail()

    def heal(self) -> None:
        if self._cut:
            return
        self.silent = False
        held, self._held = self._held, []
        for action in held:
            action()

    def _give_up(self, times: int) -> None:
        if not self.silent or times != self._times:
            return
        self.epoch += 1
        self._held.clear()
        for one in list(self.sockets):
            one.broken(errno.ETIMEDOUT)
        self._tasks.events.at(self._tasks.events.now + SILENCE_S, partial(self._give_up, times))


class Network:
    """All links, and who listens where."""

    def __init__(
        self, tasks: Tasks, rng: random.Random, latency_s: float, room: int, loses: Callable[[Task], bool]
    ) -> None:
        """`room`: bytes that a stream takes before its reader has to take some. `loses`: whether what is sent to a task
        that waits for it is lost."""
        self.tasks, self._rng, self._latency_s, self.room, self.loses = tasks, rng, latency_s, room, loses
        self.listeners: dict[Address, Listener] = {}
        self._links: dict[frozenset[Process], Link] = {}
        self._ports = 1000

    def link(self, one: Process, other: Process) -> Link:
        ends = frozenset((one, other))
        if ends not in self._links:
            self._links[ends] = Link(self.tasks, self._rng, self._latency_s)
        return self._links[ends]

    def links_of(self, process: Process) -> list[Link]:
        return [link for ends, link in self._links.items() if process in ends]

    @property
    def links(self) -> list[Link]:
        return list(self._links.values())

    def piece(self, size: int) -> int:
        """How many of the bytes that are there a reader gets at once."""
        return size if self._rng.random() < 0.9 else self._rng.randint(1, size)

    def free_port(self) -> int:
        self._ports += 1
        return self._ports

    def die(self, process: Process) -> None:
        """The kernel closes what a process has open, and tells the others."""
        for address, listener in list(self.listeners.items()):
            if listener.process is process:
                del self.listeners[address]
        for link in self.links_of(process):
            for one in [one for one in link.sockets if one.process is process]:
                one.vanish()


class Listener:
    def __init__(self, network: Network, process: Process, address: Address) -> None:
        self._network, self.process = network, process
        self._address = (address[0], address[1] or network.free_port())
        self._queue: deque[Socket] = deque()
        self._waiting: Task | None = None
        self._timeout: float | None = None
        network.listeners[self._address] = self

    def getsockname(self) -> Address:
        return self._address

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def arrive(self, connection: Socket) -> None:
        self._queue.append(connection)
        self._wake()

    def accept(self) -> tuple[Socket, Address]:
        tasks = self._network.tasks
        until = None if self._timeout is None else tasks.events.now + self._timeout
        while not self._queue:
            if self._network.listeners.get(self._address) is not self:
                raise OSError(errno.EINVAL, "it does not listen")
            if until is not None and tasks.events.now >= until:
                raise TimeoutError("timed out")
            self._waiting = tasks.current
            tasks.park(until)
        return self._queue.popleft(), self._address

    def shutdown(self, how: int) -> None:
        if self._network.listeners.get(self._address) is self:
            del self._network.listeners[self._address]
        self._wake()

    def close(self) -> None:
        self.shutdown(socket.SHUT_RDWR)
        for one in self._queue:
            one.close()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._network.tasks.wake(self._waiting)


class Socket:
    """One end of a connection."""

    def __init__(self, network: Network, process: Process, link: Link, address: Address) -> None:
        self._network, self.process, self._link, self._address = network, process, link, address
        self._tasks = network.tasks
        self._peer: Socket
        self._inbox = bytearray()
        self._ended = self._closed = self._sends_no_more = self._receives_no_more = False
        self._error = 0
        self._under_way = 0  # bytes sent that the peer has not taken
        self._last = 0.0  # when what was sent last comes
        self._reader: Task | None = None
        self._writer: Task | None = None
        self._timeout: float | None = None
        link.sockets[self] = None

    @classmethod
    def pair(cls, network: Network, one: Process, other: Process, address: Address) -> tuple[Socket, Socket]:
        link = network.link(one, other)
        here, there = cls(network, one, link, address), cls(network, other, link, address)
        here._peer, there._peer = there, here
        return here, there

    # What the wire uses of a socket -----------------------------------------------------------------------------------

    def getpeername(self) -> Address:
        return self._address

    getsockname = getpeername  # all are on one machine

    def setsockopt(self, *_: int) -> None: ...

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def sendall(self, data: bytes) -> None:
        while data:
            data = data[self.sendmsg([memoryview(data)]) :]

    def sendmsg(self, views: Sequence[memoryview]) -> int:
        until = self._until()
        while (room := self._network.room - self._under_way) <= 0:
            self._check_sending()
            self._wait(until, "_writer")
        self._check_sending()
        data = b"".join(views)[:room]
        if (waits := self._peer._reader) is not None and self._network.loses(waits):
            self._link.carry(partial(self._peer.broken, errno.ECONNRESET))
            self.broken(errno.ECONNRESET)
            return len(data)
        self._under_way += len(data)
        self._last = self._link.carry(partial(self._peer._come, data), self._last)
        return len(data)

    def recv(self, count: int) -> bytes:
        until = self._until()
        while not self._inbox:
            if self._error:
                raise _os_error(self._error)
            if self._ended or self._receives_no_more:
                return b""
            self._wait(until, "_reader")
        data = bytes(self._inbox[: self._network.piece(min(count, len(self._inbox)))])
        del self._inbox[: len(data)]
        self._link.carry(partial(self._peer._taken, len(data)))
        return data

    def recvmsg_into(self, views: Sequence[memoryview]) -> tuple[int, Any]:
        left = data = self.recv(sum(len(view) for view in views))
        for view in views:
            part, left = left[: len(view)], left[len(view) :]
            view[: len(part)] = part
        return len(data), None

    @property
    def readable(self) -> bool:
        return bool(self._inbox or self._ended or self._error or self._receives_no_more)

    def shutdown(self, how: int) -> None:
        if how in (socket.SHUT_WR, socket.SHUT_RDWR) and not self._sends_no_more and not self.process.dead:
            self._sends_no_more = True
            self._last = self._link.carry(self._peer._end, self._last)
        if how in (socket.SHUT_RD, socket.SHUT_RDWR):
            self._receives_no_more = True
        self._wake()

    def close(self) -> None:
        if self._closed:
            return
        unread = bool(self._inbox)
        self.shutdown(socket.SHUT_RDWR)
        self._closed = True
        if not self.process.dead:
            if unread:
                self._link.carry(partial(self._peer.broken, errno.ECONNRESET))
            self._link.sockets.pop(self, None)

    # What comes -------------------------------------------------------------------------------------------------------

    def _come(self, data: bytes) -> None:
        if self.process.dead or self._closed:
            self._link.carry(partial(self._peer.broken, errno.ECONNRESET))
            return
        self._inbox += data
        self._wake()

    def _taken(self, count: int) -> None:
        self._under_way -= count
        self._wake()

    def _end(self) -> None:
        self._ended = True
        self._wake()

    def broken(self, error: int) -> None:
        """The connection has failed."""
        if not self._ended or error != errno.ECONNRESET:
            self._inbox.clear()
            self._error = self._error or error
        elif not self._error:
            self._error = error
        self._wake()

    def vanish(self) -> None:
        """Its process has died. The kernel tells the peer, if the network lets it."""
        self._closed = True
        self._link.sockets.pop(self, None)
        end = partial(self._peer.broken, errno.ECONNRESET) if self._inbox else self._peer._end
        self._link.carry(end, self._last)

    def _check_sending(self) -> None:
        if self._error:
            raise _os_error(self._error)
        if self._sends_no_more:
            raise BrokenPipeError(errno.EPIPE, "it sends no more")

    def _until(self) -> float | None:
        return None if self._timeout is None else self._tasks.events.now + self._timeout

    def _wait(self, until: float | None, role: str) -> None:
        if self.process.dead:
            raise Killed
        if until is not None and self._tasks.events.now >= until:
            raise TimeoutError("timed out")
        setattr(self, role, self._tasks.current)
        try:
            self._tasks.park(until)
        finally:
            setattr(self, role, None)

    def _wake(self) -> None:
        for task in (self._reader, self._writer):
            if task is not None:
                self._tasks.wake(task)


def _os_error(number: int) -> OSError:
    kinds = {errno.ECONNRESET: ConnectionResetError, errno.ETIMEDOUT: TimeoutError}
    return kinds.get(number, OSError)(number, errno.errorcode[number])


class Machine:
    """Implements `Surroundings` for one process."""

    cores: int | None = 1  # so that digests have no threads of their own
    machine: str | None = "simulated"

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._tasks, self.process = network, network.tasks, process

    def now(self) -> float:
        return self._tasks.events.now

    def sleep(self, seconds: float) -> None:
        self._tasks.sleep(seconds)

    def condition(self) -> Condition:
        return Condition(self._tasks)

    def workers(self, name: str, count: int) -> Workers:
        return Workers(self._tasks, self.process, count)

    def start(self, name: str, job: Callable[[], object]) -> _Started:
        return _Started(self._tasks, self._tasks.start(self.process, job))

    def connect(self, address: Address, limit_s: float) -> socket.socket:
        until = self._tasks.events.now + limit_s
        listener = self._network.listeners.get(address)
        if listener is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "connection refused")
        made: list[Socket] = []
        link, me = self._network.link(self.process, listener.process), self._tasks.current
        assert me is not None

        def arrive() -> None:
            if self._network.listeners.get(address) is listener:
                here, there = Socket.pair(self._network, self.process, listener.process, address)
                listener.arrive(there)

                def connected() -> None:
                    made.append(here)
                    self._tasks.wake(me)

                link.carry(connected)

        link.carry(arrive)
        while not made:
            if self._tasks.events.now >= until:
                raise TimeoutError("timed out")
            self._tasks.park(until)
        return cast(socket.socket, made[0])

    def listen(self, address: Address) -> socket.socket:
        return cast(socket.socket, Listener(self._network, self.process, address))

    def readable(self, connection: socket.socket) -> bool:
        return cast(Socket, connection).readable


class _Started:
    def __init__(self, tasks: Tasks, task: Task) -> None:
        self._tasks, self._task = tasks, task

    def join(self, timeout: float | None = None) -> None:
        self._tasks.join(self._task, timeout)
