"""A worker's place in Dynamo's discovery: whether workers like it are there, and whether it is still there itself.

Dynamo's front end refuses a worker whose card differs from the first one's, and forgets a worker that has paused for
longer than its lease (10 s). In both cases the worker's process goes on, ready and without a request. So a worker looks
for itself. The means are Dynamo's client of its own endpoint, so this holds for every kind of discovery.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable
from typing import Any

from dynamo.runtime import DistributedRuntime  # pyright: ignore[reportMissingImports]

from twostroke.errors import TwostrokeError

log = logging.getLogger(__name__)

HEALTH_PORT = "DYN_SYSTEM_PORT"
NAME, CARD = "twostroke_name", "twostroke_card"  # keys of the data that a worker registers
LEASE_S = 15.0  # seconds in which a worker that has died is forgotten: Dynamo's leases have 10
YOUNG_S = 30.0  # seconds in which a worker that has another kind beside it ends: none was there when it began
ANSWER_S = 0.5  # seconds in which discovery is read
LOOK_S = 1.0
MISSED = 3  # looks in a row that do not find this worker


class WorkerRefused(TwostrokeError):
    """Other workers of this name have another model, so the front end would give this one no requests."""


class Registration:
    """What a worker registers, and what it sees of the others. All methods belong to the worker's event loop."""

    def __init__(self, endpoint: str, discovery: str, name: str, card: str) -> None:
        """`endpoint`: "namespace.component.endpoint". `card`: equal for workers that may stand for each other."""
        self.data = {NAME: name, CARD: f"{name} {card}"}  # what is registered
        self.num_mismatched = 0  # workers of this name with another card that were seen
        self._endpoint, self._discovery, self._leaving = endpoint, discovery, False
        self._client: Any = None
        self._watching: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Look for the other workers. Raises WorkerRefused: one of this name has another card."""
        port = os.environ.pop(HEALTH_PORT, None)  # the worker's own runtime listens there
        try:
            runtime = DistributedRuntime(asyncio.get_running_loop(), self._discovery, "tcp")
        finally:
            if port is not None:
                os.environ[HEALTH_PORT] = port
        self._client = await runtime.endpoint(self._endpoint).client()
        until = time.monotonic() + LEASE_S  # one that has died is forgotten by then
        while others := await self._others():
            if time.monotonic() > until:
                raise self._refused(others)
            await asyncio.sleep(LOOK_S)

    def watch(self, worker_id: int, end: Callable[[], None]) -> None:
        """From now on, call `end` once if nobody will find this worker any more."""
        self._watching = asyncio.create_task(self._watch(worker_id, end))

    def leave(self) -> None:
        """The worker is told to end, and leaves discovery by itself. A signal's handler may call it."""
        self._leaving = True

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()

    async def _watch(self, worker_id: int, end: Callable[[], None]) -> None:
        while worker_id not in self._client.instance_ids():
            await asyncio.sleep(LOOK_S)
        young_until, known, others, missed = time.monotonic() + YOUNG_S, set[int](), set[int](), 0
        while missed < MISSED:
            await asyncio.sleep(LOOK_S)
            if self._leaving:
                return
            if worker_id not in self._client.instance_ids():
                missed += 1
                continue
            missed = 0
            before, others = others, await self._others()
            # Twice in a row: between the two readings of one look, a worker like this one may have come or gone.
            if worker_id not in others and (new := others & before - known):
                known |= new
                self.num_mismatched += len(new)
                log.warning("%s", self._refused(new))
                if time.monotonic() < young_until:  # they began together: nobody knows whom the front end has refused
                    end()
                    return
        log.error(
            "discovery has lost this worker, as after a pause longer than its lease: it ends, to be started again"
        )
        end()

    async def _others(self) -> set[int]:
        """The workers of this name that have another card. This one is among them if cards could not be read."""
        named = await self._registered(NAME)
        return named - await self._registered(CARD) if named else named

    async def _registered(self, key: str) -> set[int]:
        """The workers that have registered the same for a key."""
        try:
            # Dynamo's own limit does not always hold. `wait_for` of Python 3.11 may lose the cancellation of `close`.
            async with asyncio.timeout(2 * ANSWER_S):
                found = await self._client.wait_for_instances_by_runtime_data(key, self.data[key], 1, ANSWER_S)
        except Exception:  # none has
            return set()
        return set(found) & set(self._client.instance_ids())

    def _refused(self, others: set[int]) -> WorkerRefused:
        return WorkerRefused(
            f"workers called {self.data[NAME]!r} are here ({len(others)}) with other weights, another kernels' variant,"
            " page size or length, and answers would mix: give one kind another --served-name or --namespace, or end it"
        )
