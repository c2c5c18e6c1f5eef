"""Files of a load test: a line for each request, the summary, and a plot."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from twostroke.engine.timings import percentile
from twostroke.errors import InvalidRequest
from twostroke.study.bench.serving.client import Outcome
from twostroke.study.bench.serving.figures import describe
from twostroke.study.charts import Axis, Series, as_file, line_chart, vertical
from twostroke.study.traffic.objectives import Objectives
from twostroke.system import strict_json

REQUESTS, SUMMARY, PLOT = "requests.jsonl", "summary.json", "latency.svg"


def check(directory: Path) -> None:
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
