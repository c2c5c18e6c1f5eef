"""A worker's life: it opens a model, registers with Dynamo, answers requests, and ends without losing any."""

import asyncio
import logging
import signal
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload, is_probe
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import Disconnected, EngineShutdown, InvalidArgument
from prometheus_client import ProcessCollector

from twostroke.api.async_llm import publish, updates
from twostroke.api.llm import LLM
from twostroke.cluster.chunks import chunk, final_chunk, usage
from twostroke.cluster.dynamo_request import DynamoRequest, parse_request
from twostroke.cluster.interleaving import ChoiceInterleaver
from twostroke.cluster.migration import BROKEN, PointerVersionMismatch
from twostroke.cluster.model_card import identity, write_card
from twostroke.cluster.registration import Registration, WorkerRefused
from twostroke.cluster.roles import AggregatedRole, DecodeRole, PrefillRole, Role
from twostroke.cluster.router_events import RouterEvents
from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.sender import LOOPBACK
from twostroke.cluster.wire.transport import Transport
from twostroke.cluster.worker_metrics import WorkerMetrics
from twostroke.engine.engine_thread import EngineThread, Update
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.engine.step import StepReport
from twostroke.errors import EngineStopped, InvalidRequest
from twostroke.server.grammar import Grammars
from twostroke.server.observability.metrics import Metrics

log = logging.getLogger(__name__)
ENDPOINT = "generate"
MODES = {
    "both": DisaggregationMode.AGGREGATED,
    "prefill": DisaggregationMode.PREFILL,
    "decode": DisaggregationMode.DECODE,
}


@dataclass(frozen=True)
class WorkerAddress:
    """Where a worker is found."""

    namespace: str = "twostroke"  # workers and front ends of one namespace find each other
    discovery: str = "file"  # how they do: "file", "etcd", ..
    events: str | None = None  # what carries KV events: "zmq", "nats"; None: the router gets none
    host: str = LOOPBACK  # where it listens for workers that fetch its values
    served_name: str | None = None  # what clients call the model; None for its own name
    cards: Path | None = None  # where model cards are written; None for this user's data


