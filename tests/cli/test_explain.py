"""`twostroke explain`: the value of `explain` as JSON, on a terminal and as a page."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from typer.testing import Result

from twostroke.api.llm import LLM
from twostroke.study.explain.explanation import Explanation

TEXT = "the quick brown fox"
FEW = ("--raw", "--max-tokens", 4, "--ignore-eos")


def test_json(run_json: Callable[..., dict[str, Any]], tiny: str) -> None:
    facts = run_json("explain", TEXT, "-m", tiny, *FEW, "--layer", 2, "--head", 1, "--naive", 2)
    assert set(facts) == set(Explanation.__dataclass_fields__)
    with LLM(tiny, kv_bytes=16 << 20, threads=1) as llm:
        answer = llm.generate([TEXT], max_tokens=4, ignore_eos=True)[0]
        assert [token["id"] for token in facts["tokens"]] == llm.tokenizer.encode(TEXT)
    assert facts["text"] == answer.text
    made = [facts["prefill"]["token"]["id"], *(step["token_out"]["id"] for step in facts["decode"])]
    assert made == [token.id for token in answer.tokens]
    assert (facts["attention"]["layer"], facts["attention"]["head"]) == (2, 1)
    assert facts["both_ways"]["steps"] == 2
    assert facts["method"] is None


def test_terminal(run: Callable[..., Result], tiny: str) -> None:
    short = run("explain", "a\x1b[31m fox", "-m", tiny, *FEW)
    assert short.exit_code == 0
    assert "\x1b" not in short.stdout, "a prompt cannot write to the terminal"
    assert r"\x1b" in short.stdout
    assert "What attends to what: layer 1, the mean over heads" in short.stdout
    assert "The same tokens" in short.stdout
    everything = run("explain", TEXT, "-m", tiny, *FEW, "--all", "--method", "repeat", "--head", 3)
    assert everything.exit_code == 0
    for line in ("layer 1, head 3", "What repeat does to the cache", "hidden + attention", "products of layers"):
        assert line in everything.stdout
    assert len(everything.stdout.splitlines()) > len(short.stdout.splitlines())
    assert "without the cache" not in run("explain", TEXT, "-m", tiny, *FEW, "--naive", 0).stdout


def test_one_token_is_no_decode(run: Callable[..., Result], tiny: str) -> None:
    result = run("explain", TEXT, "-m", tiny, "--raw", "--max-tokens", 1)
    assert "is the whole answer" in result.stdout


def test_html(run: Callable[..., Result], tiny: str, tmp_path: Path) -> None:
    result = run("explain", TEXT, "-m", tiny, *FEW, "--html", tmp_path / "page.html")
    assert result.exit_code == 0
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    data = text.partition('id="data">')[2].partition("</script>")[0]
    assert json.loads(data)["prompt"] == TEXT
    assert "page.html" in result.stderr


def test_errors_come_before_the_model_is_loaded(run: Callable[..., Result], tiny: str, tmp_path: Path) -> None:
    directory = run("explain", TEXT, "-m", "/nowhere", "--html", tmp_path)
    assert "for '--html'" in directory.stderr
    gone = run("explain", TEXT, "-m", "/nowhere", "--html", tmp_path / "missing" / "page.html")
    assert gone.exit_code == 1
    assert "missing" in gone.stderr
    assert "/nowhere" not in gone.stderr
    assert run("explain", "-m", "/nowhere", stdin="").exit_code == 2
    result = run("explain", TEXT, "-m", tiny, *FEW, "--layer", 3)
    assert result.exit_code == 1
    assert "layer must be from 0 to 2" in result.stderr
    assert "Traceback" not in result.stderr
