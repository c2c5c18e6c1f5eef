"""A button counts as pressed although the page has news while it is: the page holds still until it is let go."""

import re
from typing import Any

import pytest

from tests.page.conftest import Screen
from tests.server.conftest import Serving, eventually
from tests.server.long_answers import LONG


def press(screen: Screen, button: Any) -> None:
    """Put the mouse on a button and hold it down; again if it has moved before it was pressed."""
    while True:
        button.scroll_into_view_if_needed()
        box = button.bounding_box()
        screen.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        screen.page.mouse.down()
        if button.evaluate("(node) => node.matches(':active')"):
            return
        screen.page.mouse.up()


def news(screen: Screen, server: Serving) -> None:
    """Wait until the answer has grown by some lines, and the page has been told."""

    def tokens() -> float:
        with server.http() as http:
            [count] = re.findall(r'^twostroke_tokens_total\{kind="output"\} (\S+)', http.get("/metrics").text, re.M)
        return float(count)

    before = tokens()
    eventually(lambda: tokens() >= before + 40)
    screen.page.wait_for_timeout(200)


def test_while_an_answer_grows(screen: Screen, server: Serving) -> None:
    """Nothing moves under the mouse; what came meanwhile is shown afterwards."""
    screen.extra(LONG)
    screen.ask("Who?", wait=False)
    screen.page.wait_for_selector(".markdown:has-text('o')")
    press(screen, screen.find("button:text('Tokens')"))
    held = screen.find(".markdown").text_content()
    news(screen, server)
    assert screen.find(".markdown").text_content() == held
    screen.page.mouse.up()
    screen.page.wait_for_selector(".tokens .token")
    eventually(lambda: len(screen.find(".markdown").text_content()) > len(held) + 100)
    screen.page.click("#stop")
    screen.answered()


@pytest.mark.parametrize("button", [".user button:text('Copy')", "#list li:nth-child(2) .title"], ids=["turn", "list"])
def test_while_an_answer_ends(screen: Screen, server: Serving, button: str) -> None:
    """All turns, and the list of conversations, are drawn anew when it does."""
    screen.say("one")
    screen.ask("the other conversation")
    screen.page.click("#new")
    screen.extra(LONG)
    screen.ask("Who?", wait=False)
    eventually(lambda: server.llm.engine.num_running == 1)
    press(screen, screen.find(button))
    screen.page.keyboard.press("Escape")
    eventually(lambda: server.llm.engine.num_running == 0)
    screen.page.wait_for_timeout(200)
    screen.page.mouse.up()
    if "Copy" in button:
        eventually(lambda: screen.page.evaluate("navigator.clipboard.readText()") == "Who?")
        screen.answered()
    else:
        screen.page.wait_for_selector(".user .text:text('the other conversation')")


def test_a_press_that_is_let_go_elsewhere(screen: Screen, server: Serving) -> None:
    """It has pressed nothing, and the page goes on."""
    screen.extra(LONG)
    screen.ask("Who?", wait=False)
    screen.page.wait_for_selector(".markdown:has-text('o')")
    press(screen, screen.find("button:text('Tokens')"))
    screen.page.mouse.move(5, 400)
    screen.page.mouse.up()
    held = len(screen.find(".markdown").text_content())
    eventually(lambda: len(screen.find(".markdown").text_content()) > held + 100)
    assert screen.find(".tokens").count() == 0
    screen.page.click("#stop")
    screen.answered()
