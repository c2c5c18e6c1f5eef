"""What Prometheus sees. Times are in seconds, by the definitions of `engine/timings.py`."""

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.api.llm import LLM
from twostroke.engine.engine import Engine
from twostroke.engine.request import Request
from twostroke.engine.step import StepReport
from twostroke.kv.pages import TIERS
from twostroke.server.observability.tier_metrics import TierCollector
from twostroke.server.observability.vllm_metrics import VllmMetrics

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


class EngineCollector(Collector):
    """Reads the engine when it is scraped. It reads single numbers, so any thread may do it."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def collect(self) -> Iterator[Metric]:
        engine: Engine = self._llm.engine
        pool, index = self._llm.pool, self._llm.model.index
        cached = engine.cached_pages(pool)
        pages = GaugeMetricFamily(
            "twostroke_kv_pages",
            "KV pages: free, in the prefix index (cached), or held by requests alone (used)",
            labels=["state"],
        )
        pages.add_metric(["used"], max(0, pool.num_used - cached))
        pages.add_metric(["cached"], cached)
        pages.add_metric(["free"], pool.num_free)
        yield pages
        requests = GaugeMetricFamily("twostroke_requests", "Choices (n per prompt) in the engine", labels=["state"])
        requests.add_metric(["running"], engine.num_running)
        requests.add_metric(["waiting"], engine.num_waiting)
        requests.add_metric(["arriving"], engine.num_arriving)
        yield requests
        queried, hit = (0, 0) if index is None else (index.queried_tokens, index.hit_tokens)
        yield _counter("prefix_tokens_queried", "Prompt tokens looked up in the prefix index", queried)
        yield _counter("prefix_tokens_hit", "Prompt tokens found in the prefix index", hit)
        yield _counter("preemptions", "Choices that gave up their pages and started again", engine.preemptions)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"twostroke_{name}", text, value=value)


class Metrics:
    """Every metric of one server, in its own registry."""

    def __init__(self, llm: LLM, vllm_name: str | None = None) -> None:
        """With `vllm_name`, what clients call the model, there are vLLM's names beside ours."""
        self.registry = registry = CollectorRegistry()
        registry.register(EngineCollector(llm))
        registry.register(TierCollector(llm))

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"twostroke_{name}", text, labels, registry=registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"twostroke_{name}", text, labels, registry=registry)

        self._ttft = histogram("time_to_first_token_seconds", "First token - arrival", LONG)
        self._itl = histogram("inter_token_latency_seconds", "Every gap between consecutive tokens", SHORT)
        self._tpot = histogram("time_per_output_token_seconds", "(last - first) / (n - 1)", SHORT)
        self._whole = histogram("request_seconds", "End - arrival", LONG)
        self._queue = histogram("queue_seconds", "Start - arrival", LONG)
        self._prefill = histogram("prefill_seconds", "First token - start", LONG)
        self._decode = histogram("decode_seconds", "Last token - first token", LONG)
        self._step = histogram("step_seconds", "A step of the engine", SHORT, "kind")
        self._predicted = histogram(
            "predicted_step_seconds", "What the same steps were expected to take (with --itl-ms)", SHORT, "kind"
        )
        self._batch = histogram("step_tokens", "Tokens that a step computes", TOKENS, "kind")
        self._tokens = counter("tokens", "Tokens of prompts, those of them computed, and tokens generated", "kind")
        self._cached = counter("cached_tokens", "Tokens of prompts that were found and not computed", "tier")
        self._requests = counter("finished_requests", "Prompts that are done, cancelled or failed", "outcome")
        self._aborted = counter("aborted_requests", "Prompts cancelled before their end (client gone, deadline)")
        self._rejected = counter("rejected_requests", "Requests refused because the queue is full", "reason")
        self._errors = counter("errors", "Prompts that failed", "error")
        self._vllm = None if vllm_name is None else VllmMetrics(llm, vllm_name, registry)
        self._tasks = Gauge("twostroke_tasks", "Tasks of the event loop, this answer's own included", registry=registry)

    def step(self, seconds: float, report: StepReport) -> None:
        """One step of the engine. Called by its thread."""
        kind = "mixed" if report.prefill and report.decode else "prefill" if report.prefill else "decode"
        self._step.labels(kind).observe(seconds)
        if report.predicted_s is not None:
            self._predicted.labels(kind).observe(report.predicted_s)
        if self._vllm is not None:
            self._vllm.step(report)
        for name, tokens in (("prefill", report.prefill), ("decode", report.decode)):
            if tokens:
                self._batch.labels(name).observe(tokens)

    def output_tokens(self, count: int) -> None:
        self._tokens.labels("output").inc(count)
        if self._vllm is not None:
            self._vllm.output_tokens(count)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def finished(self, request: Request, error: Exception | None) -> None:
        """Count a prompt that is done, cancelled or failed."""
        timings = request.timings
        if self._vllm is not None:
            self._vllm.finished(request, error)
        self._tokens.labels("prompt").inc(request.prompt_tokens)
        self._tokens.labels("computed").inc(max(0, request.prefilled_tokens - request.cached_tokens))
        for tier in TIERS:
            self._cached.labels(tier).inc(request.cached_by_tier[tier])
        outcome = "error" if error is not None else "aborted" if request.cancelled else "done"
        self._requests.labels(outcome).inc()
        if error is not None:
            self._errors.labels(type(error).__name__).inc()
        if outcome == "aborted":
            self._aborted.inc()
        if timings.scheduled is not None:
            self._queue.observe(timings.scheduled - timings.arrival)
        if timings.ttft is not None and timings.scheduled is not None:
            self._ttft.observe(timings.ttft)
            self._prefill.observe(timings.tokens[0] - timings.scheduled)
            self._decode.observe(timings.tokens[-1] - timings.tokens[0])
        if not timings.in_bulk:
            for gap in timings.itls:
                self._itl.observe(gap)
            if timings.tpot is not None:
                self._tpot.observe(timings.tpot)
        if outcome == "done" and timings.finished is not None:
            self._whole.observe(timings.finished - timings.arrival)

    def text(self) -> bytes:
        """In Prometheus' text format. Called on the event loop."""
        self._tasks.set(len(asyncio.all_tasks()))
        return generate_latest(self.registry)
