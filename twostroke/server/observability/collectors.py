"""What is read when Prometheus asks: the engine, its tiers, and what each API key has used."""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.api.llm import LLM
from twostroke.kv.states import num_snapshots
from twostroke.kv.tiers.counters import TierCounts
from twostroke.server.tenants.api_keys import ApiKeys
from twostroke.server.tenants.tenant import KINDS, REASONS

# What `tiers.counters` counts: each is there from the start, as 0, so that an alert can watch it.
_NOT_KEPT = ("corrupt", "foreign", "full", "evicted", "second_touch", "near", "budget", "queue")
TIER_REASONS = (*_NOT_KEPT, "slow", "late", "error", "open")


def engine_families(llm: LLM) -> list[Metric]:
    """What is read where the engine is: single numbers, so any thread may do it, and nothing waits for a tier."""
    return [*_engine(llm), *_tiers(llm), *ProcessCollector("twostroke_engine", registry=None).collect()]


def _engine(llm: LLM) -> Iterator[Metric]:
    engine = llm.engine
    pool, index, memory = llm.pool, llm.model.index, llm.memory
    cached = engine.cached_pages(pool)
    # Pages that only a prefix index holds can be freed for any request, and vLLM counts them as free.
    used = max(0, pool.num_used - cached)
    pages = {"used": used, "cached": cached, "free": pool.num_free}
    told = "KV pages: free, in the prefix index (cached), or held by requests alone (used)"
    yield _gauges("kv_pages", told, "state", pages)
    choices = {"running": engine.num_running, "waiting": engine.num_waiting, "arriving": engine.num_arriving}
    yield _gauges("requests", "Choices (n per prompt) in the engine", "state", choices)
    yield _gauge("kv_usage_ratio", "KV pages held by requests / all pages", used / pool.num_pages)
    yield _gauges("memory_planned_bytes", "What was added up at start, by what it is for", "part", memory.parts)
    yield _gauge("memory_limit_bytes", "What the process could still take at start", memory.limit_bytes)
    queried, hit = (0, 0) if index is None else (index.queried_tokens, index.hit_tokens)
    yield _counter("prefix_tokens_queried", "Prompt tokens looked up in the prefix index", queried)
    yield _counter("prefix_tokens_hit", "Prompt tokens found in the prefix index", hit)
    told = "Prompt tokens in the prefix index that no hit had: a window or a snapshot of states was missing"
    yield _counter("prefix_tokens_unusable", told, 0 if index is None else index.unusable_tokens)
    snapshots = num_snapshots(pool)
    yield _gauge("kv_snapshots", "Snapshots of states of recurrent layers in the pool", snapshots)
    size = snapshots * pool.snapshot_pages * pool.page_bytes
    yield _gauge("kv_snapshot_bytes", "Bytes of the pages of these snapshots", size)
    evicted = 0 if index is None else index.evicted_snapshots
    yield _counter("kv_snapshots_evicted", "Snapshots that left the prefix index to make room", evicted)
    yield _counter("preemptions", "Choices that gave up their pages and started again", engine.preemptions)
    told = "Tokens computed again of values that were cut back to where windows or snapshots were given back"
    yield _counter("window_recomputed_tokens", told, pool.recomputed_tokens)


def _tiers(llm: LLM) -> Iterator[Metric]:
    """What went in ("out" is away from the pool) and out of each, what did not and why, and how full it is."""
    tiers, index = llm.tiers, llm.model.index
    stores = {store.tier: store.counters.read() for store in tiers.stores}
    every = ({"host": tiers.host_counters.read()} if tiers.host_bytes else {}) | stores

    def counters(
        name: str,
        text: str,
        label: str,
        of: Mapping[str, TierCounts],
        values: Callable[[TierCounts], Mapping[str, float]],
    ) -> Metric:
        made = CounterMetricFamily(f"twostroke_tier_{name}", text, labels=["tier", label])
        for tier, one in of.items():
            for key, value in values(one).items():
                made.add_metric([tier, key], value)
        return made

    told = "KV pages that moved: out of the pool, or in again"
    yield counters("pages", told, "direction", every, lambda one: {"in": one.pages_in, "out": one.pages_out})
    told = "Bytes that moved"
    yield counters("bytes", told, "direction", every, lambda one: {"in": one.bytes_in, "out": one.bytes_out})
    told = "Seconds that this took"
    yield counters("seconds", told, "direction", every, lambda one: {"in": one.seconds_in, "out": one.seconds_out})
    told = "Snapshots of recurrent layers all of whose pages moved"
    yield counters(
        "snapshots", told, "direction", stores, lambda one: {"in": one.snapshots_in, "out": one.snapshots_out}
    )
    told = "KV pages that prompts looked for in a tier: all that are in no nearer one"
    yield counters("lookups", told, "result", every, lambda one: {"hit": one.hits, "miss": one.misses})
    told = "KV pages that were not read, not written or deleted, by reason"
    yield counters("skipped_pages", told, "reason", every, lambda one: dict.fromkeys(TIER_REASONS, 0) | one.reasons)

    used: dict[str, int | None] = {store.tier: store.used_bytes for store in tiers.stores}
    most: dict[str, int | None] = {store.tier: store.most_bytes for store in tiers.stores}
    if tiers.host_bytes:
        used["host"], most["host"] = 0 if index is None else index.host.used_bytes, tiers.host_bytes
    yield _gauges("tier_used_bytes", "Bytes that a tier takes, where it is known", "tier", used)
    yield _gauges("tier_limit_bytes", "Bytes that a tier may take, where it is known", "tier", most)
    waiting = {store.tier: tiers.write_queues[store.tier].size for store in tiers.stores}
    yield _gauges("tier_waiting_bytes", "Bytes that wait to be written to a tier", "tier", waiting)
    told = "1 while a tier is asked; 0 after failures, until it answers again"
    yield _gauges("tier_answering", told, "tier", {store.tier: store.answering for store in tiers.stores})


class TenantCollector(Collector):
    """Reads what each name has used when it is scraped. Every series is there from the start, as 0."""

    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        calls = _by_key("calls", "Calls (POST) that were let in")
        flight = GaugeMetricFamily("twostroke_key_in_flight", "Calls (POST) in flight, by key", labels=["key"])
        refused = _by_key("refused_calls", "Calls that a limit has refused", "reason")
        tokens = _by_key("tokens", "Tokens of prompts, those of them found and not computed, and generated", "kind")
        for tenant in self._keys.tenants:
            calls.add_metric([tenant.name], tenant.calls)
            flight.add_metric([tenant.name], tenant.in_flight)
            for reason in REASONS:
                refused.add_metric([tenant.name, reason], tenant.refused[reason])
            for kind in KINDS:
                tokens.add_metric([tenant.name, kind], tenant.tokens_used[kind])
        yield from (calls, flight, refused, tokens)


def _by_key(name: str, text: str, *labels: str) -> CounterMetricFamily:
    return CounterMetricFamily(f"twostroke_key_{name}", f"{text}, by key", labels=["key", *labels])


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"twostroke_{name}", text, value=value)


def _gauges(name: str, text: str, label: str, values: Mapping[str, float | None]) -> Metric:
    """A gauge for each value that is known."""
    made = GaugeMetricFamily(f"twostroke_{name}", text, labels=[label])
    for key, value in values.items():
        if value is not None:
            made.add_metric([key], value)
    return made


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"twostroke_{name}", text, value=value)
