"""Files of a load test: a line for each request, the summary, and a plot."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.study.bench.serving.client import Outcome
from twostroke.study.bench.serving.figures import describe
from twostroke.study.traffic.objectives import Objectives
from twostroke.system import strict_json
from twostroke.system.extras import install_command

REQUESTS, SUMMARY, PLOT = "requests.jsonl", "summary.json", "latency.svg"


def check(directory: Path) -> None:
    """Raise InvalidRequest if a run's files cannot be kept there, or would replace another's."""
    if find_spec("matplotlib") is None:
        raise InvalidRequest(f"--output draws a plot by matplotlib: {install_command('bench')}")
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
    draw(directory / PLOT, facts["model"], [one for one in outcomes if one.error is None], objectives)


def draw(path: Path, title: str, done: Sequence[Outcome], objectives: Objectives) -> None:
    """Two cumulative distributions: TTFT over requests, and ITL over gaps."""
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    figure.suptitle(title)
    panels = (
        ("TTFT", [at for one in done if (at := one.timings.ttft) is not None], objectives.ttft_s),
        ("ITL", [gap for one in done for gap in one.timings.itls], objectives.itl_s),
    )
    for axes, (name, values, objective) in zip(figure.subplots(1, 2), panels, strict=True):
        if values:
            axes.ecdf([value * 1e3 for value in values])
        if objective is not None:
            axes.axvline(objective * 1e3, color="tab:red", linestyle="--", label="objective")
            axes.legend()
        axes.set(xlabel=f"{name}, ms", ylabel="share", xlim=(0, None), ylim=(0, 1))
        axes.grid(alpha=0.3)
    figure.savefig(path)
