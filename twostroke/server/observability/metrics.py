"""What Prometheus sees. Times are in seconds, by the definitions of `engine/timings.py`.

Each number has one place here. `vllm_names.py` gives the same numbers under vLLM's names.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from fastapi import Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, disable_created_metrics
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from twostroke import errors
from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.step import StepReport
from twostroke.kv.pages import TIERS
from twostroke.server.observability.collectors import TenantCollector, engine_families
from twostroke.server.observability.outcome import FINISH_REASONS, OUTCOMES, finish_reasons, outcome
from twostroke.server.observability.vllm_names import VllmNames
from twostroke.server.tenants.api_keys import ApiKeys

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5)
LONG = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
CHOICES = (1, 2, 5, 10, 20, 50, 100)
STEP_KINDS = ("prefill", "decode", "mixed")
# The statuses that routes and the middleware give, and 499 for a client that has gone.
STATUSES = (200, 304, 307, 400, 401, 403, 404, 405, 408, 409, 413, 422, 429, 499, 500, 503, 504)
FAILURES = tuple(sorted(name for name, kind in vars(errors).items() if isinstance(kind, type)))


@dataclass(frozen=True)
class RequestHistogram:
    """A histogram over requests that have ended, and the values (most often one) that each adds to it."""

    name: str
    help: str
    buckets: tuple[float, ...]
    values: Callable[[Request], Iterable[float]]


def _moments(request: Request) -> dict[str, float | None]:
    """When things have happened, in seconds."""
    times, completed = request.timings, not request.cancelled and request.error is None
    tokens = times.tokens if times.scheduled is not None else ()
    first, last = (tokens[0], tokens[-1]) if tokens else (None, None)
    ends = {"first": first, "last": last, "completed": times.finished if completed else None}
    return {"arrival": times.arrival, "scheduled": times.scheduled, **ends}


def _between(start: str, stop: str) -> Callable[[Request], list[float]]:
    """The seconds between two moments, where both have come."""

    def values(request: Request) -> list[float]:
        moments = _moments(request)
        first, last = moments[start], moments[stop]
        return [] if first is None or last is None else [last - first]

    return values


def _gaps(request: Request) -> list[float]:
    return [] if request.timings.in_bulk else request.timings.itls


def _tpot(request: Request) -> list[float]:
    tpot = request.timings.tpot
    return [] if request.timings.in_bulk or tpot is None else [tpot]


REQUEST_HISTOGRAMS = (
    RequestHistogram("time_to_first_token_seconds", "First token - arrival", LONG, _between("arrival", "first")),
    RequestHistogram("inter_token_latency_seconds", "Every gap between consecutive tokens", SHORT, _gaps),
    RequestHistogram("time_per_output_token_seconds", "(last - first) / (n - 1)", SHORT, _tpot),
    RequestHistogram(
        "request_seconds", "End - arrival, of requests that were completed", LONG, _between("arrival", "completed")
    ),
    RequestHistogram("queue_seconds", "Start - arrival", LONG, _between("arrival", "scheduled")),
    RequestHistogram("prefill_seconds", "First token - start", LONG, _between("scheduled", "first")),
    RequestHistogram("decode_seconds", "Last token - first token", LONG, _between("first", "last")),
    RequestHistogram("inference_seconds", "Last token - start", LONG, _between("scheduled", "last")),
    RequestHistogram("request_prompt_tokens", "Tokens of each prompt", TOKENS, lambda request: [request.prompt_tokens]),
    RequestHistogram(
        "request_output_tokens",
        "Tokens of each choice",
        TOKENS,
        lambda request: [len(choice.output.ids) for choice in request.choices],
    ),
    RequestHistogram(
        "request_max_tokens",
        "max_tokens of each prompt that has one",
        TOKENS,
        lambda request: [] if request.params.max_tokens is None else [request.params.max_tokens],
    ),
    RequestHistogram("request_choices", "Choices of each prompt", CHOICES, lambda request: [request.params.n]),
)


def join_families(joined: dict[str, Metric], families: Iterable[Metric], labels: Mapping[str, str]) -> None:
    """Add families to those of the same names, with further labels."""
    for family in families:
        into = joined.setdefault(family.name, Metric(family.name, family.documentation, family.type, family.unit))
        into.samples += [one._replace(labels={**one.labels, **labels}) for one in family.samples]


class _Families(Collector):
    """Families that were read elsewhere."""

    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        return self._read()


class Metrics:
    """Every metric of one model, in its own registry.

    A series that counts exists from the start, as 0: an alert on its increase sees the first event.
    """

    def __init__(self, llm: LLM, vllm_name: str | None = None) -> None:
        """With `vllm_name`, what clients call the model, there are vLLM's names beside ours."""
        disable_created_metrics()  # they double the series, and nobody reads them
        self.registry = own = CollectorRegistry()
        # what `engine_families` has read where the engine is; None where that is here
        self.families: Sequence[Metric] | None = None
        own.register(_Families(lambda: engine_families(llm) if self.families is None else self.families))
        self.exported = own  # the registry of what is shown
        if vllm_name is not None:
            self.exported = CollectorRegistry()
            self.exported.register(own)
            self.exported.register(VllmNames(own, llm.pool, vllm_name))

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"twostroke_{name}", text, labels, registry=own, buckets=buckets)

        def counter(name: str, text: str, label: str, values: Iterable[object]) -> Counter:
            made = Counter(f"twostroke_{name}", text, (label,), registry=own)
            for value in values:
                made.labels(value)
            return made

        self._of_requests = [(histogram(one.name, one.help, one.buckets), one.values) for one in REQUEST_HISTOGRAMS]
        self._step = histogram("step_seconds", "A step of the engine", SHORT, "kind")
        self._predicted = histogram(
            "predicted_step_seconds", "What the same steps were expected to take (with --itl-ms)", SHORT, "kind"
        )
        self._batch = histogram("step_tokens", "Tokens that a step computes, by what they are for", TOKENS, "kind")
        self._iteration = histogram("iteration_tokens", "Tokens that a step computes, all together", TOKENS)
        for kind in STEP_KINDS:
            self._step.labels(kind)
        kinds, help = (
            ("prompt", "computed", "output"),
            "Tokens of prompts, those of them computed, and tokens generated",
        )
        self._tokens = counter("tokens", help, "kind", kinds)
        self._cached = counter("cached_tokens", "Tokens of prompts that were found and not computed", "tier", TIERS)
        self._requests = counter("finished_requests", "Prompts that are done, cancelled or failed", "outcome", OUTCOMES)
        self._reasons = counter("finish_reasons", "Choices that ended, by why", "reason", FINISH_REASONS)
        self._aborted = Counter(
            "twostroke_aborted_requests", "Prompts cancelled before their end (client gone, deadline)", registry=own
        )
        self._rejected = counter(
            "rejected_requests", "Requests refused because the queue is full", "reason", ["queue_full"]
        )
        self._errors = counter("errors", "Prompts that failed", "error", FAILURES)
        self._age = Gauge(
            "twostroke_step_age_seconds", "Seconds since the engine was last between two steps", registry=own
        )
        self._age.set_function(lambda: 0.0)
        build = ("version", "model", "backend", "identity")
        facts = (version("twostroke"), llm.name, llm.backend.label, llm.model.id)
        Gauge("twostroke_build_info", "What is served; equal identities give equal bits", build, registry=own).labels(
            *facts
        ).set(1)

    def watch_steps(self, age_s: Callable[[], float]) -> None:
        """Export the age of the last step, as this function tells it."""
        self._age.set_function(age_s)

    def step(self, seconds: float, report: StepReport) -> None:
        """One step of the engine. Called by its thread."""
        kind = "mixed" if report.prefill and report.decode else "prefill" if report.prefill else "decode"
        self._step.labels(kind).observe(seconds)
        if report.predicted_s is not None:
            self._predicted.labels(kind).observe(report.predicted_s)
        self._iteration.observe(report.prefill + report.decode)
        for name, tokens in (("prefill", report.prefill), ("decode", report.decode)):
            if tokens:
                self._batch.labels(name).observe(tokens)

    def output_tokens(self, count: int) -> None:
        self._tokens.labels("output").inc(count)

    def rejected(self, reason: str) -> None:
        self._rejected.labels(reason).inc()

    def finished(self, request: Request, error: Exception | None) -> None:
        """Count a prompt that is done, cancelled or failed."""
        self._tokens.labels("prompt").inc(request.prompt_tokens)
        self._tokens.labels("computed").inc(max(0, request.prefilled_tokens - request.cached_tokens))
        for tier in TIERS:
            self._cached.labels(tier).inc(request.cached_by_tier[tier])
        ended = outcome(request, error)
        self._requests.labels(ended).inc()
        for reason in finish_reasons(request, error):
            self._reasons.labels(reason).inc()
        if error is not None:
            self._errors.labels(type(error).__name__).inc()
        if ended == "aborted":
            self._aborted.inc()
        for histogram, values in self._of_requests:
            for value in values(request):
                histogram.observe(value)


class ServerMetrics:
    """What is counted of the server and of no model."""

    def __init__(self, keys: ApiKeys) -> None:
        disable_created_metrics()
        self._registry = own = CollectorRegistry()
        ProcessCollector(registry=own)
        own.register(TenantCollector(keys))
        self._responses = Counter("twostroke_http_responses", "HTTP responses", ["status"], registry=own)
        for status in STATUSES:
            self._responses.labels(status)
        self._tasks = Gauge("twostroke_tasks", "Tasks of the event loop, this answer's own included", registry=own)

    def responded(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(status).inc()

    def exposition(self, of_models: Collector, accept: str) -> Response:
        """These metrics and those of models, as Prometheus' text or OpenMetrics, as the header Accept asks.

        Called on the event loop.
        """
        self._tasks.set(len(asyncio.all_tasks()))
        registry = CollectorRegistry()
        registry.register(self._registry)
        registry.register(of_models)
        encode, media_type = choose_encoder(accept)
        return Response(encode(registry), headers={"content-type": media_type, "vary": "accept"})
