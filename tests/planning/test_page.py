"""The page of a plan: self-contained, with the plan's own figures, and quiet in a browser."""

import re
import shutil
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from twostroke.cli.app import app
from twostroke.planning.account import account
from twostroke.planning.advice import advise
from twostroke.planning.levers import Limits
from twostroke.planning.machines import Machine, find_machine, machines
from twostroke.planning.models import specifications
from twostroke.planning.page.chart import HEIGHT, WIDTH, Axis, Series, chart
from twostroke.planning.page.page import render
from twostroke.planning.page.plots import plots
from twostroke.planning.plan import Plan, Workload, make_plan
from twostroke.planning.specification import Specification
from twostroke.planning.techniques import Companion, techniques
from twostroke.planning.weights import FORMATS, WeightFormat

LLAMA = specifications()["llama-3-70b"]
LIMITS = Limits(8, tuple(FORMATS), techniques(LLAMA))


@pytest.fixture(params=[1, 8])
def made(request: pytest.FixtureRequest) -> tuple[Plan, Plan | None]:
    """One that does not fit, with its advice; and one with nothing to do."""
    load = Workload(4096, 256, ttft_ms=500, itl_ms=50)
    plan = make_plan(LLAMA, find_machine("h100"), FORMATS["bf16"], request.param, load)
    advised = advise(plan, LIMITS)
    return plan, advised.plan if advised.steps else None


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_is_whole(made: tuple[Plan, Plan | None]) -> None:
    """Four plots that are well-formed, the verdict and the figures; and nothing that would be fetched."""
    plan, advised = made
    page = render(plan, advised, account(plan, LIMITS))
    assert len(svgs(page)) == 4
    assert plan.verdict.capitalize() in page
    assert f"{plan.ttft_ms:,.1f} ms" in page
    assert ("tensor parallelism of 4" in page) == (plan.tp == 1)
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttp""", page) == []


@settings(max_examples=25)
@given(
    st.sampled_from(list(specifications().values())),
    st.sampled_from(list(machines().values())),
    st.sampled_from(list(FORMATS.values())),
    st.builds(
        Workload,
        prompt=st.sampled_from([1, 2, 100, 900]),
        output=st.integers(1, 900),
        concurrency=st.sampled_from([1, 2, 40]),
        ttft_ms=st.sampled_from([None, 1.0, 500.0]),
        itl_ms=st.sampled_from([None, 1.0, 50.0]),
    ),
    st.data(),
)
def test_every_plan_has_a_page(
    model: Specification, machine: Machine, weights: WeightFormat, load: Workload, data: st.DataObject
) -> None:
    """Whatever is planned: advice ends, plots are well-formed, and every point lies within its plot."""
    limits = Limits(8, tuple(FORMATS), techniques(model, Companion(specifications()["smollm2-135m"], FORMATS["bf16"])))
    technique = limits.techniques[data.draw(st.sampled_from(list(limits.techniques)))]
    plan = make_plan(model, machine, weights, 1, load, technique)
    advised = advise(plan, limits)
    page = render(plan, advised.plan if advised.steps else None, account(plan, limits))
    for svg in svgs(page):
        assert svg.findall("line[@class='grid']")
        for dot in svg.iter("circle"):
            assert 0 <= float(dot.attrib["cx"]) <= WIDTH
            assert 0 <= float(dot.attrib["cy"]) <= HEIGHT


def test_names_are_escaped() -> None:
    load = Workload(64, 8)
    model = replace(LLAMA, name="<script>alert(1)</script>")
    plan = make_plan(model, find_machine("h100"), FORMATS["bf16"], 8, load)
    page = render(plan, None, account(plan, LIMITS))
    assert "<script>alert" not in page
    assert page.count("<script>") == 1


def test_points_tell_the_plan_s_figures(made: tuple[Plan, Plan | None]) -> None:
    plan, advised = made
    told = {title: svg for title, svg, _ in plots(plan, advised)}
    assert f"as planned: {plan.ttft_ms:.3g} ms at 4,096" in told["TTFT by length of the prompt"]
    assert f"as planned: {plan.itl_ms:.3g} ms at 1" in told["ITL by batch"]
    assert "prefill, 4,096 tokens" in told["Roofline"]
    assert "decode, batch 1 to 256, batch 64" in told["Roofline"]


def test_points_lie_where_their_values_are() -> None:
    """On a logarithmic axis equal ratios, on a linear one equal differences, take equal room."""
    x, y = Axis("x", str), Axis("y", str, logarithmic=False)
    svg = ElementTree.fromstring(chart("t", x, y, [Series("s", [(1, 0), (10, 5), (100, 10)], 0)]))
    places = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in svg.iter("circle")]
    for axis in (0, 1):
        first, second, third = (place[axis] for place in places)
        assert second - first == pytest.approx(third - second, abs=0.11)
        assert first != second


def test_in_a_browser(tmp_path: Path) -> None:
    """No message and no request; it fits a phone; a point tells its values; and both schemes can be chosen."""
    sync_api: Any = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if (browser := shutil.which("chromium")) is None:
        pytest.skip("no chromium: apt-get install chromium")
    path = tmp_path / "plan.html"
    command = ["plan", "llama-3-70b", "--on", "h100", "--prompt-tokens", "4096", "--ttft-ms", "500", "--itl-ms", "50"]
    done = CliRunner().invoke(app, [*command, "--html", str(path)])
    assert done.exit_code == 0, done.output
    with sync_api.sync_playwright() as play:
        chromium = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        try:
            page = chromium.new_page(viewport={"width": 390, "height": 800}, color_scheme="light")
            said: list[str] = []
            page.on("console", lambda message: said.append(message.text))
            page.on("pageerror", lambda error: said.append(str(error)))
            page.on("request", lambda request: said.append(request.url))
            page.goto(path.as_uri())
            assert said == [path.as_uri()]
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            assert page.locator("svg").count() == 4
            dot = page.locator("svg circle[data-told]").nth(2)
            dot.scroll_into_view_if_needed()
            dot.hover(force=True)
            assert page.locator("#told").inner_text() == page.locator("circle.near").get_attribute("data-told")
            paper = "getComputedStyle(document.body).backgroundColor"
            light = page.evaluate(paper)
            page.click("#theme")
            assert page.evaluate(paper) != light
            page.click("#theme")
            assert page.evaluate(paper) == light
        finally:
            chromium.close()


def test_a_file_that_cannot_be_written_is_told() -> None:
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", "--on", "h100", "--html", "/no/such/plan.html"])
    assert done.exit_code == 1
    assert "/no/such/plan.html cannot be written" in done.output + str(done.exception)
