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

from tests.short_files import short_files
from twostroke.cli.app import app
from twostroke.study.charts import HEIGHT, WIDTH, Axis, Series, line_chart
from twostroke.study.plan.account import account
from twostroke.study.plan.changes import ChangeLimits
from twostroke.study.plan.loads import drawn_traffic
from twostroke.study.plan.page.page import render
from twostroke.study.plan.page.plots import load_plots, plots
from twostroke.study.plan.plan import RequestProfile, make_plan
from twostroke.study.plan.search import Advice, LoadSearch, advise
from twostroke.study.plan.service import LoadSimulator
from twostroke.study.roofline.machines import MachineSpec, find_machine, machines
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.named_models import specifications
from twostroke.study.roofline.techniques import Companion, techniques
from twostroke.study.roofline.weight_formats import FORMATS, WeightFormat
from twostroke.study.traffic.objectives import Objectives

LLAMA = specifications()["llama-3-70b"]
FEW = ("bf16", "int8-w8a8")
LIMITS = ChangeLimits(8, tuple(FORMATS), techniques(LLAMA))


@pytest.fixture(params=[1, 8])
def made(request: pytest.FixtureRequest) -> Advice:
    """One that does not fit, with its advice; and one with nothing to do."""
    load = RequestProfile(4096, 256, ttft_ms=500, itl_ms=50)
    return advise(make_plan(LLAMA, find_machine("h100"), FORMATS["bf16"], request.param, load), LIMITS)


def svgs(page: str) -> list[ElementTree.Element]:
    return [ElementTree.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


def test_the_page_is_whole(made: Advice) -> None:
    """Four plots that are well-formed, the verdict and the figures; and nothing that would be fetched."""
    plan = made.asked.plan
    page = render(made, account(made, LIMITS))
    assert len(svgs(page)) == 4
    assert plan.verdict.capitalize() in page
    assert f"{plan.ttft_ms:,.1f} ms" in page
    assert ("with more devices: tensor parallelism of 4" in page) == (plan.tp == 1)
    assert re.findall(r"""(?:src|href)\s*=|url\(|@import|fetch\(|XMLHttp""", page) == []
    first, tables = page.split("<details>")
    assert "class=tiles" in first
    assert "<svg" in first
    assert "<table" not in first
    assert "<h2>Each change alone, without queueing</h2>" in tables


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
    small = specifications()["smollm2-135m"]
    draft = replace(small, config=replace(small.config, vocab_size=model.vocab))
    limits = ChangeLimits(8, tuple(FORMATS), techniques(model, Companion(draft, FORMATS["bf16"])))
    technique = limits.techniques[data.draw(st.sampled_from(list(limits.techniques)))]
    advice = advise(make_plan(model, machine, weights, 1, load, technique), limits)
    page = render(advice, account(advice, limits))
    for svg in svgs(page):
        assert svg.findall("line[@class='grid']")
        for dot in svg.iter("circle"):
            assert 0 <= float(dot.attrib["cx"]) <= WIDTH
            assert 0 <= float(dot.attrib["cy"]) <= HEIGHT


def test_names_are_escaped() -> None:
    model = replace(LLAMA, name="<script>alert(1)</script>")
    advice = advise(make_plan(model, find_machine("h100"), FORMATS["bf16"], 8, RequestProfile(64, 8)), LIMITS)
    page = render(advice, account(advice, LIMITS))
    assert "<script>alert" not in page
    assert page.count("<script>") == 1


def test_points_tell_the_plan_s_figures(made: Advice) -> None:
    plan, way = made.asked.plan, made.same or made.more
    told = {title: svg for title, svg, _ in plots(plan, None if way is None else way.plan)}
    assert f"as planned: {plan.ttft_ms:.3g} ms at 4,096" in told["TTFT by length of the prompt"]
    assert f"as planned: {plan.itl_ms:.3g} ms at 1" in told["ITL by batch"]
    assert "prefill, 4,096 tokens" in told["Roofline"]
    assert "decode, batch 1 to 256, batch 64" in told["Roofline"]


@pytest.mark.parametrize(
    ("rate", "users", "verdict"),
    [(1.0, None, "nothing to do"), (1000.0, None, "cannot be served"), (None, 2, "misses")],
)
def test_the_page_shows_the_load(rate: float | None, users: int | None, verdict: str) -> None:
    """The answer, the advice, and plots of the load, whose points lie within them and tell the simulator's figures."""
    small = specifications()["llama-3-8b"]
    profile = RequestProfile(512, 16, ttft_ms=5000.0 if rate else 1.0)
    load = LoadSimulator(drawn_traffic(profile, rate, users, 1.0, False), Objectives(5.0 if rate else 0.001))
    limits = ChangeLimits(2, FEW, techniques(small))
    plan = make_plan(small, find_machine("h100"), FORMATS["bf16"], 1, profile)
    advice = LoadSearch(plan, limits, load).advice()
    page = render(advice, account(advice, limits, load), load)
    assert page.count("class='verdict") == 1
    assert verdict.capitalize() in page
    assert len(svgs(page)) >= 6
    for svg in svgs(page):
        for dot in svg.iter("circle"):
            assert 0 <= float(dot.attrib["cx"]) <= WIDTH
            assert 0 <= float(dot.attrib["cy"]) <= HEIGHT
    titles = [title for title, _, _ in load_plots(advice, load)]
    assert titles[:2] == (["TTFT by requests/s", "ITL by requests/s"] if rate else ["TTFT by users", "ITL by users"])


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


# Labels of a plot that overlap.
OVERLAPS = """() => [...document.querySelectorAll("svg")].flatMap((svg) => {
  const texts = [...svg.querySelectorAll("text")].map((one) => [one.textContent, one.getBoundingClientRect()]);
  return texts.flatMap(([text, a], i) => texts.slice(i + 1).filter(([, b]) =>
    a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom).map(([other]) => [text, other]));
})"""


@pytest.mark.parametrize(("load", "plots"), [((), 4), (("--tp", "4", "--rate", "1", "--output-tokens", "16"), 6)])
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
            assert page.evaluate(OVERLAPS) == []
            for command in page.locator("div.code").all():
                command.locator("button").click()
                whole = command.locator("pre").text_content()
                assert page.evaluate("getSelection().toString()").replace("\n", " ") == whole
                assert command.locator("pre").evaluate("one => one.scrollWidth <= one.clientWidth")
            dot = page.locator("svg circle:has(title)").nth(2)
            dot.scroll_into_view_if_needed()
            dot.hover(force=True)
            assert re.search(": .+ at ", dot.locator("title").text_content())
            assert dot.evaluate("one => one.matches(':hover')")
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
    assert "--html /no/such/plan.html: there is no directory /no/such" in done.output + str(done.exception)


def test_a_full_disk_leaves_the_page_before(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text("before")
    with short_files(1000):
        done = CliRunner().invoke(app, ["plan", "llama-3-8b", "--on", "h100", "--html", str(path)])
    assert done.exit_code == 1
    assert "error: File too large" in done.output
    assert path.read_text() == "before"
    assert list(tmp_path.iterdir()) == [path]
