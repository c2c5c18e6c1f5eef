"""An engine of this process, reached as one of another process is: over a pair of sockets, in a thread."""

import socket
import threading
from multiprocessing.connection import Connection
from typing import Any, cast

from tests.server.long_answers import unhurried
from twostroke.api.llm import LLM
from twostroke.engine.forecast import Forecast
from twostroke.server.engine_process.host import EngineHost
from twostroke.server.engine_process.launch import Launch, launch_of
from twostroke.server.engine_process.link import LinkOpener
from twostroke.server.engine_process.messages import OpenOptions
from twostroke.server.engine_process.remote import RemoteEngine
from twostroke.server.engine_process.step_note import StepNote


class HostThread:
    """Stands for an `EngineProcess`."""

    pid = 0

    def __init__(self, llm: LLM, generation: int) -> None:
        ours, theirs = socket.socketpair()
        self.note = StepNote()
        self.pipe, self._sending = Connection(ours.detach()), threading.Lock()
        self._theirs = Connection(theirs.detach())
        self._host = EngineHost(llm, self._theirs, self.note, generation)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with self._theirs:
            self._host.serve()

    def send(self, data: bytes) -> None:
        with self._sending:
            self.pipe.send_bytes(data)

    def kill(self) -> None:
        raise AssertionError("a thread cannot be killed")

    def end(self, patience_s: float) -> str:
        with self._sending:
            self.pipe.close()
        self._thread.join(patience_s)
        return "as a thread"


def over_the_wire(llm: LLM) -> RemoteEngine:
    """The engine of `llm`, which has no process to lose."""
    return RemoteEngine(LinkOpener(lambda generation, kv_bytes=None: cast("Any", HostThread(llm, generation))))


def open_llm(**options: Any) -> LLM:
    """Opens the model of an engine's process."""
    return unhurried(LLM(**options))


def open_slow(**options: Any) -> LLM:
    """Loading is always predicted to be quicker than computing. Here, since a process imports what this module does."""
    Forecast.prefill = lambda *_: lambda context, count: 0.1  # pyright: ignore[reportAttributeAccessIssue]
    return open_llm(**options)


def in_a_process(model: str, *methods: str, watchdog_s: float = 0.0, **options: Any) -> RemoteEngine:
    """An engine in a process of its own."""
    return RemoteEngine(LinkOpener(launch(model, *methods, **options)), watchdog_s)


def launch(model: str, *methods: str, tells_pages: bool = False, **options: Any) -> Launch:
    """Starts processes of a model."""
    arguments = {"model": model, "kv_bytes": 16 << 20, "threads": 1, **options}
    return launch_of(OpenOptions(open_llm, arguments, methods=methods, tells_pages=tells_pages))
