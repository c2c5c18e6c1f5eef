"""The report of an evaluation, as Markdown and as one HTML page that needs nothing else."""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.study.charts import STYLE, as_file
from twostroke.study.evaluate.measure import Metric
from twostroke.study.evaluate.measures import MEASURES
from twostroke.study.evaluate.plots import by_bytes, curves, intervals
from twostroke.study.evaluate.run_directory import writing
from twostroke.study.evaluate.statistics import Estimate
from twostroke.study.evaluate.summary import MetricSummary, Summary
from twostroke.study.evaluate.task import data_text
from twostroke.system import strict_json
from twostroke.system.atomic_files import atomic_replace

MANY = 8  # methods up to which every pair is shown
# Of the plots, one for each form of a measure's metrics.
CAPTIONS = {
    "share": "Shares of items",
    "perplexity": "Perplexity",
    "nats": "Nats",
    "rate": "Tokens per second",
    "bytes": "K and V, MiB",
}


# Columns of the league.
LEAGUE = (
    "kept_ratio", "kept_bytes", "correct", "kl_rest", "ttft_alone_s", "itl_1_s", "itl_16_s", "answers_at_once",
    "full_rate",
)  # fmt: skip


@dataclass(frozen=True)
class Heading:
    level: int
    text: str


@dataclass(frozen=True)
class Paragraph:
    """A paragraph, or with `code` a code block."""

    text: str
    code: bool = False


