"""The processes of ranks: rank 0 starts the others, sends them messages, and learns at once when one ends.

Rank 0 is the process that has the engine. The others have no state of their own but weights and pages, so they are
ended by a signal that cannot be refused. They also end by themselves when rank 0 has ended, however it ended.
"""

import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.errors import RankLost

RANK_TIMEOUT_S = 60.0  # seconds that a rank may let others wait for it
START = "import sys; sys.path[:] = {path!r}; from {module} import main; main({file}, {parent})"


class PipeChannel:
    """Messages to and from another process of this host, in order. Objects are pickled: both sides are this user's."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self._pipe = Connection(os.dup(sock.fileno()))

    def send(self, message: object) -> None:
        self._pipe.send_bytes(pickle.dumps(message))

    def receive(self) -> Any:
        """The next object. Raises EOFError or OSError if the other side has ended, or sends nothing for too long."""
        if not self._pipe.poll(RANK_TIMEOUT_S):
            raise EOFError
        return pickle.loads(self._pipe.recv_bytes())

    def send_array(self, array: np.ndarray) -> None:
        """Send bytes, [n, m] uint8."""
        self.send(array.shape)
        self._pipe.send_bytes(np.ascontiguousarray(array).data.cast("B"))

    def receive_array(self) -> np.ndarray:
        """Bytes that were sent as an array. They may take any time to come. Raises EOFError or OSError."""
        array = np.empty(self.wait(), np.uint8)
        self._pipe.recv_bytes_into(array.data.cast("B"))
        return array

    def wait(self) -> Any:
        """The next object, without a limit of time."""
        return pickle.loads(self._pipe.recv_bytes())

    def close(self) -> None:
        """End the conversation. A second call does nothing."""
        self._pipe.close()
        self.socket.close()


class Followers:
    """All ranks but rank 0."""

    def __init__(self, module: str, facts: Sequence[object], fds: Sequence[int], lost: Callable[[int], object]) -> None:
        """Start one process for each of `facts`, which are its first message.

        Args:
            module: its `main(file, parent)` runs in each process: a socket, and the process id of rank 0.
            fds: file descriptors that they inherit, by the same numbers.
            lost: called with the rank of one that ends before `end`, in another thread.
        """
        self.size = len(facts) + 1  # number of ranks, with rank 0
        self.peers: list[PipeChannel] = []  # to each, by rank - 1
        self._processes: list[subprocess.Popen[bytes]] = []
        self._watchers: list[threading.Thread] = []
        self._closing = threading.Event()
        weakref.finalize(self, _end, self._closing, self._processes, self._watchers, self.peers)
        try:
            for rank, fact in enumerate(facts, 1):
                self._start(module, rank, fact, fds, lost)
        except BaseException:
            self.end()
            raise

    def _start(self, module: str, rank: int, fact: object, fds: Sequence[int], lost: Callable[[int], object]) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            code = START.format(path=sys.path, module=module, file=theirs.fileno(), parent=os.getpid())
            # A new session, so that Ctrl-C in a terminal reaches rank 0 alone.
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                pass_fds=(theirs.fileno(), *fds),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._processes.append(process)
        self.peers.append(PipeChannel(ours))
        watcher = threading.Thread(
            target=_watch, args=(process, rank, self._closing, lost), name=f"rank {rank}", daemon=True
        )
        self._watchers.append(watcher)
        watcher.start()
        self.peers[-1].send(fact)

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank - 1."""
        return [process.pid for process in self._processes]

    def send_all(self, *message: object) -> None:
        """Send a message to all. Raises RankLost."""
        for rank, peer in enumerate(self.peers, 1):
            self.guarded(rank, peer.send, message)

    def receive_all(self) -> list[Any]:
        """One answer of each. Raises RankLost, or the error that one answers with."""
        return raise_first([self.guarded(rank, peer.receive) for rank, peer in enumerate(self.peers, 1)])

    def guarded(self, rank: int, action: Callable[..., Any], *args: Any) -> Any:
        """The result of an action with a rank's peer. Raises RankLost."""
        try:
            return action(*args)
        except (EOFError, OSError):
            raise self.loss_error(rank) from None

    def loss_error(self, rank: int) -> RankLost:
        status = None
        with suppress(subprocess.TimeoutExpired, IndexError):
            status = self._processes[rank - 1].wait(0.2) if rank else None
        what = "has not answered for too long" if status is None else f"has ended (status {status})"
        return RankLost(f"rank {rank} of {self.size} {what}, and with it its part of the model: open the model again")

    def end(self) -> None:
        """End all processes. A second call does nothing."""
        _end(self._closing, self._processes, self._watchers, self.peers)


def _watch(
    process: subprocess.Popen[bytes], rank: int, closing: threading.Event, lost: Callable[[int], object]
) -> None:
    process.wait()
    if not closing.is_set():
        lost(rank)


def _end(
    closing: threading.Event,
    processes: list[subprocess.Popen[bytes]],
    watchers: list[threading.Thread],
    peers: list[PipeChannel],
) -> None:
    closing.set()
    for process in processes:
        process.kill()
    for watcher in watchers:
        if watcher is not threading.current_thread():
            watcher.join()
    for peer in peers:
        peer.close()


def raise_first(answers: list[Any]) -> list[Any]:
    """The answers of ranks. Raises the first that is an error."""
    for answer in answers:
        if isinstance(answer, BaseException):
            raise answer
    return answers


def exit_with_parent(parent: int) -> None:
    """End this process as soon as its parent has ended."""

    def watch() -> None:
        if hasattr(os, "pidfd_open"):  # Linux
            with suppress(OSError):
                waiting = select.poll()
                waiting.register(os.pidfd_open(parent), select.POLLIN)
                if os.getppid() == parent:
                    waiting.poll()
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


def under_torchrun() -> bool:
    """Whether `torchrun` has started this process as one of several ranks."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def local_ranks(size: int) -> int:
    """The number of a model's `size` ranks that are on this host."""
    return min(size, int(os.environ.get("LOCAL_WORLD_SIZE", size))) if under_torchrun() else size


def cores_of(size: int, root: Path = Path("/sys/devices/system/node")) -> list[list[int]]:
    """The cores of each rank: equal parts of those that this process may use, a node's memory after another's.

    Empty lists if there are fewer cores than ranks: then nobody is pinned.
    """
    if not hasattr(os, "sched_getaffinity"):
        return [[] for _ in range(size)]
    usable = sorted(os.sched_getaffinity(0), key=lambda core: (_node(core, root), core))
    if len(usable) < size:
        return [[] for _ in range(size)]
    each = len(usable) // size
    return [usable[rank * each : (rank + 1) * each] for rank in range(size)]


def _node(core: int, root: Path) -> int:
    """The NUMA node of a core; 0 if the system does not tell."""
    return next((int(node.name[4:]) for node in sorted(root.glob("node[0-9]*")) if (node / f"cpu{core}").exists()), 0)
