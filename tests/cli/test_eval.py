"""`twostroke eval`: its JSON, its files, and its messages for bad input."""

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import Result

from twostroke import methods
from twostroke.cli.eval import split_methods

SMALL = ("--names", 4, "--limit", 3, "--seed", 1, "--max-tokens", 4)
METHODS = "plain,repeat,ptdo,ptdo+sinks"


def test_json_and_report(run_json: Callable[..., dict[str, Any]], tiny: str, tmp_path: Path) -> None:
    measures = ("--measure", "answers,likelihood,divergence", "--positions", 5)
    facts = run_json("eval", "nameindex", "-m", tiny, *SMALL, "--methods", METHODS, *measures, "--output", tmp_path)
    assert facts["n"] == 3
    assert [one["name"] for one in facts["settings"]["methods"]] == METHODS.split(",")
    assert facts["settings"]["baseline"] == "repeat"
    ratio = facts["measures"]["answers"]["kept_ratio"]["methods"]
    assert (ratio["repeat"]["value"], ratio["ptdo"]["value"]) == (1.0, 0.5)
    assert 0.5 < ratio["ptdo+sinks"]["value"] < 1
    assert len(facts["measures"]["divergence"]["kl"]["methods"]["ptdo"]) == 5
    assert json.loads((tmp_path / "summary.json").read_text()) == facts
    assert len((tmp_path / "items.jsonl").read_text().splitlines()) == 3

    text, page = (tmp_path / "report.md").read_text(), (tmp_path / "report.html").read_text()
    words = ("twostroke eval nameindex --names 4", "--limit 3 --seed 1 --max-tokens 4", f"--model {tiny} --threads 1")
    for report in (text, page):
        assert all(part in report for part in words)
        assert f"{facts['settings']['model']}, reference backend, float32" in report
        assert "US census" in report
        assert report.count("What this cannot show") == 3
    figures = page.split("<svg ")[1:]
    assert len(figures) > 4
    for figure in figures:  # well-formed, with each method's line or dot, and without NaN
        svg = ElementTree.fromstring("<svg " + figure.partition("</svg>")[0] + "</svg>")
        shown = {element.text for element in svg.iter("text")}
        assert {"plain", "ptdo", "ptdo+sinks"} <= shown
    assert "nan" not in page.lower().replace("nanoseconds", "")
    assert "http" not in page.replace("http-equiv", "")


def test_the_command_of_a_report_repeats_it(run_json: Callable[..., dict[str, Any]], tiny: str, tmp_path: Path) -> None:
    """Also with techniques of one's own, and options that are flags."""
    modules: list[str] = []
    for name in ("first", "second"):
        text = f"from twostroke.methods import Plain\nclass One(Plain, name='the {name}'): pass\n"
        (tmp_path / f"{name}.py").write_text(text)
        modules += ["--method-module", str(tmp_path / f"{name}.py")]
    flags = ("--kv-reserve", "--no-timings", "--ignore-eos", "--raw", "--measure", "answers")
    facts = run_json(
        "eval",
        "nameindex",
        "-m",
        tiny,
        *SMALL,
        *modules,
        *flags,
        "--methods",
        "plain,the first,the second,tova",
        "--budget",
        0.5,
    )
    assert "tova:ratio=0.5" in json.dumps(facts["settings"])
    _, *words = shlex.split(facts["command"])
    again = run_json(*words)
    for name in ("first", "second"):
        methods.METHODS.pop(f"the {name}")
    assert again["command"] == facts["command"]
    assert (again["settings"], again["n"]) == (facts["settings"], 3)
    assert all(flag in words for flag in (*modules, *flags))


def test_a_table_for_people(run: Callable[..., Result], tiny: str) -> None:
    result = run("eval", "nameindex", "-m", tiny, *SMALL, "--methods", "plain,repeat:times=3,keep=all")
    assert result.exit_code == 0, result.output
    for words in ("repeat:times=3,keep=all", "right", "surprise per token", ", 3 items"):
        assert words in result.stdout


def test_methods_are_spelled() -> None:
    assert split_methods("plain,repeat:times=3,keep=all, ptdo+sinks,ptdo:sinks=8") == [
        "plain",
        "repeat:times=3,keep=all",
        "ptdo+sinks",
        "ptdo:sinks=8",
    ]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("nameindex", "--methods", "ptd"), 1, "there is no method 'ptd'; there are attention-matching, best-of"),
        (("nameindex", "--methods", "ptdo:sink=3"), 1, "no parameter 'sink'"),
        (("nameindex", "--methods", "ptdo:sinks"), 2, "key=value"),
        (("nameindex", "--methods", "ptdo:sinks=1,sinks=2"), 2, "sinks is given twice"),
        (("nameindex", "--measure", "kl"), 1, "no measure 'kl'"),
        (("nameindex", "--names", 0), 1, "nameindex: names must be an integer from 1 to 10000"),
        (("nameindex", "--budget", 25), 2, "'25' has what is no share from 0 to 1"),
        (("nameindex", "--budgets", "0.5,nan"), 2, "'0.5,nan' has what is no share from 0 to 1"),
        (("arc-easy", "--order", "backwards"), 1, "order must be one of options, question"),
        (("longform", "--measure", "answers,likelihood"), 1, "likelihood cannot be measured"),
    ],
)
def test_bad_input(run: Callable[..., Result], tiny: str, arguments: tuple[Any, ...], code: int, message: str) -> None:
    result = run("eval", *arguments, "-m", tiny)
    assert result.exit_code == code
    assert message in result.stderr