@dataclass(frozen=True)
class ReportTable:
    """The first column is words, the others are numbers."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Figure:
    """An SVG, for the page alone."""

    svg: str
    caption: str


Block = Heading | Paragraph | ReportTable | Figure


def report(summary: Summary, command: str, machine: dict[str, Any]) -> list[Block]:
    """The blocks of a report: settings, results, and their limits."""
    settings = summary.settings
    task = settings["task"]
    parameters = ", ".join(f"{key} {value}" for key, value in task["parameters"].items())
    where = machine["machine"]
    blocks: list[Block] = [
        Heading(1, f"{task['name']}: {', '.join(summary.methods)}"),
        Paragraph(command, code=True),
        ReportTable(
            ("", "what was run"),
            [
                ("model", f"{settings['model']}, {settings['backend']} backend, {settings['dtype']}"),
                *((role, one["model"]) for role, one in settings["companions"].items()),
                ("task", task["name"] + (f" ({parameters})" if parameters else "")),
                ("data", summary.about),
                ("items", f"{summary.n:,}, seed {settings['seed']}"),
                ("prompt", "chat template" if settings["chat"] else "plain text"),
                ("answers", _answers(settings)),
                ("baseline", settings["baseline"]),
                *((one["name"], _method(one)) for one in settings["methods"]),
                ("machine", f"{where['gpu'] or where['cpu']}, {where['cores']} cores; {machine['date']}"),
            ],
        ),
        Paragraph(
            "In brackets: 95% intervals. Shares have Wilson's; means the bootstrap over items (10,000 resamples). "
            "Pairs are compared on the same items: shares by McNemar's exact test, differences by the paired "
            "bootstrap. No correction is made for the number of comparisons."
        ),
    ]
    if "serving" in summary.metrics or len(summary.methods) > MANY:
        blocks += [Heading(2, "league"), *league(summary)]
    blocks += [Heading(2, "at a glance"), headlines(summary)]
    for name, metrics in summary.metrics.items():
        blocks += [Heading(2, name), *_measure(summary.methods, metrics, settings["baseline"])]
        blocks.append(Paragraph(f"What this cannot show: {MEASURES[name].blind}"))
    return blocks


def headlines(summary: Summary) -> ReportTable:
    """A row for each method, a column for each of the metrics that say most; means alone."""
    chosen = [
        one
        for name, metrics in summary.metrics.items()
        for one in metrics
        if one.metric.key in MEASURES[name].headlines
    ]
    rows = [(method, *(shown(one.metric, one.of(method), bare=True) for one in chosen)) for method in summary.methods]
    return ReportTable(("", *(one.metric.title for one in chosen)), rows)


def league(summary: Summary) -> list[Block]:
    """A row for each method, the best first: by right answers, then by KL; and both over the KV that is kept."""
    known = {one.metric.key: one for metrics in summary.metrics.values() for one in metrics}
    chosen = [known[key] for key in LEAGUE if key in known]
    ranked = [(known[key], sign) for key, sign in (("correct", -1), ("kl_rest", 1)) if key in known]

    def rank(name: str) -> list[float]:
        return [sign * one.of(name).value if one.of(name).n else math.inf for one, sign in ranked]

    rows = [(name, *(shown(one.metric, one.of(name)) for one in chosen)) for name in sorted(summary.methods, key=rank)]
    blocks: list[Block] = [ReportTable(("", *(one.metric.title for one in chosen)), rows)]
    for one, _ in ranked if "kept_ratio" in known else ():
        kept = {name: known["kept_ratio"].of(name).value for name in summary.methods}
        points = {name: (kept[name], one.of(name).value) for name in summary.methods if one.of(name).n}
        if points:
            svg = by_bytes(one.metric.title, points, share=one.metric.form == "share")
            blocks.append(Figure(svg, f"{one.metric.title}: {one.metric.meaning}; over the KV that is kept."))
    return blocks


def _answers(settings: dict[str, Any]) -> str:
    temperature, tokens = settings["temperature"], settings["max_tokens"]
    how = f"temperature {temperature:g}, an item's random numbers for every method" if temperature else "greedy"
    length = f"{tokens} tokens, end tokens or not" if settings["ignore_eos"] else f"at most {tokens} tokens"
    return f"{how}, {length}, {settings['batch']} items at a time"


def _method(facts: dict[str, Any]) -> str:
    parameters = ", ".join(f"{key}={value}" for key, value in facts["parameters"].items())
    return facts["method"] + (f" ({parameters})" if parameters else "")


def _measure(methods: Sequence[str], metrics: Sequence[MetricSummary], baseline: str) -> list[Block]:
    blocks: list[Block] = []
    single = [one for one in metrics if one.metric.form != "curve"]
    # A column a metric would be too wide a table: a row a metric, a column a method.
    rows = [(one.metric.title, *(shown(one.metric, one.of(method)) for method in methods)) for one in single]
    blocks.append(ReportTable(("", *methods), rows))
    for form, caption in CAPTIONS.items():
        same = [one for one in single if one.metric.form == form]
        scale = 2**-20 if form == "bytes" else 1.0
        groups = [(one.metric.title, {name: _scaled(one.of(name), scale) for name in methods}) for one in same]
        if groups:
            blocks.append(Figure(intervals(groups, methods, share=form == "share"), f"{caption}, with 95% intervals."))
    for one in metrics:
        if one.metric.form == "curve":
            blocks += _curve(one, methods, baseline)
    if pairs := [
        (
            one.metric.title,
            f"{pair.second} - {pair.first}",
            shown(one.metric, pair.difference, signed=True),
            "" if pair.p is None else f"{pair.second_only} / {pair.first_only}",
            "" if pair.p is None else f"{pair.p:.3g}",
        )
        for one in single
        for pair in one.pairs
        if pair.difference.n and (len(methods) <= MANY or baseline in (pair.first, pair.second))
    ]:
        blocks.append(ReportTable(("pairs", "", "difference", "only second / only first", "McNemar p"), pairs))
    definitions = "; ".join(f"{one.metric.title}: {one.metric.meaning}" for one in metrics)
    blocks.append(Paragraph(f"{definitions}."))
    return blocks


def _curve(one: MetricSummary, methods: Sequence[str], baseline: str) -> list[Block]:
    others = [name for name in methods if name != baseline]
    length = max(len(values) for values in one.estimates.values())
    places = [place for place in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if place <= length]
    rows = [(name, *(shown(one.metric, one.estimates[name][place - 1]) for place in places)) for name in methods]
    counts = ("items", *(str(one.estimates[methods[0]][place - 1].n) for place in places))
    table = ReportTable((one.metric.title, *(f"token {place}" for place in places)), [*rows, counts])
    figure = Figure(
        curves({name: one.estimates[name] for name in others}, methods),
        f"{one.metric.title}, nats, to {baseline}: means and 95% intervals over items.",
    )
    return [table, figure] if others else [table]


def _scaled(estimate: Estimate, scale: float) -> Estimate:
    return Estimate(estimate.n, estimate.value * scale, estimate.low * scale, estimate.high * scale)


def shown(metric: Metric, estimate: Estimate, signed: bool = False, bare: bool = False) -> str:
    """An estimate in its unit, with its interval unless `bare`."""
    if not estimate.n:
        return ""
    sign = "+" if signed else ""

    def number(value: float) -> str:
        match metric.form:
            case "share" | "part":
                return f"{100 * value:{sign}.1f}" + ("" if signed else "%")
            case "ratio" | "perplexity":
                return f"{value:{sign}.3f}"
            case "nats" | "curve":
                return f"{value:{sign}.4f}"
            case "bytes":
                return f"{value / 2**20:{sign}.2f}"
            case "seconds":
                return f"{value * 1e3:{sign}.1f}"
            case "count" | "rate":
                return f"{value:{sign}.1f}"

    unit = {"bytes": " MiB", "seconds": " ms"}.get(metric.form, " points" if signed and "%" in _percent(metric) else "")
    if bare or estimate.low == estimate.high:
        return f"{number(estimate.value)}{unit}"
    return f"{number(estimate.value)}{unit} [{number(estimate.low)}, {number(estimate.high)}]"


def _percent(metric: Metric) -> str:
    return "%" if metric.form in ("share", "part") else ""


def write(directory: Path, facts: dict[str, Any], blocks: Sequence[Block]) -> None:
    """summary.json, report.md, report.html, and plot.svg: the page's first plot, of the league if there is one.

    Raises InvalidRequest if there is no room; a file is then as it was.
    """
    texts = {
        "summary.json": strict_json.dumps(facts, indent=1) + "\n",
        "report.md": markdown(blocks),
        "report.html": page(blocks),
    }
    if figure := next((block for block in blocks if isinstance(block, Figure)), None):
        texts["plot.svg"] = as_file(figure.svg)
    for name, text in texts.items():
        with writing(directory), atomic_replace(directory / name) as file:
            file.write(text.encode())


def markdown(blocks: Sequence[Block]) -> str:
    """Figures are left to the page."""
    parts: list[str] = []
    for block in blocks:
        match block:
            case Heading(level, text):
                parts.append(f"{'#' * level} {text}")
            case Paragraph(text, code):
                parts.append(f"```\n{text}\n```" if code else text)
            case ReportTable(header, rows):
                rule = ["---", *["--:"] * (len(header) - 1)]
                parts.append("\n".join(f"| {' | '.join(_cell(c) for c in row)} |" for row in (header, rule, *rows)))
            case Figure():
                pass
    return "\n\n".join(parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page(blocks: Sequence[Block]) -> str:
    """One HTML file, its style and plots inside; light or dark as the reader's system is."""
    title = next(block.text for block in blocks if isinstance(block, Heading))
    body = "\n".join(_html(block) for block in blocks)
    style = data_text("report.css") + STYLE
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _html(block: Block) -> str:
    match block:
        case Heading(level, text):
            return f"<h{level}>{html.escape(text)}</h{level}>"
        case Paragraph(text, code):
            return f"<pre>{html.escape(text)}</pre>" if code else f"<p>{html.escape(text)}</p>"
        case ReportTable(header, rows):
            head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
            lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
            body = "".join(f"<tr>{line}</tr>" for line in lines)
            return f'<div class="table"><table><tr>{head}</tr>{body}</table></div>'
        case Figure(svg, caption):
            return f"<figure>{svg}<figcaption>{html.escape(caption)}</figcaption></figure>"
