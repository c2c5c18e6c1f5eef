"""No wait is silent, and reports say what was measured."""

import math
import time
from dataclasses import asdict

import pytest

from tests.server.conftest import eventually
from twostroke.cli import report
from twostroke.study.traffic.objectives import Objectives


def test_a_wait_without_a_terminal_writes_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(report, "LINE_INTERVAL_S", 0.01)
    written: list[str] = []

    def wrote(line: str) -> bool:
        written.append(capsys.readouterr().err)
        return line in "".join(written)

    with report.ProgressDisplay("loading tiny") as progress:
        eventually(lambda: wrote("loading tiny ...\n"))
        progress("downloading", 5 << 20, 10 << 20)
        eventually(lambda: wrote("downloading: 5.0 MiB of 10.0 MiB\n"))
    assert "".join(written).startswith("loading tiny ...\n")


def test_a_long_wait_writes_no_line_twice_and_few_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(report, "LINE_INTERVAL_S", 0.02)
    began = time.monotonic()
    with report.ProgressDisplay("loading tiny") as progress:
        time.sleep(0.3)
        for done in range(100):
            progress("encoding weights", done, 100)
            time.sleep(0.01)
    lines = capsys.readouterr().err.splitlines()
    assert len(set(lines)) == len(lines)
    assert len(lines) <= 3 + math.log2((time.monotonic() - began) / 0.02), "the intervals double"
    with report.ProgressDisplay("loading tiny", announced=True):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_quick_wait_writes_nothing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "FIRST_LINE_S", 1000.0)
    with report.ProgressDisplay("loading tiny") as progress:
        progress("loading tiny", 1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("limits", "words"),
    [((0.2, None), "TTFT of 200 ms"), ((None, 0.05), "ITL of 50 ms"), ((0.2, 0.05), "TTFT of 200 ms and ITL of 50 ms")],
)
def test_goodput_names_the_objectives_that_were_given(limits: tuple[float | None, float | None], words: str) -> None:
    """And nothing else of them: the percentile is no time."""
    facts = {"goodput": 1234.5, "objectives": asdict(Objectives(*limits))}
    assert report.goodput_text(facts) == f"goodput 1,234.50 requests/s within {words}"
