"""OpenTelemetry spans: one for each prompt inside its HTTP call, with its queue, prefill and decode inside.

Made only where the extra `otel` is installed. OpenTelemetry's configuration decides where they go
(`opentelemetry-instrument twostroke serve ...`, OTEL_EXPORTER_OTLP_ENDPOINT). Without it this costs nothing.

The parent is the span that is current when a call arrives (that of OpenTelemetry's instrumentation of FastAPI), or the
caller's own, from the headers of W3C Trace Context (`traceparent`). Attributes follow OpenTelemetry's semantic
conventions for generative AI.
"""

import time
from collections.abc import Mapping
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from twostroke.engine.request import Request
from twostroke.kv.pages import TIERS
from twostroke.server.observability.logs import request_id
from twostroke.server.observability.outcome import finish_reasons, outcome, output_tokens

try:
    _api: Any = import_module("opentelemetry.trace")
except ModuleNotFoundError:
    _api = None
_parent: ContextVar[tuple[Any, bool]] = ContextVar("trace_parent", default=(None, False))


def capture_parent(headers: Mapping[str, str]) -> None:
    """Remember in this task what the spans of its call belong to. Called when the call arrives."""
    if _api is None:
        return
    if _api.get_current_span().get_span_context().is_valid:
        _parent.set((import_module("opentelemetry.context").get_current(), True))
    else:
        _parent.set((import_module("opentelemetry.propagate").extract(headers), False))


class CallTrace:
    """The context that all spans of a call share. It is made in the task that serves the call.

    Attributes:
        context: the parent, as an OpenTelemetry context.
        inside: whether the parent is a span of this process.
    """

    def __init__(self) -> None:
        self.context, self.inside = _parent.get()
        self.request_id = request_id.get()  # the call's x-request-id
        self.operation = "text_completion"  # "chat" or "text_completion"
        self.response_id: str | None = None  # the id of the answer


def record_spans(
    model: str, request: Request, call: CallTrace, error: Exception | None, aborted: Exception | None
) -> None:
    """Record the spans of a prompt that is done, from the times that its timings hold.

    `model` is what clients call the model; `aborted` is why the prompt was cancelled, if it was.
    """
    if _api is None:
        return
    timings = request.timings
    # Timings use perf_counter; spans use the wall clock, in nanoseconds.
    offset = time.time() - time.perf_counter()

    def at(moment: float) -> int:
        return int((moment + offset) * 1e9)

    tracer = _api.get_tracer("twostroke")
    span = tracer.start_span(
        f"{call.operation} {model}",
        context=call.context,
        kind=_api.SpanKind.INTERNAL if call.inside else _api.SpanKind.SERVER,
        start_time=at(timings.arrival),
        attributes=_attributes(model, request, call, error),
    )
    if (reason := error or (aborted if request.cancelled else None)) is not None:
        span.set_attribute("error.type", getattr(reason, "code", None) or type(reason).__name__)
        span.set_status(_api.Status(_api.StatusCode.ERROR, str(reason)))
    inside = _api.set_span_in_context(span, call.context)
    first, last = (timings.tokens[0], timings.tokens[-1]) if timings.tokens else (None, None)
    stages = (
        ("queue", timings.arrival, timings.scheduled),
        ("prefill", timings.scheduled, first),
        ("decode", first, last),
    )
    for name, start, stop in stages:
        if start is not None and stop is not None:
            tracer.start_span(name, context=inside, start_time=at(start)).end(end_time=at(stop))
    span.end(end_time=at(timings.finished or time.perf_counter()))


def _attributes(model: str, request: Request, call: CallTrace, error: Exception | None) -> dict[str, Any]:
    params = request.params
    attributes = {
        "gen_ai.operation.name": call.operation,
        "gen_ai.provider.name": "twostroke",
        "gen_ai.request.model": model,
        "gen_ai.request.temperature": float(params.temperature),
        "gen_ai.request.top_p": float(params.top_p),
        "gen_ai.request.max_tokens": params.max_tokens,
        "gen_ai.request.choice.count": params.n if params.n > 1 else None,
        "gen_ai.response.model": model,
        "gen_ai.response.id": call.response_id,
        "gen_ai.response.finish_reasons": finish_reasons(request, error),
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "gen_ai.usage.output_tokens": output_tokens(request),
        "twostroke.request_id": call.request_id,
        "twostroke.outcome": outcome(request, error),
        "twostroke.preemptions": request.preemptions,
        "twostroke.cached_tokens": request.cached_tokens,
        **{f"twostroke.cached_tokens.{tier}": request.cached_by_tier[tier] for tier in TIERS},
    }
    return {name: value for name, value in attributes.items() if value is not None}
