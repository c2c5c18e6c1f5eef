"""The numbers of all models, each with the label `model`, and those of the server itself.

The label has as many values as the server has models. Series of a model exist once it was loaded, and stay.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, ProcessCollector, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostroke.server.models.served_models import ServedModels
from twostroke.server.observability.metrics import STATUSES, join_families
from twostroke.server.observability.tenant_metrics import TenantCollector
from twostroke.server.tenants.api_keys import ApiKeys

OF_THE_SERVER = ("process_", "twostroke_http_responses", "twostroke_tasks", "twostroke_key_")


class ServerMetrics:
    """What is counted of the server and of no model."""

    def __init__(self, keys: ApiKeys) -> None:
        disable_created_metrics()
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(TenantCollector(keys))
        self._responses = Counter("twostroke_http_responses", "HTTP responses", ["status"], registry=self.registry)
        for status in STATUSES:
            self._responses.labels(status)

    def responded(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(status).inc()


class _ModelsCollector(Collector):
    """The families of all models, joined by name."""

    def __init__(self, models: ServedModels) -> None:
        self._models = models

    def collect(self) -> Iterator[Metric]:
        loaded = GaugeMetricFamily("twostroke_model_loaded", "Whether a model is loaded", labels=["model"])
        loads = CounterMetricFamily("twostroke_model_loads", "How often a model was loaded", labels=["model"])
        running = GaugeMetricFamily("twostroke_model_calls", "Calls of a model", labels=["model", "state"])
        joined: dict[str, Metric] = {}
        for model in self._models.all.values():
            loaded.add_metric([model.name], model.loaded)
            loads.add_metric([model.name], model.loads)
            running.add_metric([model.name, "running"], model.running)
            running.add_metric([model.name, "waiting"], len(model.waiting))
            if model.engine is not None:
                for family in model.engine.metrics.exported.collect():
                    if not family.name.startswith(OF_THE_SERVER):
                        own = {} if family.name.startswith("vllm:") else {"model": model.name}  # vLLM's have model_name
                        join_families(joined, [family], own)
        yield from (loaded, loads, running, *joined.values())


def exposition(models: ServedModels, server: ServerMetrics, accept: str) -> tuple[bytes, str]:
    """All metrics and their media type: Prometheus' text or OpenMetrics, as the header Accept asks."""
    registry = CollectorRegistry()
    registry.register(server.registry)
    registry.register(_ModelsCollector(models))
    encode, media_type = choose_encoder(accept)
    return encode(registry), media_type
