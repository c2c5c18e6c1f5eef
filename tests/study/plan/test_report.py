"""The report of a plan and of its load: one source for the terminal and for the page."""

import io
from typing import Any

import pytest
from rich.console import Console

from twostroke.cli import plan_report
from twostroke.study.plan.account import account
from twostroke.study.plan.changes import ChangeLimits
from twostroke.study.plan.load_report import advice
from twostroke.study.plan.machines import find_machine
from twostroke.study.plan.models import specifications
from twostroke.study.plan.plan import RequestProfile, make_plan
from twostroke.study.plan.report import report
from twostroke.study.plan.report_blocks import Block, Cell, Grid, Line, Section, Verdict, record_grid, shown, title
from twostroke.study.plan.techniques import techniques
from twostroke.study.plan.weights import FORMATS

LLAMA = specifications()["llama-3-70b"]
LIMITS = ChangeLimits(8, tuple(FORMATS), techniques(LLAMA))


def facts(tp: int = 4, **load: Any) -> dict[str, Any]:
    workload = RequestProfile(**({"prompt": 4096, "output": 256} | load))
    return account(make_plan(LLAMA, find_machine("h100"), FORMATS["bf16"], tp, workload), LIMITS)


def sections(blocks: list[Block]) -> list[str]:
    return [one.title for one in blocks if isinstance(one, Section) and one.title]


def test_the_answer_is_that_of_the_account() -> None:
    """Memory is that of the weights and of all users; what is missed is marked, and named in the verdict."""
    known = facts(ttft_ms=1.0, itl_ms=1000.0, concurrency=3)
    blocks = list(report(known))
    answer = next(one for one in blocks if isinstance(one, Grid))
    memory = known["memory"]
    needed = memory["weights_bytes"] + 3 * memory["kv_bytes_per_user"]
    assert [[cell.text for cell in row] for row in answer.rows] == [
        ["memory", f"{needed / 1e9:,.1f} GB", f"{memory['usable_bytes'] / 1e9:,.1f} GB", "", "fits"],
        ["TTFT", f"{known['prefill']['ms']:,.1f} ms", "1 ms", "compute", "missed"],
        ["ITL", f"{known['decode']['ms']:,.1f} ms", "1,000 ms", "bandwidth", "kept"],
    ]
    assert next(one for one in blocks if isinstance(one, Verdict)) == Verdict("misses the objective (TTFT)", "warn")


def test_advice_is_shown_where_something_is_wrong() -> None:
    assert sections(list(report(facts())))[0] == "Each change alone"
    blocks = list(report(facts(tp=1)))
    assert sections(blocks)[:2] == ["What to do, in order", "Each change alone"]
    lines = [one.text for one in blocks if isinstance(one, Line)]
    assert "1. It does not fit; memory binds." in lines
    assert any(text.startswith(f"In all: {' + '.join(facts(tp=1)['advice']['changes'])}. TTFT ") for text in lines)
    verdict = next(one for one in blocks if isinstance(one, Verdict))
    assert verdict == Verdict("does not fit; times are those that it would have if it did", "bad")


def test_every_change_has_a_row() -> None:
    known = facts()
    grid = [one for one in report(known) if isinstance(one, Grid)][1]
    assert [row[0].text for row in grid.rows] == [one["lever"] for one in known["levers"]]
    assert {row[-1].text for row in grid.rows} <= {"enough", "misses", "does not fit"}


def test_advice_on_a_load() -> None:
    wrong = {"missed": ["TTFT", "ITL"], "bound_by": "queueing", "lever": "more workers", "needs": "2 more devices"}
    times = {"ttft_ms": 10.0, "waiting_ms": 4.0, "itl_ms": 2.0, "verdict": "misses the objective"}
    step = wrong | times | {"before": times | {"ttft_ms": None}}
    load = {"users": None, "percentile": 99.0, "advice": {"steps": [step], "verdict": "misses the objective"}}
    assert advice(load) == [
        "1. TTFT and ITL too long; queueing binds: more workers (2 more devices)",
        "   p99 without end -> TTFT 10.0 ms (4.0 waiting), ITL 2.0 ms: misses the objective",
        "no change that is known here is enough",
    ]
    load["advice"] = {"steps": [], "verdict": "cannot be served"}
    assert advice(load) == ["no change that is known here helps"]


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (1234.56, "1,234.6"), (1234, "1,234"), ("x", "x")])
def test_values_in_tables(value: Any, text: str) -> None:
    assert shown(value) == text
    assert record_grid([{"ttft_ms": value}]) == Grid(["TTFT ms"], [[Cell(text)]])


def test_heads_of_columns() -> None:
    assert [title(name) for name in ("itl_ms", "gb_sent", "compute_percent")] == ["ITL ms", "GB sent", "compute %"]


def test_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indents, marks of items, tables; text that looks like markup stays text, and sources are for pages."""
    out = io.StringIO()
    monkeypatch.setattr(plan_report, "Console", lambda **options: Console(file=out, width=60, **options))
    plan_report.print_blocks(
        [
            Line("[bold]name", "title"),
            Section("Part"),
            Line("deep", indent=3),
            Line("one", "item"),
            Line("hidden", "source"),
            Grid(("", "ms"), [[Cell("TTFT"), Cell("1.5")]]),
            Verdict("nothing to do", "good"),
        ]
    )
    assert [line.rstrip() for line in out.getvalue().splitlines()] == [
        "[bold]name", "", "Part", "   deep", "  - one", "         ms", "  TTFT  1.5", "verdict: nothing to do",
    ]  # fmt: skip
