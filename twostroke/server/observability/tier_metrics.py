"""What Prometheus sees of the tiers: what went in and out of each, what did not and why, and how full it is."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.api.llm import LLM
from twostroke.kv.tiers.counters import TierCounts

# What `tiers.counters` counts: each is there from the start, as 0, so that an alert can watch it.
_NOT_KEPT = ("corrupt", "foreign", "full", "evicted", "second_touch", "near", "budget", "queue")
REASONS = (*_NOT_KEPT, "slow", "late", "error", "open")


class TierCollector(Collector):
    """Reads the tiers when it is scraped. Nothing here waits for a disk or a server."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        tiers = self._llm.tiers
        stores = {store.tier: store.counters.read() for store in tiers.stores}
        host = {"host": tiers.host_counters.read()} if tiers.host_bytes else {}
        yield from _moved(host | stores)
        yield _snapshots(stores)
        yield from _looked_up(host | stores)
        yield from self._room()

    def _room(self) -> Iterator[Metric]:
        tiers, index = self._llm.tiers, self._llm.model.index
        used = _gauge("used_bytes", "Bytes that a tier takes, where it is known")
        most = _gauge("limit_bytes", "Bytes that a tier may take, where it is known")
        waiting = _gauge("waiting_bytes", "Bytes that wait to be written to a tier")
        answering = _gauge("answering", "1 while a tier is asked; 0 after failures, until it answers again")
        if tiers.host_bytes:
            used.add_metric(["host"], 0 if index is None else index.host.used_bytes)
            most.add_metric(["host"], tiers.host_bytes)
        for store in tiers.stores:
            for family, count in ((used, store.used_bytes), (most, store.most_bytes)):
                if count is not None:
                    family.add_metric([store.tier], count)
            waiting.add_metric([store.tier], tiers.write_queues[store.tier].size)
            answering.add_metric([store.tier], store.answering)
        yield from (used, most, waiting, answering)


def _moved(readings: dict[str, TierCounts]) -> Iterator[Metric]:
    """Pages, bytes and seconds by direction: "out" is away from the pool, "in" is back."""
    pages = _counter("pages", "KV pages that moved: out of the pool, or in again", "direction")
    size = _counter("bytes", "Bytes that moved", "direction")
    seconds = _counter("seconds", "Seconds that this took", "direction")
    for tier, one in readings.items():
        for family, into, out in (
            (pages, one.pages_in, one.pages_out),
            (size, one.bytes_in, one.bytes_out),
            (seconds, one.seconds_in, one.seconds_out),
        ):
            family.add_metric([tier, "in"], into)
            family.add_metric([tier, "out"], out)
    yield from (pages, size, seconds)


def _snapshots(readings: dict[str, TierCounts]) -> Metric:
    """Snapshots by direction, as `_moved` counts pages."""
    snapshots = _counter("snapshots", "Snapshots of recurrent layers all of whose pages moved", "direction")
    for tier, one in readings.items():
        snapshots.add_metric([tier, "in"], one.snapshots_in)
        snapshots.add_metric([tier, "out"], one.snapshots_out)
    return snapshots


def _looked_up(readings: dict[str, TierCounts]) -> Iterator[Metric]:
    lookups = _counter("lookups", "KV pages that prompts looked for in a tier: all that are in no nearer one", "result")
    skipped = _counter("skipped_pages", "KV pages that were not read, not written or deleted, by reason", "reason")
    for tier, one in readings.items():
        lookups.add_metric([tier, "hit"], one.hits)
        lookups.add_metric([tier, "miss"], one.misses)
        for reason, count in (dict.fromkeys(REASONS, 0) | one.reasons).items():
            skipped.add_metric([tier, reason], count)
    yield from (lookups, skipped)


def _counter(name: str, text: str, label: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"twostroke_tier_{name}", text, labels=["tier", label])


def _gauge(name: str, text: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"twostroke_tier_{name}", text, labels=["tier"])
