"""Metrics under the names that vLLM gives them, so that dashboards made for it show this server.

The names are vLLM's, from its page "Production Metrics". What they mean is the same; ours have more (`metrics.py`).
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.step import StepReport

SHORT = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
LONG = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
FIRST = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
CHOICES = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")


class VllmCollector(Collector):
    """Reads the engine when it is scraped."""

    def __init__(self, llm: LLM, labels: tuple[str, str]) -> None:
        self._llm, self._labels = llm, labels

    def collect(self) -> Iterator[Metric]:
        engine, pool, index = self._llm.engine, self._llm.pool, self._llm.model.index
        used = max(0, pool.num_used - engine.cached_pages(pool))
        yield self._gauge("num_requests_running", "Choices that are generated", engine.num_running)
        yield self._gauge("num_requests_waiting", "Choices that wait", engine.num_waiting)
        # Pages that only a prefix index holds can be freed for any request, and vLLM counts them as free.
        yield self._gauge("kv_cache_usage_perc", "Pages held by requests / all, from 0 to 1", used / pool.num_pages)
        queried, hit = (0, 0) if index is None else (index.queried_tokens, index.hit_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix index", queried)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the prefix index", hit)
        yield self._counter("num_preemptions", "Choices that were preempted", engine.preemptions)
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "The pool", labels=["block_size", "num_gpu_blocks", "engine"]
        )
        info.add_metric([str(pool.page_size), str(pool.num_pages), self._labels[1]], 1)
        yield info

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._labels, value)
        return family


class VllmMetrics:
    """What `Metrics` counts, under vLLM's names."""

    def __init__(self, llm: LLM, name: str, registry: CollectorRegistry) -> None:
        """`name` is what clients call the model."""
        self._labels = labels = (name, "0")
        registry.register(VllmCollector(llm, labels))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, _LABELS, registry=registry, buckets=buckets)
            return made.labels(*labels)

        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:{name}", text, _LABELS, registry=registry).labels(*labels)

        self._prompt = counter("prompt_tokens", "Tokens of prompts")
        self._generated = counter("generation_tokens", "Tokens generated")
        self._success = Counter(
            "vllm:request_success", "Choices that are done", (*_LABELS, "finished_reason"), registry=registry
        )
        self._step = histogram("iteration_tokens_total", "Tokens that a step computes", TOKENS)
        self._ttft = histogram("time_to_first_token_seconds", "First token - arrival", FIRST)
        self._itl = histogram("inter_token_latency_seconds", "Every gap between tokens", SHORT)
        self._old_itl = histogram("time_per_output_token_seconds", "The former name of inter_token_latency", SHORT)
        self._tpot = histogram("request_time_per_output_token_seconds", "(last - first) / (n - 1)", SHORT)
        self._whole = histogram("e2e_request_latency_seconds", "End - arrival", LONG)
        self._queue = histogram("request_queue_time_seconds", "Start - arrival", LONG)
        self._inference = histogram("request_inference_time_seconds", "Last token - start", LONG)
        self._prefill = histogram("request_prefill_time_seconds", "First token - start", LONG)
        self._decode = histogram("request_decode_time_seconds", "Last token - first token", LONG)
        self._prompts = histogram("request_prompt_tokens", "Tokens of each prompt", TOKENS)
        self._answers = histogram("request_generation_tokens", "Tokens of each choice", TOKENS)
        self._most = histogram("request_params_max_tokens", "max_tokens of each prompt", TOKENS)
        self._choices = histogram("request_params_n", "Choices of each prompt", CHOICES)

    def step(self, report: StepReport) -> None:
        """One step of the engine."""
        self._step.observe(report.prefill + report.decode)

    def output_tokens(self, count: int) -> None:
        self._generated.inc(count)

    def finished(self, request: Request, error: Exception | None) -> None:
        """Count a prompt that is done, cancelled or failed."""
        timings = request.timings
        self._prompt.inc(request.prompt_tokens)
        if timings.tokens and timings.scheduled is not None:
            self._ttft.observe(timings.tokens[0] - timings.arrival)
            self._queue.observe(timings.scheduled - timings.arrival)
            self._prefill.observe(timings.tokens[0] - timings.scheduled)
            self._decode.observe(timings.tokens[-1] - timings.tokens[0])
            self._inference.observe(timings.tokens[-1] - timings.scheduled)
        if not timings.in_bulk:
            for gap in timings.itls:
                self._itl.observe(gap)
                self._old_itl.observe(gap)
            if timings.tpot is not None:
                self._tpot.observe(timings.tpot)
        reasons = ["error"] if error is not None else ["abort"] if request.cancelled else []
        for choice in request.choices:
            self._answers.observe(len(choice.output.ids))
            for reason in reasons or [choice.output.finish_reason or "stop"]:
                self._success.labels(*self._labels, reason).inc()
        self._prompts.observe(request.prompt_tokens)
        self._choices.observe(request.params.n)
        if request.params.max_tokens is not None:
            self._most.observe(request.params.max_tokens)
        if not reasons and timings.finished is not None:
            self._whole.observe(timings.finished - timings.arrival)
