"""OpenTelemetry spans: one for each prompt, with its queue, prefill and decode inside.

Made only where the extra `otel` is installed. OpenTelemetry's configuration decides where they go
(`opentelemetry-instrument twostroke serve ...`, OTEL_EXPORTER_OTLP_ENDPOINT). Without it this costs nothing.
"""

import time
from importlib import import_module
from typing import Any

from twostroke.engine.request import Request


class Tracer:
    """Records spans when a request has ended, from the times that its timings hold."""

    def __init__(self) -> None:
        try:
            self._api: Any = import_module("opentelemetry.trace")
        except ModuleNotFoundError:
            self._api = None

    def record(self, request: Request, model: str, error: Exception | None) -> None:
        """Record the spans of a prompt that is done."""
        if self._api is None:
            return
        tracer, timings = self._api.get_tracer("twostroke"), request.timings
        # Timings use perf_counter; spans use the wall clock, in nanoseconds.
        offset = time.time() - time.perf_counter()
        end = timings.finished or time.perf_counter()

        def at(moment: float) -> int:
            return int((moment + offset) * 1e9)

        attributes = {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "gen_ai.usage.output_tokens": sum(len(choice.output.ids) for choice in request.choices),
            "twostroke.cached_tokens": request.cached_tokens,
            "twostroke.preemptions": request.preemptions,
        }
        span = tracer.start_span("request", start_time=at(timings.arrival), attributes=attributes)
        if error is not None:
            span.set_status(self._api.Status(self._api.StatusCode.ERROR, str(error)))
        inside = self._api.set_span_in_context(span)
        first, last = (timings.tokens[0], timings.tokens[-1]) if timings.tokens else (None, None)
        stages = (
            ("queue", timings.arrival, timings.scheduled),
            ("prefill", timings.scheduled, first),
            ("decode", first, last),
        )
        for name, start, stop in stages:
            if start is not None and stop is not None:
                tracer.start_span(name, context=inside, start_time=at(start)).end(end_time=at(stop))
        span.end(end_time=at(end))
