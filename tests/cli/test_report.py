"""No wait is silent."""

import time

import pytest

from twostroke.cli import report


def test_a_wait_without_a_terminal_writes_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "FIRST_LINE_S", 0.2)
    monkeypatch.setattr(report, "LINE_INTERVAL_S", 0.05)
    with report.ProgressDisplay("loading tiny") as progress:
        assert capsys.readouterr().err == ""
        time.sleep(0.4)
        assert capsys.readouterr().err.startswith("loading tiny ...\n")
        progress("downloading", 5 << 20, 10 << 20)
        time.sleep(0.3)
    assert "downloading: 5.0 MiB of 10.0 MiB\n" in capsys.readouterr().err


def test_a_long_wait_writes_no_line_twice_and_few_of_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "FIRST_LINE_S", 0.01)
    monkeypatch.setattr(report, "LINE_INTERVAL_S", 0.02)
    with report.ProgressDisplay("loading tiny") as progress:
        time.sleep(0.3)
        for done in range(100):
            progress("encoding weights", done, 100)
            time.sleep(0.01)
    lines = capsys.readouterr().err.splitlines()
    assert len(set(lines)) == len(lines) <= 8
    with report.ProgressDisplay("loading tiny", announced=True):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_quick_wait_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with report.ProgressDisplay("loading tiny") as progress:
        progress("loading tiny", 1, 2)
    assert capsys.readouterr().err == ""
