"""What Prometheus sees of API keys, by their names: those that the file has now, and no other."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.server.tenants.api_keys import ApiKeys
from twostroke.server.tenants.tenant import KINDS, REASONS


class TenantCollector(Collector):
    """Reads what each name has used when it is scraped. Every series is there from the start, as 0."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        calls = _counter("calls", "Calls (POST) that were let in")
        flight = GaugeMetricFamily("twostroke_key_in_flight", "Calls (POST) in flight, by key", labels=["key"])
        refused = _counter("refused_calls", "Calls that a limit has refused", "reason")
        tokens = _counter("tokens", "Tokens of prompts, those of them found and not computed, and generated", "kind")
        for tenant in self._keys.tenants:
            calls.add_metric([tenant.name], tenant.calls)
            flight.add_metric([tenant.name], tenant.in_flight)
            for reason in REASONS:
                refused.add_metric([tenant.name, reason], tenant.refused[reason])
            for kind in KINDS:
                tokens.add_metric([tenant.name, kind], tenant.tokens_used[kind])
        yield from (calls, flight, refused, tokens)


def _counter(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"twostroke_key_{name}", f"{text}, by key", labels=["key", *labels])
