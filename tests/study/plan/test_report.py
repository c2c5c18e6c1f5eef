"""The report of a plan and of its load: one source for the terminal and for the page."""

import io
import shlex
from typing import Any

import pytest
from rich.console import Console

from tests.study.plan.conftest import short_trials
from twostroke.cli import plan_report
from twostroke.cli.plan_report import print_blocks
from twostroke.study.plan.account import account
from twostroke.study.plan.changes import ChangeLimits
from twostroke.study.plan.loads import drawn_traffic
from twostroke.study.plan.plan import RequestProfile, make_plan
from twostroke.study.plan.report import report
from twostroke.study.plan.report_blocks import Block, Cell, Grid, Line, Section, Verdict, record_grid, shown, title
from twostroke.study.plan.search import LoadSearch, advise
from twostroke.study.plan.service import LoadSimulator
from twostroke.study.roofline.machines import find_machine
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.techniques import techniques
from twostroke.study.roofline.weight_formats import FORMATS
from twostroke.study.traffic.objectives import Objectives

LLAMA = specifications()["llama-3-70b"]
LIMITS = ChangeLimits(8, tuple(FORMATS), techniques(LLAMA))


def facts(tp: int = 4, **load: Any) -> dict[str, Any]:
    workload = RequestProfile(**({"prompt": 4096, "output": 256} | load))
    return account(advise(make_plan(LLAMA, find_machine("h100"), FORMATS["bf16"], tp, workload), LIMITS), LIMITS)


@pytest.fixture(scope="module")
def loaded() -> dict[str, Any]:
    """A load that cannot be served as it is planned."""
    small = specifications()["llama-3-8b"]
    profile = RequestProfile(1024, 16, ttft_ms=500)
    made = make_plan(small, find_machine("rtx-4090"), FORMATS["bf16"], 1, profile)
    load = LoadSimulator(drawn_traffic(profile, 12.0, None, 1.0, False), Objectives(0.5))
    limits = ChangeLimits(4, ("bf16", "int8-w8a8"), techniques(small))
    with short_trials():
        return account(LoadSearch(made, limits, load).advice(), limits, load)


def verdicts(blocks: list[Block]) -> list[Verdict]:
    return [one for one in blocks if isinstance(one, Verdict)]


def lines(blocks: list[Block]) -> list[str]:
    return [one.text for one in blocks if isinstance(one, Line)]


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
    assert verdicts(blocks) == [Verdict("misses the objective: TTFT (compute binds)", "warn")]


def test_one_verdict_and_two_ways_out(loaded: dict[str, Any]) -> None:
    """The hardest demand is the verdict, and there is no other; each way out tells what it serves."""
    blocks = list(report(loaded))
    (verdict,) = verdicts(blocks)
    assert verdict.kind == "bad"
    assert verdict.text.startswith("cannot be served: at most ")
    assert not any("nothing to do" in text for text in lines(blocks))
    first = lines(list(report(loaded, details=False)))
    for key, words in (("same_devices", "without more devices"), ("more_devices", "with more devices")):
        way = loaded["ways_out"][key]
        place = next(i for i, text in enumerate(first) if text.startswith(f"{words}: "))
        assert first[place] == f"{words}: {' + '.join(way['changes'])}"
        assert f"serves {way['requests_per_second']:,.3g} requests/s" in first[place + 1]
        assert f"{way['watts']:,.0f} W" in first[place + 1]
    answer = next(one for one in blocks if isinstance(one, Grid))
    assert [row[0].text for row in answer.rows] == ["rate", "TTFT", "ITL"]
    assert [cell.text for cell in answer.rows[1]] == ["TTFT", "without end", "500 ms", "queueing", "missed"]


def test_the_first_screen_has_no_tables(loaded: dict[str, Any]) -> None:
    for known in (loaded, facts(tp=1)):
        assert sections(list(report(known, details=False))) == []
        assert "Each change alone, without queueing" in sections(list(report(known)))
    assert sections(list(report(loaded)))[0] == "Under the load"


def test_what_does_not_fit() -> None:
    blocks = list(report(facts(tp=1)))
    (verdict,) = verdicts(blocks)
    assert verdict.text.startswith("does not fit: 142.5 GB of 72.0 GB")
    assert "with more devices: tensor parallelism of 4" in lines(
        blocks
    ) or "with more devices: tensor parallelism of 2" in lines(blocks)
    lost = list(report(facts(tp=1, ttft_ms=0.1)))
    assert "without more devices: nothing that is known here helps" in lines(lost)
    assert "with more devices: nothing that is known here helps" in lines(lost)


def test_every_change_has_a_row() -> None:
    known = facts()
    grid = [one for one in report(known) if isinstance(one, Grid)][1]
    assert [row[0].text for row in grid.rows] == [one["lever"] for one in known["levers"]]
    assert {row[-1].text for row in grid.rows} <= {"enough", "misses", "no room"}


@pytest.mark.parametrize(("value", "text"), [(None, "-"), (1234.56, "1,234.6"), (1234, "1,234"), ("x", "x")])
def test_values_in_tables(value: Any, text: str) -> None:
    assert shown(value) == text
    assert record_grid([{"ttft_ms": value}]) == Grid(["TTFT ms"], [[Cell(text)]])


def test_heads_of_columns() -> None:
    names = ("itl_ms", "gb_sent", "compute_percent", "tokens_per_second")
    assert [title(name) for name in names] == ["ITL ms", "GB sent", "compute %", "tokens/s"]


def printed(blocks: list[Block], width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    out = io.StringIO()
    monkeypatch.setattr(plan_report, "Console", lambda **options: Console(file=out, width=width, **options))
    plan_report.print_blocks(blocks)
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indents, marks of items, tables; text that looks like markup stays text, and sources are for pages."""
    blocks: list[Block] = [
        Line("[bold]name", "title"),
        Section("Part"),
        Line("deep", indent=3),
        Line("one", "item"),
        Line("hidden", "source"),
        Grid(("", "ms"), [[Cell("TTFT"), Cell("1.5")]]),
        Verdict("nothing to do", "good"),
    ]
    assert printed(blocks, 60, monkeypatch) == [
        "[bold]name", "", "Part", "   deep", "  - one", "         ms", "  TTFT  1.5", "verdict: nothing to do",
    ]  # fmt: skip


def test_nothing_is_cut_at_80_columns(loaded: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of columns are folded, not cut; and the first screen has 24 lines."""
    for known in (loaded, facts(concurrency=4)):
        text = printed(list(report(known)), 80, monkeypatch)
        assert not any("…" in line for line in text)
        heads = " ".join(text)
        for word in ("link", "gathered", "bandwidth"):
            assert word in heads
    wrapped = sum(-(-len(line) // 80) or 1 for line in printed(list(report(loaded, details=False)), 80, monkeypatch))
    assert wrapped <= 24


def test_a_long_command_is_folded_as_a_shell_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    command = "twostroke simulate m " + " ".join(f"--option-{i} {i}" for i in range(20))
    print_blocks([Line(command, "code", 2)])
    told = capsys.readouterr().out
    assert max(map(len, told.splitlines())) <= 100
    assert shlex.split(told.replace("\\\n", " ")) == shlex.split(command)
    quoted = command + " --path 'a --b'"
    print_blocks([Line(quoted, "code", 2)])
    assert capsys.readouterr().out.strip() == quoted
