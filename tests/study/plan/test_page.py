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
from twostroke.study.charts import HEIGHT, WIDTH, Axis, Series, line_chart
from twostroke.study.plan.account import account
from twostroke.study.plan.advice import advise
from twostroke.study.plan.changes import ChangeLimits
from twostroke.study.plan.load import PlannedLoad, make_load
from twostroke.study.plan.load_account import load_facts
from twostroke.study.plan.load_advice import advise_load
from twostroke.study.plan.machines import MachineSpec, find_machine, machines
from twostroke.study.plan.models import specifications
from twostroke.study.plan.page.load_plots import load_plots
from twostroke.study.plan.page.page import render
from twostroke.study.plan.page.plots import ms, plots
from twostroke.study.plan.plan import Plan, RequestProfile, make_plan
from twostroke.study.plan.specification import ModelSpec
from twostroke.study.plan.techniques import Companion, techniques
from twostroke.study.plan.weights import FORMATS, WeightFormat
from twostroke.study.traffic.arrivals import ClosedLoop, OpenLoop
from twostroke.study.traffic.lengths import TokenRange
from twostroke.study.traffic.objectives import Objectives
from twostroke.study.traffic.workload_sampler import WorkloadSampler as Drawn

LLAMA = specifications()["llama-3-70b"]
LIMITS = ChangeLimits(8, tuple(FORMATS), techniques(LLAMA))


@pytest.fixture(params=[1, 8])
def made(request: pytest.FixtureRequest) -> tuple[Plan, Plan | None]:
    """One that does not fit, with its advice; and one with nothing to do."""
    load = RequestProfile(4096, 256, ttft_ms=500, itl_ms=50)
    plan = make_plan(LLAMA, find_machine("h100"), FORMATS["bf16"], request.param, load)
    advised = advise(plan, LIMITS)
    return plan, advised.after if advised.steps else None


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
        RequestProfile,
        prompt=st.sampled_from([1, 2, 100, 900]),
        output=st.integers(1, 240),  # so that a repeated prompt and its answer fit into every model
        concurrency=st.sampled_from([1, 2, 40]),
        ttft_ms=st.sampled_from([None, 1.0, 500.0]),
        itl_ms=st.sampled_from([None, 1.0, 50.0]),
    ),
    st.data(),
)
def test_every_plan_has_a_page(
    model: ModelSpec, machine: MachineSpec, weights: WeightFormat, load: RequestProfile, data: st.DataObject
) -> None:
    """Whatever is planned: advice ends, plots are well-formed, and every point lies within its plot."""
    draft = replace(specifications()["smollm2-135m"], vocab=model.vocab)
    limits = ChangeLimits(8, tuple(FORMATS), techniques(model, Companion(draft, FORMATS["bf16"])))
    technique = limits.techniques[data.draw(st.sampled_from(list(limits.techniques)))]
    plan = make_plan(model, machine, weights, 1, load, technique)
    advised = advise(plan, limits)
    page = render(plan, advised.after if advised.steps else None, account(plan, limits))
    for svg in svgs(page):
        assert svg.findall("line[@class='grid']")
        for dot in svg.iter("circle"):
            assert 0 <= float(dot.attrib["cx"]) <= WIDTH
            assert 0 <= float(dot.attrib["cy"]) <= HEIGHT


def test_names_are_escaped() -> None:
    load = RequestProfile(64, 8)
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


def under(rate: float | None, users: int = 0, outputs: int = 64) -> PlannedLoad:
    """A load of short prompts: with objectives that are missed where others wait."""
    plan = make_plan(LLAMA, find_machine("h100"), FORMATS["bf16"], 8, RequestProfile(1024, outputs))
    pattern = ClosedLoop(users) if rate is None else OpenLoop(rate)
    traffic = Drawn(300, TokenRange(512, 1536), TokenRange(outputs, outputs), seed=1).traffic(pattern)
    return make_load(plan, traffic, Objectives(0.3, 0.05))


@pytest.mark.parametrize(
    ("rate", "users", "verdict"),
    [
        (1.0, 0, "nothing to do"),
        (18.0, 0, "misses the objective"),
        (1000.0, 0, "cannot be served"),
        (None, 1, "nothing to do"),
        (None, 40, "misses the objective"),
    ],
)
def test_the_page_shows_the_load(rate: float | None, users: int, verdict: str) -> None:
    """The answer, the advice, and four more plots, whose points lie within them."""
    load = under(rate, users)
    advised = advise_load(load, LIMITS)
    facts = account(load.plan, LIMITS) | {"load": load_facts(load, LIMITS, advised)}
    page = render(load.plan, None, facts, advised)
    assert load.verdict == verdict
    assert f"under the load: {verdict}" in page
    assert all(step.change.name in page for step in advised.steps)
    assert (not advised.steps) == (verdict == "nothing to do")
    assert len(svgs(page)) == 8
    for svg in svgs(page):
        for dot in svg.iter("circle"):
            assert 0 <= float(dot.attrib["cx"]) <= WIDTH
            assert 0 <= float(dot.attrib["cy"]) <= HEIGHT