class DynamoWorker(LLMEngine):
    """An engine of Dynamo's (`dynamo.common.backend`). All methods belong to its event loop.

    Who opened the model closes it, once the worker has ended.
    """

    def __init__(
        self, llm: LLM, role: str, address: WorkerAddress, *, student: bool = False, transport: Transport | None = None
    ) -> None:
        """`role`: one of MODES. `student`, `transport`: see `roles`."""
        self.llm, self.role, self.address = llm, role, address
        self._prefilling = PrefillRole(llm, address.host, transport) if role == "prefill" else None
        self._answering = DecodeRole(llm, student, transport) if role == "decode" else AggregatedRole(llm)
        self.name = address.served_name or llm.name
        self._card, self._identity = write_card(llm, address.cards), identity(llm)[:8]
        self._grammars = Grammars(llm.tokenizer, llm.config.vocab_size)
        self._metrics = Metrics(llm)
        ProcessCollector(registry=self._metrics.registry)
        endpoint, card = f"{address.namespace}.{_component(role)}.{ENDPOINT}", f"{self._card.name} {student}"
        self._registration = Registration(endpoint, address.discovery, self.name, card)
        self._num_mismatched = 0  # answers that were begun by a model of another identity
        WorkerMetrics(self._prefilling, self._answering, self._mismatches, self._metrics.registry)
        self.failed = False  # whether it has ended of itself, so that it is to be started again
        self.refused: WorkerRefused | None = None  # why it may not join the workers that are there; None: it may
        self._thread = EngineThread(llm.engine)
        self._snapshots: Any = None
        self._router_events: RouterEvents | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LLMEngine, WorkerConfig]:
        raise InvalidRequest("start a worker by its command: twostroke worker")

    def config(self) -> WorkerConfig:
        return WorkerConfig(
            namespace=self.address.namespace,
            component=_component(self.role),
            endpoint=ENDPOINT,
            model_name=str(self._card),
            served_model_name=self.name,
            discovery_backend=self.address.discovery,
            event_plane=self.address.events,
            enable_kv_routing=self.address.events is not None,
            disaggregation_mode=MODES[self.role],
        )

    # Start and end ----------------------------------------------------------------------------------------------------

    async def start(self, worker_id: int) -> EngineConfig:
        llm = self.llm
        try:
            await self._registration.open()
        except WorkerRefused as refused:
            self.refused = refused
            raise
        self._thread.start(publish, self._stepped)
        self._registration.watch(worker_id, self._fail)
        return EngineConfig(
            model=str(self._card),
            served_model_name=self.name,
            runtime_data=self._registration.data,
            llm=LlmRegistration(
                context_length=llm.max_model_len,
                kv_cache_block_size=llm.pool.page_size,
                total_kv_blocks=llm.pool.num_pages,
                max_num_seqs=llm.engine.config.max_running,
                max_num_batched_tokens=llm.engine.config.max_step_tokens,
            ),
        )

    def leave_on_signals(self) -> None:
        """Note SIGTERM and Ctrl-C. Call it before Dynamo takes them over, which calls the handlers it finds."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._registration.leave())

    def _fail(self) -> None:
        """End, as at SIGTERM, with exit status 1: a supervisor starts this worker again."""
        self.failed = True
        signal.raise_signal(signal.SIGTERM)

    async def cleanup(self) -> None:
        await self._registration.close()
        router_events, self._router_events = self._router_events, None
        if router_events is not None:
            await asyncio.to_thread(router_events.close)
        if self._thread.alive:
            await asyncio.to_thread(self._thread.stop)  # its requests end with EngineStopped
        await asyncio.to_thread((self._prefilling or self._answering).close)

    async def is_quiescent(self) -> bool:
        return self._prefilling is None or self._prefilling.idle

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(self.llm.tokenizer.bos_id or 0)

    # Requests ---------------------------------------------------------------------------------------------------------

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        """The chunks of an answer, or of a prefill worker the one that names its value.

        A request that Dynamo drops is cancelled when its iterator is closed. If the front end has died, that is done
        outside of the event loop, so nothing here may wait while it ends.
        """
        try:
            parsed = await asyncio.to_thread(parse_request, request, context.id(), self.llm.generation, self._grammars)
            if is_probe(request):  # Dynamo looks whether this worker lives
                made = self._answer(AggregatedRole(self.llm), parsed, None)
            elif self._prefilling is not None:
                made = self._prefill(self._prefilling, parsed)
            else:
                made = self._answer(
                    self._answering, parsed, (request.get("prefill_result") or {}).get("disaggregated_params")
                )
            async with aclosing(made) as chunks:
                async for one in chunks:
                    yield one
        except InvalidRequest as error:
            raise InvalidArgument(str(error)) from error
        except EngineStopped as error:
            if self._thread.failure is not None:
                self._fail()  # a worker whose engine has failed is of no use
            raise EngineShutdown(str(error)) from error  # another worker takes over
        except PointerVersionMismatch as error:  # a worker of that version may have it
            self._num_mismatched += 1
            log.warning("%s", error)
            raise Disconnected(str(error)) from error
        except WireError as error:  # a student's value did not come: another prefill worker may send it
            raise Disconnected(str(error)) from error

    async def _answer(
        self, role: Role, parsed: DynamoRequest, handed: Mapping[str, Any] | None
    ) -> AsyncGenerator[dict[str, Any]]:
        if parsed.identity not in (None, self._identity):
            self._num_mismatched += 1
            log.warning("an answer was not continued: its worker's model has another identity (weights, or kernels)")
            raise Disconnected("this answer was begun by a model of another identity")  # another worker may have it
        request, interleaver = await asyncio.to_thread(_begun, role, parsed, handed)
        generated, pointer = len(parsed.given), parsed.migration_pointer(self._identity)

        def made(token: Token, pointer: dict[str, str]) -> dict[str, Any]:
            one = chunk(token, self.llm.tokenizer, pointer)
            if token.finish_reason is not None:
                one["completion_usage"] = usage(len(parsed.prompt), generated, request.cached_tokens)
            if interleaver.left:  # Dynamo's adapter ends the stream at the first reason
                one.pop("finish_reason", None)
            return one

        finished = False
        try:
            async with aclosing(self._updates(request)) as news:
                async for update in news:
                    for token in update.tokens:
                        for due in interleaver.push(token):
                            generated += 1
                            finished = not interleaver.left
                            yield made(due, pointer)
                            if due.finish_reason == "length" and due.index + 1 != parsed.params.max_tokens:
                                pointer = BROKEN  # its tokens alone do not say that it has ended
            for due in interleaver.rest():
                generated += 1
                yield made(due, BROKEN)
        finally:
            role.ended(handed)
        if not finished:  # as where the last token was delivered by a worker that died
            yield final_chunk(request.choices[0].output.finish_reason or "stop")

    async def _prefill(self, role: PrefillRole, parsed: DynamoRequest) -> AsyncGenerator[dict[str, Any]]:
        request, offer = await asyncio.to_thread(role.request, parsed)
        handed = await asyncio.to_thread(role.handed, parsed, offer)
        try:
            # At once: the decode worker takes what is computed while the rest is. The token is its to sample.
            yield final_chunk("length") | {
                "disaggregated_params": handed,
                "worker_trace_link": parsed.migration_pointer(self._identity),
            }
            async with aclosing(self._updates(request)) as news:
                async for _ in news:
                    pass
        finally:
            role.ended(request, offer)

    async def _updates(self, request: Request) -> AsyncGenerator[Update]:
        async with aclosing(updates(self._thread, [request])) as news:
            async for update in news:
                if update.tokens:
                    self._metrics.output_tokens(len(update.tokens))
                if update.done:
                    self._metrics.finished(update.request, update.error)
                yield update

    # What is told -----------------------------------------------------------------------------------------------------

    async def kv_event_sources(self) -> list[KvEventSource]:
        if self.llm.model.index is None:
            return []
        self._router_events = RouterEvents(self.llm)
        return [ZmqSource(self._router_events.endpoint)]

    def _mismatches(self) -> dict[str, int]:
        return {"migration": self._num_mismatched, "discovery": self._registration.num_mismatched}

    async def register_prometheus(self, metrics: Any) -> None:
        register_engine_registry(metrics, self._metrics.registry)

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._snapshots = publisher

    def _stepped(self, seconds: float, report: StepReport) -> None:
        """Called by the engine's thread."""
        self._metrics.step(seconds, report)
        if self._snapshots is not None:
            pool, index = self.llm.pool, self.llm.model.index
            rate = index.hit_tokens / index.queried_tokens if index is not None and index.queried_tokens else None
            used = pool.num_used / pool.num_pages
            self._snapshots.publish(0, ComponentSnapshot(pool.num_used, pool.num_pages, used, 0, rate))


def _component(role: str) -> str:
    return "prefill" if role == "prefill" else "backend"


def _begun(role: Role, parsed: DynamoRequest, handed: Mapping[str, Any] | None) -> tuple[Request, ChoiceInterleaver]:
    """The request for the engine, behind what another worker has made of it; and whose turn it is to send a token."""
    request = role.request(parsed, handed)
    return request, parsed.continued(request)
