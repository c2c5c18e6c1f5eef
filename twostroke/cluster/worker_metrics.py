"""What a worker's `/metrics` has besides Twostroke's own: what it holds for other workers, and takes over from them."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.cluster.roles import DecodeRole, PrefillRole, Role


class WorkerMetrics(Collector):
    """Reads the roles when it is scraped."""

    def __init__(
        self,
        prefilling: PrefillRole | None,
        answering: Role,
        mismatches: Callable[[], dict[str, int]],
        registry: CollectorRegistry,
    ) -> None:
        """`mismatches`: what was refused besides values, since a model of another identity is behind it."""
        self._prefilling, self._answering, self._mismatches = prefilling, answering, mismatches
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        mismatches = self._mismatches()
        if self._prefilling is not None:
            sender = self._prefilling.sender
            mismatches["value_sent"] = sender.num_mismatched
            yield GaugeMetricFamily("twostroke_offered_values", "Values held for decode workers", sender.num_offers)
        if isinstance(self._answering, DecodeRole):
            receiver = self._answering.receiver
            mismatches["value_received"] = receiver.num_mismatched
            text = "Pages that a read given up still fills"
            yield GaugeMetricFamily("twostroke_quarantined_pages", text, receiver.num_quarantined)
            text = "Answers begun by other workers, by where most of the prompt's KV came from"
            taken = CounterMetricFamily("twostroke_taken_over", text, labels=["source"])
            for source, count in sorted(self._answering.taken_over.items()):
                taken.add_metric([source], count)
            yield taken
        text = "Answers, values and workers refused, since a model of another identity is behind them"
        refused = CounterMetricFamily("twostroke_identity_mismatches", text, labels=["what"])
        for what, count in sorted(mismatches.items()):
            refused.add_metric([what], count)
        yield refused
