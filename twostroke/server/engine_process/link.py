"""The server's connection to one engine's process."""

import contextlib
import pickle
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from twostroke.api.llm import LLM
from twostroke.errors import EngineFailed
from twostroke.server.engine_process.codec import ServerCodec
from twostroke.server.engine_process.in_flight import InFlight
from twostroke.server.engine_process.launch import EngineProcess, Launch
from twostroke.server.engine_process.messages import Failed, Opened, Release

END_S = 5.0  # seconds that a process may take to end once its connection is closed


class ModelChanged(EngineFailed):
    """The files of a model that is opened again are those of another one."""


class ProcessLink:
    """One process and what goes to it: a thread sends, so that nobody waits for a process that is busy."""

    def __init__(self, process: EngineProcess, generation: int, known: LLM | None = None) -> None:
        """Wait until the model is open. Raises what the process says, or EngineFailed if it dies.

        `known`: the model as an earlier process has described it. Whoever holds that means this process's by it.
        """
        self.process = process
        try:
            message = pickle.loads(process.pipe.recv_bytes())
        except (EOFError, OSError):
            how = process.end(END_S)
            raise EngineFailed(f"the engine's process ended {how} while it opened the model") from None
        if isinstance(message, Failed):
            process.end(END_S)
            raise message.error
        opened: Opened = message
        self.llm: LLM = opened.state.llm_of()
        self.outbox: SimpleQueue[Any] = SimpleQueue()
        self.codec = ServerCodec(known or self.llm, generation, lambda value: self.outbox.put(Release(value)))

    def start(self, unsendable: Callable[[Any, Exception], None]) -> None:
        """Begin to send. `unsendable` is told of what cannot be."""
        threading.Thread(target=self._send, args=(unsendable,), name="engine sender", daemon=True).start()

    def _send(self, unsendable: Callable[[Any, Exception], None]) -> None:
        with contextlib.suppress(OSError):  # the process is gone, which the reader notices
            while (message := self.outbox.get()) is not None:
                try:
                    data = self.codec.dumps(message.begin() if isinstance(message, InFlight) else message)
                except Exception as error:
                    unsendable(message, error)
                else:
                    self.process.send(data)
                del message  # a value that it names is not kept while nothing is sent


class LinkOpener:
    """Opens the processes of one engine, one after the other.

    Attributes:
        number: which engine of the model it is, from 0 on.
        llm: the model as the first process of the first engine has described it, which requests name.
    """

    def __init__(self, launch: Launch, number: int = 0, count: int = 1, known: LLM | None = None) -> None:
        """`count` is how many engines the model has, `known` the `llm` of those before this one."""
        self.number, self._count, self._launch, self._known = number, count, launch, known
        self._generation = number  # no process of another engine has the same

    @property
    def llm(self) -> LLM:
        assert self._known is not None, "it is known once a process was opened"
        return self._known

    def open(self) -> ProcessLink:
        """Start the next process, with as large a pool. Raises what `LLM` raises, or ModelChanged."""
        known, generation = self._known, self._generation
        pool_bytes = None if known is None else known.pool.num_pages * known.pool.page_bytes
        link = ProcessLink(self._launch(generation, pool_bytes), generation, known)
        self._known = known = known or link.llm
        if link.llm.model.id != known.model.id:
            link.process.end(0)
            raise ModelChanged("the model's files have changed: start the server again")
        return link

    def ended(self) -> None:
        """The process is gone."""
        self._generation += self._count
