"""Figures computed from times, and the files that keep them: a line for each request, the summary, and a plot.

TTFT, ITL, TPOT and percentiles are those of `engine/timings.py`.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twostroke.engine.timings import DEFINITIONS as TIMINGS
from twostroke.engine.timings import mean, percentile
from twostroke.errors import InvalidRequest
from twostroke.study.bench.serving.client import INTERRUPTED, Outcome
from twostroke.study.charts import Axis, Series, as_file, line_chart, vertical
from twostroke.study.traffic.objectives import Objectives
from twostroke.system import strict_json

REQUESTS, SUMMARY, PLOT = "requests.jsonl", "summary.json", "latency.svg"
DEFINITIONS = {
    "arrival": "when a request was due: had the client been late, that would count against the server",
    "ttft_s": TIMINGS["ttft_s"],
    "itl_s": "every gap between consecutive tokens, of all answers together; tokens that come at once are 0 apart",
    "tpot_s": f"{TIMINGS['tpot_s']}, one figure an answer",
    "e2e_s": "end of the answer - arrival",
    "queue_s": "start - arrival by the server's own clock, where it says",
    "duration_s": "end of the last answer - first arrival",
    "requests_per_second": "answers / duration_s",
    "output_tokens_per_second": "generated tokens of answers / duration_s",
    "total_tokens_per_second": "prompt and generated tokens of answers / duration_s",
    "goodput": "answers within every objective that was given / duration_s; of an answer's ITL, its 99th percentile",
    "cached_tokens": "prompt tokens that the server took from its prefix cache, where it says",
    "lag_p99_s": "99th percentile of sent - due: how late the client itself was",
    "client_cpu": "processor time of the client / duration_s; near 1 the client is what was measured",
}


def describe(outcome: Outcome) -> dict[str, Any]:
    """One request, for a line of JSON."""
    return {
        "input_tokens": outcome.input_tokens,
        "asked_tokens": outcome.asked_tokens,
        "output_tokens": len(outcome.tokens),
        "cached_tokens": outcome.cached,
        "due_s": outcome.due,
        "sent_s": outcome.sent,
        "ttft_s": outcome.timings.ttft,
        "tpot_s": outcome.timings.tpot,
        "e2e_s": outcome.end - outcome.due,
        "queue_s": outcome.queue_s,
        "finish": outcome.finish,
        "error": outcome.error,
    }


def spread(values: Sequence[float | None]) -> dict[str, float | None]:
    """Mean and percentiles of those that are known."""
    known = [value for value in values if value is not None]
    return {"mean": mean(known)} | {f"p{percent}": percentile(known, percent) for percent in (50, 90, 99)}


def summarize(outcomes: Sequence[Outcome], objectives: Objectives, cpu_s: float) -> dict[str, Any]:
    """Each field as in `DEFINITIONS`. Failed and interrupted requests are counted, and in no other figure."""
    done = [one for one in outcomes if one.error is None]
    failed = Counter(one.error for one in outcomes if one.error not in (None, INTERRUPTED))
    duration = max((one.end for one in outcomes), default=0.0)
    inputs, outputs = sum(one.input_tokens for one in done), sum(len(one.tokens) for one in done)
    cached = [one.cached for one in done if one.cached is not None]

    def rate(count: float) -> float | None:
        return count / duration if duration else None

    return {
        "sent": len(outcomes),
        "completed": len(done),
        "interrupted": sum(one.error == INTERRUPTED for one in outcomes),
        "errors": dict(failed),
        "short_answers": sum(len(one.tokens) < one.asked_tokens for one in done),
        "duration_s": duration,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "cached_tokens": sum(cached) if cached else None,
        "ttft_s": spread([one.timings.ttft for one in done]),
        "itl_s": spread([gap for one in done for gap in one.timings.itls]),
        "tpot_s": spread([one.timings.tpot for one in done]),
        "e2e_s": spread([one.end - one.due for one in done]),
        "queue_s": spread([one.queue_s for one in done]),
        "requests_per_second": rate(len(done)),
        "output_tokens_per_second": rate(outputs),
        "total_tokens_per_second": rate(inputs + outputs),
        "goodput": rate(sum(objectives.met(one.timings) for one in done)) if objectives.given else None,
        "lag_p99_s": percentile([one.sent - one.due for one in outcomes if one.sent is not None], 99),
        "client_cpu": rate(cpu_s),
    }


def check_output(directory: Path) -> None:
    """Raise InvalidRequest if a run's files cannot be kept there, or would replace another's."""
    if taken := [name for name in (REQUESTS, SUMMARY, PLOT) if (directory / name).exists()]:
        raise InvalidRequest(f"{directory} has a {taken[0]} already: name another directory by --output")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest(f"--output {directory}: {error.strerror}") from None


def save(directory: Path, facts: dict[str, Any], outcomes: Sequence[Outcome], objectives: Objectives) -> None:
    """Write all three. A request's line has the times of its tokens, in seconds from the start of the run."""
    lines = [strict_json.dumps(describe(one) | {"tokens_s": [round(at, 6) for at in one.tokens]}) for one in outcomes]
    (directory / REQUESTS).write_text("".join(f"{line}\n" for line in lines))
    (directory / SUMMARY).write_text(strict_json.dumps(facts, indent=1) + "\n")
    (directory / PLOT).write_text(plot(facts["model"], [one for one in outcomes if one.error is None], objectives))


def plot(title: str, done: Sequence[Outcome], objectives: Objectives) -> str:
    """The share of requests that had their first token by a time, and of gaps that were as short; objectives dashed."""
    found = (
        ("TTFT", [at for one in done if (at := one.timings.ttft) is not None], objectives.ttft_s),
        ("ITL", [gap for one in done for gap in one.timings.itls], objectives.itl_s),
    )
    series = [
        Series(name, [(1e3 * (percentile(values, percent) or 0.0), percent / 100) for percent in range(1, 101)], colour)
        for colour, (name, values, _) in enumerate(found)
    ]
    limits = [
        vertical(f"objective of {name}", 1e3 * limit, series, colour)
        for colour, (name, _, limit) in enumerate(found)
        if limit is not None
    ]
    y = Axis("share", "{:.0%}".format, logarithmic=False, top=1.0)
    return as_file(line_chart(title, Axis("milliseconds", "{:,.3g}".format), y, [*series, *limits]))
