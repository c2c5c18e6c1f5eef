"""The page of an explanation in the same browser: walked by keys, at a phone's width, down to a cell's arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE_S
from tests.study.explain import test_page
from twostroke.study.explain.explanation import Explanation
from twostroke.study.explain.html_page import write_page

made = test_page.made


@pytest.fixture
def opened(browser: Any, made: Explanation, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """A function that opens the page; at the end, no script may have complained."""
    write_page(tmp_path / "page.html", made)
    complaints: list[str] = []
    contexts: list[Any] = []

    def open_page(name: str, **settings: Any) -> Any:
        contexts.append(browser.new_context(offline=True, **settings))
        tab = contexts[-1].new_page()
        tab.set_default_timeout(1000 * PATIENCE_S)
        tab.on("pageerror", lambda error: complaints.append(str(error)))
        tab.on("console", lambda line: complaints.append(line.text) if line.type == "error" else None)
        tab.goto(f"{(tmp_path / 'page.html').as_uri()}#{name}")
        return tab

    yield open_page
    for context in contexts:
        context.close()
    assert not complaints


def shows(tab: Any, selector: str, text: str) -> None:
    """Wait until the page shows it: the address changes first, and the page draws when it is told of that later."""
    tab.wait_for_function(
        "([selector, text]) => document.querySelector(selector)?.innerText.includes(text)", arg=[selector, text]
    )


STEPS = ("tokens", "embedding", "prefill", "attention", "layers", "decode", "cache", "method")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_step_fits_a_phone(opened: Callable[..., Any], scheme: str) -> None:
    tab = opened("tokens", color_scheme=scheme, viewport={"width": 360, "height": 700})
    for i, name in enumerate(STEPS):
        shows(tab, "#place", f"{i + 1} of {len(STEPS)}")
        assert tab.evaluate("location.hash") == f"#{name}"
        assert tab.evaluate("document.documentElement.scrollWidth") <= 360
        tab.keyboard.press("ArrowRight")
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
    shows(tab, "main .panel", "The score")
    arithmetic = made.attention.arithmetic
    assert arithmetic is not None
    text = panel.inner_text()
    score, weight = arithmetic.scores[head][row][column], made.attention.heads[head].weights[row][column]
    assert f"the engine's score is {score:.4f}" in text
    assert f"the engine's weight is {weight:.4f}" in text
    tab.keyboard.press("Escape")
    assert "Click a cell" in panel.inner_text()


def test_a_token_leads_to_its_row_or_its_step(opened: Callable[..., Any], made: Explanation) -> None:
    tab = opened("tokens")
    tab.locator("#tokens .token").nth(5).click()
    shows(tab, "main .panel", "looks at")
    assert tab.evaluate("location.hash") == "#attention"
    assert tab.locator(".map td[aria-selected=true]").count() == 1
    tab.locator("#tokens .token").nth(len(made.tokens) + 2).click()
    shows(tab, "main .panel", f"as entry {made.decode[2].token_in.index}")
    assert tab.evaluate("location.hash") == "#decode"


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
