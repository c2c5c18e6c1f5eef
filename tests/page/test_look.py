"""How texts are shown, whatever they are, and the engine at work; keyboard, themes and a phone's width."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.page.conftest import Screen
from tests.server.conftest import Serving, eventually

HOSTILE = """<script>window.hacked = 1</script>
<img src=x onerror="window.hacked = 2"> [a link](javascript:window.hacked=3) [b](https://x.example "title")

<iframe srcdoc="<script>parent.hacked=4</script>"></iframe>

```html"><script>window.hacked = 5</script>
<b>bold</b>
```"""
ARABIC = "مرحبا بالعالم **123** abc"
OVERRIDE = "user\u202etxt.exe\u2066"


def test_markup_is_text(screen: Screen) -> None:
    """Through the whole way: the model is made to write it."""
    screen.say(HOSTILE)
    screen.ask("<b>Who</b> are you?")
    assert screen.page.evaluate("window.hacked") is None
    assert screen.find("#log").locator("script, img, iframe, b").count() == 0
    text = screen.find(".markdown").inner_text()
    for piece in ("<script>window.hacked = 1</script>", "onerror=", "<iframe srcdoc=", "<b>bold</b>", "javascript:"):
        assert piece in text
    links = screen.find(".markdown a").evaluate_all("(all) => all.map((a) => [a.href, a.rel, a.target])")
    assert links == [["https://x.example/", "noopener noreferrer nofollow", "_blank"]]
    assert screen.find(".user .text").text_content() == "<b>Who</b> are you?"


def answer(text: str) -> str:
    """A server's stream with this text, for texts that are longer than a tiny model's context."""
    chunk: dict[str, Any] = {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": "stop"}]}
    return f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize("text", ["x" * 200_000, ARABIC, OVERRIDE, "| a | b |\n|---|:-:|\n" + f"| {'y' * 5000} | z |"])
def test_any_text_keeps_its_place(screen: Screen, text: str) -> None:
    stream = answer(text)
    screen.page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=stream, content_type="text/event-stream")
    )
    screen.ask("go on")
    shown = screen.find(".markdown")
    assert shown.text_content().replace("*", "") == text.replace("*", "") or "<table" in shown.inner_html()
    assert screen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    box = screen.find("#composer").bounding_box()
    assert box["y"] + box["height"] <= 860
    if text == ARABIC:
        assert screen.page.evaluate("getComputedStyle(document.querySelector('.markdown p')).direction") == "rtl"
        assert screen.page.evaluate("getComputedStyle(document.querySelector('.facts')).direction") == "ltr"


RENDER = """async (text) => {
  const { MarkdownView, markdown } = await import("/page/markdown.js");
  const [whole, stream] = [document.createElement("div"), document.createElement("div")];
  whole.append(...markdown(text));
  const view = new MarkdownView(stream);
  const step = Math.max(1, Math.ceil(text.length / 40));
  for (let end = 0; end < text.length; end += step) view.show(text.slice(0, end));
  view.show(text);
  return [whole.innerHTML, stream.innerHTML];
}"""

MARKDOWN = {
    "**a** *b* ***c*** __d__ _e_ ~~f~~": [
        "<strong>a</strong> <em>b</em> <strong><em>c</em></strong>|<em><strong>c</strong></em>",
        "<strong>d</strong> <em>e</em> <del>f</del>",
    ],
    "2 * 3 * 4 snake_case_name **open": ["2 * 3 * 4 snake_case_name **open"],
    "`` a`b `` and `c": ['<code dir="ltr">a`b</code> and `c'],
    "1. a\n2. b\n   - c\n   - d\n\ntext": ["<li", 'start="1"', "<ul>", "text</p>"],
    "- a\n\n- b": ["<li"],
    "> a\n> b\n\nc": ["<blockquote", "<br>"],
    "a | b\n--|--\n1 | 2": ["<th ", "<td "],
    "see https://a.example/x_y_z. [t](http://b.example)": [
        'href="https://a.example/x_y_z"',
        'href="http://b.example/"',
    ],
    "\\*not\\* ![p](https://c.example/i.png)": ["*not*", ">image: p</a>"],
    "# one\n## two\n---\n***": ["<h3", "<h4", "<hr><hr>"],
    "~~~\na\n```\n~~~": ["a\n```"],
    "```js\nlet a = 1;\n\nlet b = 2;\n": ["let a = 1;\n\nlet b = 2;\n"],
    "[a [b] c": ["[a [b] c"],
    "a<br>b<br/>c<hr>": ["a<br>b<br>c&lt;hr&gt;"],
}


def test_markdown(screen: Screen) -> None:
    """Shown at once or as a stream, it is the same."""
    for text, pieces in MARKDOWN.items():
        whole, stream = screen.page.evaluate(RENDER, text)
        assert stream == whole, text
        for piece in pieces:
            assert any(one in whole for one in piece.split("|")) or piece in whole, (text, piece, whole)


PIECES = [
    "[",
    "*",
    "`",
    "> ",
    "- ",
    "**a ",
    "_a",
    "![](",
    "<b>",
    "|-",
    "http://",
    "[a](b",
    "`a``b",
    "*a* ",
    "a\n",
    "> a\n",
    "   - a\n",
    "a|b\n",
]


def test_markdown_takes_no_time_over_any_text(screen: Screen) -> None:
    """Playwright gives up after 15 s; what is quadratic takes minutes."""
    kept = screen.page.evaluate(
        """async ([pieces, count]) => {
          const { markdown } = await import("/page/markdown.js");
          return pieces.map((piece) => {
            const node = document.createElement("div");
            node.append(...markdown(piece.repeat(count)));
            return node.textContent.length;
          });
        }""",
        [PIECES, 30_000],
    )
    assert all(kept)


def test_the_engine_at_work(screen: Screen, server: Serving) -> None:
    pool = server.llm.pool
    screen.extra({"max_tokens": 300, "ignore_eos": True})
    screen.ask("the quick brown fox " * 10, wait=False)
    screen.page.wait_for_selector("#running-value:text('1')")
    screen.until("parseFloat(document.getElementById('rate-value').textContent) > 0")
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
