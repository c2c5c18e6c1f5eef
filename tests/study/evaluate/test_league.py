"""The league: methods at several budgets, what they do for a server, and the page that orders them."""

from pathlib import Path
from xml.etree import ElementTree

import pytest
import typer

from tests.methods.watching import needs_native
from tests.study.evaluate.test_evaluation import TinyLLM, evaluation
from twostroke.api.llm import LLM
from twostroke.cli.eval import ContenderOptions
from twostroke.errors import InvalidRequest
from twostroke.study.charts import as_file
from twostroke.study.evaluate.contenders import Contender, at_budgets, contender
from twostroke.study.evaluate.measures.serving import MOST, TOKENS
from twostroke.study.evaluate.plots import by_bytes
from twostroke.study.evaluate.report import Figure, ReportTable, league, page, report
from twostroke.study.evaluate.summary import summarize
from twostroke.study.evaluate.tasks import NameIndex, Ruler

SVG = "{http://www.w3.org/2000/svg}"


def names(contenders: list[Contender]) -> list[str]:
    return [one.name for one in contenders]


def test_methods_at_budgets() -> None:
    asked = ContenderOptions("plain,tova,snapkv,streaming,partrep,finch:question=8,kvzip:ratio=0.3", budgets="0.5,0.1")
    assert names(asked.contenders(Ruler(length=1000))) == [
        *("plain", "tova:ratio=0.5", "tova:ratio=0.1", "snapkv:budget=500", "snapkv:budget=100"),
        *("streaming:window=496", "streaming:window=96", "partrep"),
        *("finch:question=8,ratio=0.5", "finch:question=8,ratio=0.1", "kvzip:ratio=0.3"),
    ]
    assert names(ContenderOptions("tova,snapkv").contenders(NameIndex(4))) == ["tova", "snapkv"]
    with pytest.raises(InvalidRequest, match="snapkv counts entries: give it budget and no budgets"):
        at_budgets("snapkv", [0.5], None)


@pytest.mark.parametrize("budgets", ["0", "1.5", "half", "0.5,", "nan", "-1"])
def test_bad_budgets(budgets: str) -> None:
    with pytest.raises(typer.BadParameter, match="no share from 0 to 1"):
        ContenderOptions("tova", budgets=budgets).contenders(NameIndex(4))


@pytest.mark.parametrize("methods", ["plain,repeat,ptdo", "kvzip:ratio=0.3"])
def test_budgets_that_no_method_takes(methods: str) -> None:
    with pytest.raises(typer.BadParameter, match="none of the methods takes a budget"):
        ContenderOptions(methods, budgets="0.5").contenders(NameIndex(4))


@needs_native
def test_the_league(native_directory: Path, tmp_path: Path) -> None:
    llm = LLM(str(native_directory), backend="native", weights="int8", threads=1, kv_bytes=3 << 20)
    methods = [contender("plain"), *at_budgets("tova", [0.5, 0.1], None), contender("keydiff", budgets="ada")]
    changes = {"measures": ("answers", "divergence", "serving"), "limit": 3, "batch": 2}
    run = evaluation(llm, NameIndex(20), methods, **changes)
    lines = run.run(tmp_path)
    assert llm.pool.num_used == llm.engine.cached_pages(llm.pool), "no copy stays"
    served = [line.measures["serving"] for line in lines]
    assert [one["plain"]["itl_1_s"] is not None for one in served] == [True, False, True], "the first of each batch"
    for record in served[0].values():
        assert record["full_rate"] > 0
        assert 1 <= record["answers_at_once"] <= MOST
    # As many answers as there is room for: the pool has pages for that many values and their tokens, not for two more.
    pages = llm.pool.num_pages
    for name, record in served[0].items():
        kept = lines[0].measures["answers"][name]["kept_bytes"] // llm.pool.page_bytes
        assert record["answers_at_once"] * kept < pages
        if record["answers_at_once"] < MOST:
            assert (record["answers_at_once"] + 2) * (kept + TOKENS // 16 + 2) > pages - 2 * kept
    assert served[0]["tova:ratio=0.1"]["answers_at_once"] > 2 * served[0]["plain"]["answers_at_once"]
    assert served[0]["tova:ratio=0.1"]["itl_16_s"] is not None
    again = evaluation(llm, NameIndex(20), methods, **changes).run(tmp_path)
    assert [line.dump() for line in again] == [line.dump() for line in lines], "resumed, not measured again"
    summary = summarize(run, lines)
    table, *figures = league(summary)
    assert isinstance(table, ReportTable)
    assert sorted(row[0] for row in table.rows) == sorted(names(methods))
    assert table.rows[0][0] == "plain" or "0.0%" in table.rows[0][3]
    assert [type(one) for one in figures] == [Figure, Figure]
    machine = {"machine": {"gpu": None, "cpu": "cpu", "cores": 1}, "date": "today"}
    assert "<h2>league</h2>" in page(report(summary, "command", machine))


def test_where_heads_cannot_be_gathered_only_times_alone_are_known(tiny_llm: TinyLLM) -> None:
    run = evaluation(tiny_llm("gemma3"), None, [contender("plain")], measures=("serving",), limit=1)
    record = run.run()[0].measures["serving"]["plain"]
    assert record["itl_1_s"] > 0
    assert (record["itl_16_s"], record["full_rate"]) == (None, None)


def test_lines_of_a_plot_are_techniques_with_their_options() -> None:
    asked = ("plain", "tova:ratio=0.5", "tova:ratio=0.1", "tova:budgets=ada,ratio=0.5")
    svg = as_file(by_bytes("right", dict.fromkeys(asked, (1.0, 0.5)), share=True))
    texts = [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]
    assert texts[:3] == ["plain", "tova", "tova:budgets=ada"]