def test_points_tell_the_load_s_figures() -> None:
    load = under(2.0)
    assert load.served is not None
    told = {title: svg for title, svg, _ in load_plots(load, None)}
    assert f"p99: {ms(1e3 * load.served.ttft.wanted)} at 2" in told["TTFT by rate"]
    assert f"p50: {ms(1e3 * load.served.itl.p50)} at 2" in told["ITL by rate"]
    assert f"prefill, of the time: {load.served.prefill_share:.0%} at 2" in told["Utilization by rate"]
    assert f"sequences: {load.served.sequences:.2g} at 2" in told["Users by rate"]
    assert f"highest, {load.max_rate:.3g}/s" in told["TTFT by rate"]
    assert "objective, 300 ms" in told["TTFT by rate"]
    closed = under(None, 3)
    assert closed.closed is not None
    told = {title: svg for title, svg, _ in load_plots(closed, None)}
    assert f"as planned: {ms(1e3 * closed.closed.ttft_s)} at 3" in told["TTFT by users"]
    assert f"as planned: {closed.closed.rate:.2g} at 3" in told["Requests by users"]


def test_answers_of_one_token_have_no_plot_of_those_who_decode() -> None:
    assert [title for title, _, _ in load_plots(under(2.0, outputs=1), None)] == [
        "TTFT by rate", "ITL by rate", "Utilization by rate",
    ]  # fmt: skip
    assert len(list(load_plots(under(None, 3, outputs=1), None))) == 3


def test_points_lie_where_their_values_are() -> None:
    """On a logarithmic axis equal ratios, on a linear one equal differences, take equal room."""
    x, y = Axis("x", str), Axis("y", str, logarithmic=False)
    svg = ElementTree.fromstring(line_chart("t", x, y, [Series("s", [(1, 0), (10, 5), (100, 10)], 0)]))
    places = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in svg.iter("circle")]
    for axis in (0, 1):
        first, second, third = (place[axis] for place in places)
        assert second - first == pytest.approx(third - second, abs=0.11)
        assert first != second


# Texts, lines and points of the page whose contrast with what is behind them is too low (WCAG 2.2, 1.4.3 and 1.4.11).
FAINT = """() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).slice(0, 3).map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
  const light = (colour) => { const [r, g, b] = parts(colour); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const contrast = (one, other) => {
    const [low, high] = [light(one), light(other)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const found = [], paper = getComputedStyle(document.body).backgroundColor;
  const check = (which, property, least) => {
    for (const one of document.querySelectorAll(which)) {
      let behind = one;
      while (behind && getComputedStyle(behind).backgroundColor === "rgba(0, 0, 0, 0)") behind = behind.parentElement;
      const back = behind ? getComputedStyle(behind).backgroundColor : paper;
      const ratio = contrast(getComputedStyle(one)[property], back);
      if (ratio < least) found.push([which, one.textContent || one.getAttribute("class"), ratio]);
    }
  };
  check("p, li, td, th, pre, h1, h2, h3, figcaption", "color", 4.5);
  check("svg text", "fill", 4.5);
  check("svg polyline", "stroke", 3);
  check("svg circle", "fill", 3);
  return found;
}"""


@pytest.mark.parametrize(("load", "plots"), [((), 4), (("--rate", "1"), 8)])
def test_in_a_browser(tmp_path: Path, load: tuple[str, ...], plots: int) -> None:
    """No message and no request; it fits a phone; a point tells its values; both schemes can be chosen, and read."""
    sync_api: Any = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    if (browser := shutil.which("chromium")) is None:
        pytest.skip("no chromium: apt-get install chromium")
    path = tmp_path / "plan.html"
    command = ["plan", "llama-3-70b", "--on", "h100", "--prompt-tokens", "4096", "--ttft-ms", "500", "--itl-ms", "50"]
    done = CliRunner().invoke(app, [*command, *load, "--html", str(path)])
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
            assert page.locator("svg").count() == plots
            dot = page.locator("svg circle[data-told]").nth(2)
            dot.scroll_into_view_if_needed()
            dot.hover(force=True)
            assert page.locator("#told").inner_text() == page.locator("circle.near").get_attribute("data-told")
            paper = "getComputedStyle(document.body).backgroundColor"
            light = page.evaluate(paper)
            assert page.evaluate(FAINT) == []
            page.click("#theme")
            assert page.evaluate(paper) != light
            assert page.evaluate(FAINT) == []
            page.click("#theme")
            assert page.evaluate(paper) == light
        finally:
            chromium.close()


def test_a_file_that_cannot_be_written_is_told() -> None:
    done = CliRunner().invoke(app, ["plan", "llama-3-8b", "--on", "h100", "--html", "/no/such/plan.html"])
    assert done.exit_code == 1
    assert "/no/such/plan.html cannot be written" in done.output + str(done.exception)
