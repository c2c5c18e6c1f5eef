"""The engine at work; keyboard, names for screen readers, themes, and a phone's width."""

import threading
from collections.abc import Callable

import pytest

from tests.page.conftest import Screen
from tests.server.conftest import Serving, eventually


def test_the_engine_at_work(screen: Screen, server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, seen = server.llm.pool, threading.Event()
    monkeypatch.setattr(server.llm.engine, "before_step", lambda _: seen.wait(0.1))
    screen.extra({"max_tokens": 300, "ignore_eos": True})
    screen.ask("the quick brown fox " * 10, wait=False)
    screen.page.wait_for_selector("#running-value:text('1')")
    screen.until("parseFloat(document.getElementById('rate-value').textContent) > 0")
    seen.set()
    screen.answered()
    eventually(lambda: pool.num_used == server.llm.engine.cached_pages(pool))
    text = (
        f"{pool.num_used} of {pool.num_pages} pages in use: 0 of one request, 0 shared, {pool.num_used} in the prefix"
    )
    screen.page.wait_for_selector(f"#pools .hint:text('{text}')")
    for name in ("ttft", "itl"):
        assert screen.find(f"#{name}-value").text_content().endswith(" ms")
    inked = "(all) => all.every((c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x))"
    assert screen.find("#itl-line, #rate-line, #steps, .map").evaluate_all(inked)
    screen.find("#steps").hover(position={"x": screen.find("#steps").bounding_box()["width"] - 3, "y": 50})
    assert screen.find("#steps").get_attribute("title").startswith("step ")
    screen.page.click("#show-engine")
    assert not screen.find("#engine").is_visible()


def test_a_page_that_nobody_sees_watches_nothing(screen: Screen, server: Serving) -> None:
    assert server.llm.engine.observer is not None
    screen.page.goto("about:blank")
    eventually(lambda: server.llm.engine.observer is None)


NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, canvas[role], [role=region]")]
  .filter((node) => node.checkVisibility())
  .filter((node) => !(node.textContent.trim() && node.tagName === "BUTTON") && !node.labels?.length)
  .filter((node) => !node.getAttribute("aria-label"))
  .map((node) => node.outerHTML)"""


def test_everything_has_a_name_and_the_keyboard_reaches_it(screen: Screen) -> None:
    screen.say("- a\n\n| b |\n|---|\n| c |")
    screen.ask("one")
    screen.page.click("#show-settings")
    assert screen.page.evaluate(NAMELESS) == []
    screen.page.click("#show-settings")
    assert screen.page.evaluate("document.querySelectorAll('h1').length") == 1
    screen.page.evaluate("document.activeElement.blur()")
    reached: list[str] = []
    for _ in range(30):
        screen.page.keyboard.press("Tab")
        name = "document.activeElement.id || document.activeElement.textContent"
        reached.append(screen.page.evaluate(name))
    for one in ("To the question", "show-engine", "Edit", "Tokens", "ask", "send", "new", "Answer again"):
        assert one in reached


def test_themes(open_page: Callable[..., Screen], server: Serving) -> None:
    def back(screen: Screen) -> str:
        return screen.page.evaluate("getComputedStyle(document.body).backgroundColor")

    screen = open_page(server.url, color_scheme="dark")
    assert back(screen) == "rgb(20, 23, 28)"
    for expected in ("Theme: dark", "Theme: light"):
        screen.page.click("#theme")
        assert screen.find("#theme").text_content() == expected
    assert back(screen) == "rgb(255, 255, 255)"
    screen.page.reload()
    assert back(screen) == "rgb(255, 255, 255)"


def test_a_phone(open_page: Callable[..., Screen], server: Serving) -> None:
    screen = open_page(server.url, viewport={"width": 360, "height": 640}, has_touch=True)
    screen.say("short")
    screen.ask("one " * 40)
    assert screen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert screen.find("#ask").is_visible()
    assert not screen.find("#engine").is_visible()
    screen.page.click("#show-engine")
    assert screen.find("#steps").is_visible()


def test_no_script_but_the_pages_own_runs(screen: Screen) -> None:
    tried = screen.page.evaluate(
        """() => {
          const script = document.createElement("script");
          try { script.textContent = "window.hacked = 1"; document.body.append(script); } catch {}
          try { document.body.insertAdjacentHTML("beforeend", "<p id=made>"); } catch {}
          return [window.hacked ?? null, document.getElementById("made")];
        }"""
    )
    assert tried == [None, None]
    screen.complaints.clear()  # the browser's, about these
