"""The numbers of all models, each with the label `model`.

The label has as many values as the server has models. Series of a model exist once it was loaded, and stay.
"""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.server.models.served_models import ServedModels
from twostroke.server.observability.metrics import join_families


class ModelsCollector(Collector):
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
                    own = {} if family.name.startswith("vllm:") else {"model": model.name}  # vLLM's have model_name
                    join_families(joined, [family], own)
        yield from (loaded, loads, running, *joined.values())
