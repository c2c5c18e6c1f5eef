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


def test_a_quick_wait_writes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with report.ProgressDisplay("loading tiny") as progress:
        progress("loading tiny", 1, 2)
    assert capsys.readouterr().err == ""
