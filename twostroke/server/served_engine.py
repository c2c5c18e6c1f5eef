"""The engine that a server serves: in a thread of this process, or in a process of its own (`engine_process`)."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from twostroke.api.llm import LLM
from twostroke.engine.engine import Engine
from twostroke.engine.engine_thread import EngineThread, OnStep, Publish
from twostroke.engine.request import Request
from twostroke.errors import EngineFailed, EngineStopped


class ServedEngine(Protocol):
    """Runs requests. Every method may be called from any thread.

    What `call` and `beside_steps` run is a function of a module, or a `partial` of one: it may run in another process.
    """

    @property
    def llm(self) -> LLM:
        """The model. One whose engine is elsewhere has no weights and no pool (`engine_process/hollow.py`)."""
        ...

    @property
    def parts(self) -> "Sequence[ServedEngine]":
        """The replicas that it is made of; itself if it is one."""
        ...

    @property
    def failure(self) -> EngineFailed | None:
        """Why it takes no more requests, if it has failed."""
        ...

    @property
    def alive(self) -> bool:
        """Whether it takes requests."""
        ...

    @property
    def restarting(self) -> bool:
        """Whether requests wait for a new process."""
        ...

    @property
    def step_age_s(self) -> float:
        """Seconds since it was last between two steps."""
        ...

    def start(self, publish: Publish, on_step: OnStep) -> None:
        """Begin. `publish` gets the updates of a step in one list; `on_step` its duration in seconds and its tokens."""
        ...

    def stop(self) -> None:
        """End what runs, and return once all is at rest."""
        ...

    def submit(self, request: Request, owner: Any) -> None:
        """Start a request; its updates carry the owner."""
        ...

    def cancel(self, request: Request) -> None:
        """End a request before the next step."""
        ...

    def call(self, action: Callable[[Engine], Any]) -> "Future[Any]":
        """Run something between two steps."""
        ...

    def beside_steps(self, action: Callable[[LLM], Any]) -> "Future[Any]":
        """Run something that takes long in another thread, while steps go on."""
        ...


class LocalEngine(EngineThread):
    """An `LLM` of this process, whose engine runs in a thread."""

    restarting = False

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm.engine)
        self.llm = llm
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="beside steps")

    @property
    def parts(self) -> "Sequence[LocalEngine]":
        return (self,)

    def stop(self) -> None:
        super().stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def beside_steps(self, action: Callable[[LLM], Any]) -> "Future[Any]":
        try:
            return self._pool.submit(action, self.llm)
        except RuntimeError:  # it has been stopped
            raise EngineStopped("the engine was stopped") from None
