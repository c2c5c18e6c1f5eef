"""What a worker's `/metrics` has besides Twostroke's own: what it holds for other workers, and takes over from them."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.cluster.roles import DecodeRole, PrefillRole, Role


class WorkerMetrics(Collector):
    """Reads the roles when it is scraped."""

    def __init__(self, prefilling: PrefillRole | None, answering: Role, registry: CollectorRegistry) -> None:
        self._prefilling, self._answering = prefilling, answering
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        if self._prefilling is not None:
            offered = self._prefilling.sender.num_offers
            yield GaugeMetricFamily("twostroke_offered_values", "Values held for decode workers", offered)
        if isinstance(self._answering, DecodeRole):
            held = self._answering.receiver.num_quarantined
            yield GaugeMetricFamily("twostroke_quarantined_pages", "Pages that a read given up still fills", held)
            text = "Answers begun by other workers, by where most of the prompt's KV came from"
            taken = CounterMetricFamily("twostroke_taken_over", text, labels=["source"])
            for source, count in sorted(self._answering.taken_over.items()):
                taken.add_metric([source], count)
            yield taken
