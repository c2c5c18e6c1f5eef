"""The page: one file, nothing from elsewhere, no text that acts; and walked through in Debian's Chromium."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import write_model
from twostroke.explain.explanation import Aspects, Explanation, as_json, explain
from twostroke.explain.page import page, write_page
from twostroke.llm import LLM
from twostroke.methods import method
from twostroke.sampling.params import SamplingParams

HOSTILE = "</script><script>document.title='gone'</script><!-- <b>fox</b> & \u2028\u202e over\ud800"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Explanation:
    directory = write_model("llama", tmp_path_factory.mktemp("page"))
    llm = LLM(str(directory), backend="reference", kv_bytes=8 << 20, threads=1)
    text = HOSTILE.replace("\ud800", "")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    aspects = Aspects(layer=1, naive=3, method=method("repeat"))
    return explain(llm, HOSTILE, llm.tokenizer.encode(text)[:40], params, aspects)


class Reader(html.parser.HTMLParser):
    """The elements of a page, with their attributes and texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs), []))
        self._open = True

    def handle_endtag(self, tag: str) -> None:
        self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.found[-1][2].append(data)


def test_one_file_without_anything_from_elsewhere(made: Explanation, tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", made)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    found = Reader(text).found
    assert not [attributes for _, attributes, _ in found if {"src", "href"} & set(attributes)]
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text)
    scripts = [(attributes, "".join(texts)) for tag, attributes, texts in found if tag == "script"]
    assert [attributes.get("id") for attributes, _ in scripts] == ["data", None]
    assert json.loads(scripts[0][1]) == json.loads(json.dumps(as_json(made)))
    (policy,) = [str(one["content"]) for _, one, _ in found if one.get("http-equiv") == "Content-Security-Policy"]
    style = next("".join(texts) for tag, _, texts in found if tag == "style")
    for kind, code in (("script", scripts[1][1]), ("style", style)):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def test_texts_are_never_markup(made: Explanation) -> None:
    text = page(made)
    assert "<script>document" not in text
    assert "<b>fox" not in text
    assert text.count("</script>") == 2
    assert "\u2028" not in text
    code = "".join(texts[0] for tag, attributes, texts in Reader(text).found if tag == "script" and not attributes)
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", code)


# In a browser ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright (pip install playwright)")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("needs Chromium (apt-get install chromium)")
    with sync_api.sync_playwright() as playwright:
        # As root, Chromium runs only without its sandbox.
        started = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, made: Explanation, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that opens the page; at the end, no script may have complained."""
    write_page(tmp_path / "page.html", made)
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(name: str, **settings: Any) -> Any:
        contexts.append(browser.new_context(offline=True, **settings))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(15_000)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        tab.goto(f"{(tmp_path / 'page.html').as_uri()}#{name}")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


STEPS = ("tokens", "embedding", "prefill", "attention", "layers", "decode", "cache", "method")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_step_fits_a_phone(opened: Callable[..., Any], scheme: str) -> None:
    tab = opened("tokens", color_scheme=scheme, viewport={"width": 360, "height": 700})
    for i, name in enumerate(STEPS):
        assert tab.evaluate("location.hash") == f"#{name}"
        tab.wait_for_function("document.querySelector('nav [aria-current]') !== null")
        assert tab.locator("#place").inner_text() == f"{i + 1} of {len(STEPS)}"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        tab.keyboard.press("ArrowRight")
        tab.wait_for_timeout(50)
    tab.go_back()
    tab.wait_for_function("location.hash === '#cache'")
    tab.locator("#previous").click()
    tab.wait_for_function("location.hash === '#decode'")


def test_from_a_cell_to_its_arithmetic_and_back(opened: Callable[..., Any], made: Explanation) -> None:
    tab = opened("attention")
    row, column, head = 7, 3, 2
    cells = tab.locator(".map tr").nth(row).locator("td")
    cells.nth(column).hover()
    mean = next(one for one in made.attention.layers if one.layer == 1)
    share = 100 * mean.weights[row][column]
    assert (f" {share:.2f} %" if share < 10 else f" {share:.1f} %") in tab.locator("p[role=status]").inner_text()
    cells.nth(column).click()
    panel = tab.locator(".panel")
    assert f"mean of {made.model.heads} heads" in panel.inner_text()
    panel.locator("tr.choice").nth(head).click()
    tab.wait_for_function("document.querySelector('.panel').innerText.includes('The score')")
    arithmetic = made.attention.arithmetic
    assert arithmetic is not None
    text = panel.inner_text()
    score, weight = arithmetic.scores[head][row][column], made.attention.heads[head].weights[row][column]
    assert f"the engine's score is {score:.4f}" in text
    assert f"the engine's weight is {weight:.4f}" in text
    tab.keyboard.press("Escape")
    assert "Click a cell" in panel.inner_text()


def test_cells_are_reached_by_the_keyboard(opened: Callable[..., Any]) -> None:
    tab = opened("attention")
    tab.locator(".map td[tabindex='0']").focus()
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "Enter"):
        tab.keyboard.press(key)
    assert "looks at" in tab.locator(".panel").inner_text()
    assert tab.evaluate("location.hash") == "#attention", "arrow keys in the map do not leave it"


def test_a_hostile_prompt_is_text(opened: Callable[..., Any], made: Explanation) -> None:
    tab = opened("tokens")
    assert tab.title().startswith("Twostroke: </script>")
    shown = "".join(tab.locator("#tokens .token").all_inner_texts())
    assert "</script>" in shown
    assert "\u202e" not in shown
    assert tab.locator("main b").count() == 0
    assert tab.evaluate("document.scripts.length") == 2
