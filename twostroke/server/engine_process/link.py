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
from twostroke.server.engine_process.launch import Launched
from twostroke.server.engine_process.messages import Failed, Opened, Release

END_S = 5.0  # seconds that a process may take to end once its connection is closed


class ProcessLink:
    """One process and what goes to it: a thread sends, so that nobody waits for a process that is busy."""

    def __init__(self, process: Launched, generation: int, known: LLM | None = None) -> None:
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
                    self.process.pipe.send_bytes(data)
                del message  # a value that it names is not kept while nothing is sent
