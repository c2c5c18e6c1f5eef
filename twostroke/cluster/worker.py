"""A worker's life: it opens a model, registers with Dynamo, answers requests, and ends without losing any."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.metrics import register_engine_registry
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, PushSource
from dynamo.common.constants import DisaggregationMode
from dynamo.llm.exceptions import EngineShutdown, InvalidArgument

from twostroke.async_llm import publish, updates
from twostroke.cluster.asked import Asked, read
from twostroke.cluster.card import write_card
from twostroke.cluster.chunks import chunk, ending, usage
from twostroke.cluster.events import Events, Publisher
from twostroke.cluster.link import link
from twostroke.engine.engine import StepReport
from twostroke.engine.request import Request
from twostroke.engine.thread import EngineThread, Update
from twostroke.errors import EngineStopped, InvalidRequest
from twostroke.llm import LLM
from twostroke.server.grammar import Grammars
from twostroke.server.observability.metrics import Metrics

log = logging.getLogger(__name__)
ROLES = {"both": DisaggregationMode.AGGREGATED}


@dataclass(frozen=True)
class Place:
    """Where a worker is found.

    Attributes:
        namespace: workers and front ends of one namespace find each other.
        discovery: how they do: "file", "etcd", ...
        events: what carries KV events: "zmq", "nats"; None: the router gets none.
        served_name: what clients call the model; None for its own name.
        cards: where model cards are written; None for this user's data.
    """

    namespace: str = "twostroke"
    discovery: str = "file"
    events: str | None = None
    served_name: str | None = None
    cards: Path | None = None


class Worker(LLMEngine):
    """An engine of Dynamo's (`dynamo.common.backend`). All methods belong to its event loop.

    Who opened the model closes it, once the worker has ended.
    """

    def __init__(self, llm: LLM, role: str, place: Place) -> None:
        self.llm, self.role, self.place = llm, role, place
        self.name = place.served_name or llm.name
        self._card = write_card(llm, place.cards)
        self._grammars = Grammars(llm.tokenizer, llm.config.vocab_size)
        self._metrics = Metrics(llm)
        self._thread = EngineThread(llm.engine, publish, self._stepped)
        self._snapshots: Any = None
        self._events: Events | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[LLMEngine, WorkerConfig]:
        raise InvalidRequest("start a worker by its command: twostroke worker")

    def config(self) -> WorkerConfig:
        return WorkerConfig(
            namespace=self.place.namespace,
            component="backend",
            model_name=str(self._card),
            served_model_name=self.name,
            discovery_backend=self.place.discovery,
            event_plane=self.place.events,
            enable_kv_routing=self.place.events is not None,
            disaggregation_mode=ROLES[self.role],
        )

    # Start and end ----------------------------------------------------------------------------------------------------

    async def start(self, worker_id: int) -> EngineConfig:
        llm = self.llm
        self._thread.start()
        return EngineConfig(
            model=str(self._card),
            served_model_name=self.name,
            llm=LlmRegistration(
                context_length=llm.max_model_len,
                kv_cache_block_size=llm.pool.page_size,
                total_kv_blocks=llm.pool.num_pages,
                max_num_seqs=llm.engine.config.max_running,
                max_num_batched_tokens=llm.engine.config.max_step_tokens,
            ),
        )

    async def cleanup(self) -> None:
        if self._events is not None:
            self._events.close()
            self._events = None
        if self._thread.alive:
            await asyncio.to_thread(self._thread.stop)  # its requests end with EngineStopped

    async def health_check_payload(self) -> dict[str, Any] | None:
        return build_health_check_payload(self.llm.tokenizer.bos_id or 0)

    # Requests ---------------------------------------------------------------------------------------------------------

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Any]:
        """The chunks of an answer. A request that Dynamo drops is cancelled when its iterator is closed."""
        try:
            asked, prepared = await asyncio.to_thread(self._prepare, request, context.id())
            async with aclosing(self._answer(asked, prepared)) as chunks:
                async for made in chunks:
                    yield made
        except InvalidRequest as error:
            raise InvalidArgument(str(error)) from error
        except EngineStopped as error:
            raise EngineShutdown(str(error)) from error  # another worker takes over

    def _prepare(self, message: Mapping[str, Any], id: str) -> tuple[Asked, Request]:
        asked = read(message, id, self.llm.generation, self._grammars)
        return asked, asked.request(self.llm)

    async def _answer(self, asked: Asked, request: Request) -> AsyncGenerator[dict[str, Any]]:
        pointer, generated, ended = link(asked.prompt), len(asked.given), set[int]()
        async with aclosing(updates(self._thread, [request])) as news:
            async for update in news:
                self._count(update)
                for token in update.tokens:
                    generated += 1
                    made = chunk(token, self.llm.tokenizer, pointer)
                    if token.finish_reason is not None:
                        ended.add(token.choice)
                        made["completion_usage"] = usage(len(asked.prompt), generated, request.cached_tokens)
                    yield made
        for choice in request.choices:
            if choice.index not in ended:  # as where the last token was delivered by a worker that died
                yield ending(choice.track.finish_reason or "stop", choice.index)

    # What is told -----------------------------------------------------------------------------------------------------

    async def kv_event_sources(self) -> list[KvEventSource]:
        return [] if self.llm.model.index is None else [PushSource(on_ready=self._follow)]

    def _follow(self, publisher: Publisher) -> None:
        assert self.llm.model.index is not None
        self._events = Events(self.llm.model.index, publisher)

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

    def _count(self, update: Update) -> None:
        if update.tokens:
            self._metrics.output_tokens(len(update.tokens))
        if update.done:
            self._metrics.finished(update.request, update.error)
