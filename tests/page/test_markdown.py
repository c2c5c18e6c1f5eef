"""How answers are shown, whatever they are: hostile, in any script, by CommonMark's examples, formulas and code."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import Screen

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
    "```js\nlet a = 1;\n\nlet b = 2;\n": ["let a = 1;\n\nlet b = 2;</code>"],
    "[a [b] c": ["[a [b] c"],
    "a<br>b<br/>c<hr>": ["a<br>b<br>c&lt;hr&gt;"],
    "[https://x.example](https://x.example)": ['href="https://x.example/"', ">https://x.example</a></p>"],
    "- [x] a\n- [ ] **b**": ['<li class="task"><input type="checkbox" disabled="" checked="" ', '="to do"> <strong>b'],
    "a[^1] b[^2]\n\n[^1]: one\n[^2]: two": ["a<sup>[1]</sup>", "<section", "<li><p>two"],
    "[a][b]\n\ntext\n\n[b]: https://b.example": ['<a href="https://b.example/"'],
    "$5 and 6$, $5-$10, \\$x$, `$x$`, $ x$, $x $": ["$5 and 6$, $5-$10, $x$, <code", "$ x$, $x $"],
    "- \u0645\u0631\u062d\u0628\u0627\n- b": ['<ul dir="auto"><li>'],
    "| \u0645\u0631\u062d\u0628\u0627 | b |\n|---|--:|\n| 1 | 2 |": ['dir="auto"><table'],
}


def test_markdown(screen: Screen) -> None:
    """Shown at once or as a stream, it is the same."""
    for text, pieces in MARKDOWN.items():
        whole, stream = screen.page.evaluate(RENDER, text)
        assert stream == whole, text
        for piece in pieces:
            assert any(one in whole for one in piece.split("|")) or piece in whole, (text, piece, whole)


def test_headings_and_tables_look_as_they_are_read(screen: Screen) -> None:
    """A heading is larger than those below it and the text; a table in Arabic begins on the right."""
    made = (
        "".join(f"{'#' * level} h{level}\n\n" for level in range(1, 7))
        + "text\n\n| \u0645\u0631 | b |\n|---|---|\n| 1 | 2 |"
    )
    looks = screen.page.evaluate(
        """async (text) => {
          const { markdown } = await import("/page/markdown.js");
          const node = document.createElement("div");
          node.className = "markdown";
          node.append(...markdown(text));
          document.getElementById("log").append(node);
          const [first, second] = [...node.querySelectorAll("th")].map((one) => one.getBoundingClientRect().x);
          const size = (one) => parseFloat(getComputedStyle(one).fontSize);
          return [[...node.querySelectorAll("h3, h4, h5, h6, p")].map(size), first > second];
        }""",
        made,
    )
    assert looks[0] == sorted(looks[0], reverse=True)
    assert looks[0][0] > looks[0][1] > looks[0][2] > looks[0][-1]
    assert looks[1]


def test_formulas(screen: Screen) -> None:
    """In every form in which models write them; what cannot be read stays as it is written."""
    texts = {
        r"so \(x^2\) is": "<msup><mi>x</mi><mn ",
        "\\[\n\\frac{a}{b}\n\\]\nand": "<mfrac><mi>a</mi><mi>b</mi></mfrac>",
        "- a\n\n  $$\n  \\sum_i x_i\n  $$": "<munder>",
        "text $$x$$ and $y_1$.": "<msub><mi>y</mi><mn",
        "| a |\n|---|\n| \\(x\\) |": "<mi>x</mi>",
        r"\(\href{javascript:alert(1)}{x} \unknown{\)": r"\(\href{javascript:alert(1)}{x} \unknown{\)",
        r"\sideset{}{'}\(\sideset{_1^2}{_3^4}\prod \class{a}{b}\)": "\\sideset",
    }
    screen.page.evaluate("import('/page/math.js').then(({ loadMath }) => loadMath().then(() => null))")
    for text, piece in texts.items():
        whole, stream = screen.page.evaluate(RENDER, text)
        assert piece in whole, (text, whole)
        assert stream == whole
        assert "href=" not in whole


def test_code_is_coloured_and_a_long_listing_follows(screen: Screen) -> None:
    shown = screen.page.evaluate(
        """async () => {
          const { MarkdownView } = await import("/page/markdown.js");
          await import("/page/vendor/highlight.js");
          const node = document.createElement("div");
          document.getElementById("log").append(node);
          const view = new MarkdownView(node);
          view.show("```python\\nx = 1");
          await new Promise((resolve) => setTimeout(resolve, 200));
          let text = "```python\\ndef f():\\n    return '<b>'\\n";
          const ends = [];
          for (let i = 0; i < 200; i++) {
            view.show((text += `# line ${i}\\n`));
            const box = node.querySelector("pre");
            if (i === 150) box.scrollTop = 0;
            ends.push(box.scrollHeight - box.scrollTop - box.clientHeight < 2);
          }
          const spans = [...node.querySelectorAll("span[class]")];
          const colours = spans.map((one) => [one.className, one.textContent]).slice(0, 4);
          const same = "```python\\n" + node.querySelector("code").textContent + "\\n" === text;
          return { ends, colours, boxes: node.querySelectorAll("b").length, same };
        }"""
    )
    assert shown["ends"][:150] == [True] * 150
    assert shown["ends"][151:] == [False] * 49, "a reader who scrolls up stays there"
    assert ["code-keyword", "def"] in shown["colours"]
    assert (shown["boxes"], shown["same"]) == (0, True)


PIECES = [
    "$",
    "\\\\(",
    "$$\\n",
    "[^1] ",
    "- [ ] ",
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
            return node.childNodes.length;
          });
        }""",
        [PIECES, 30_000],
    )
    assert all(kept)


class Shown(HTMLParser):
    """What a piece of HTML shows, as the page shows it: marks of elements, and texts between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._endings: list[str] = []
        self._in_pre = False
        self._skipped = 0
        self.feed(html)

    @property
    def text(self) -> str:
        """In one line. White space counts in listings alone."""
        return re.sub(r"\s*(<[^>]*>)\s*", r"\1", re.sub(r"\s+", " ", "".join(self.parts)))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "img":
            target = self._target(given["src"])
            self.parts += [target[0], f"image: {given.get('alt', '')}", target[1]]
        elif tag == "a":
            opening, ending = self._target(given["href"])
            self.parts.append(opening)
            self._endings.append(ending)
        elif tag in ("figcaption", "button"):
            self._skipped += 1
        elif tag == "hr":
            self.parts.append("<hr>")
        elif tag == "br":
            self.parts.append(" ")
        elif re.fullmatch("h[1-6]", tag):
            self.parts.append(f"<{self._heading(tag)}>")
        elif tag in ("pre", "code"):
            self._in_pre = self._in_pre or tag == "pre"
            self.parts.append("<code>" if tag == "code" else "")
        elif tag not in ("figure", "span"):
            self.parts.append(f"<{tag}>" if tag != "ol" else f"<ol {given.get('start', '1')}>")

    def handle_endtag(self, tag: str) -> None:
        if tag == "a":
            self.parts.append(self._endings.pop())
        elif tag in ("figcaption", "button"):
            self._skipped -= 1
        elif tag == "pre":
            self._in_pre = False
        elif re.fullmatch("h[1-6]", tag):
            self.parts.append(f"</{self._heading(tag)}>")
        elif tag not in ("figure", "span", "hr", "br", "img"):
            self.parts.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self.parts.append(data.rstrip("\n").replace("\n", "⏎").replace(" ", "␣") if self._in_pre else data)

    def _heading(self, tag: str) -> str:
        return tag

    def _target(self, url: str) -> tuple[str, str]:
        """A link's opening and its ending: targets of other kinds than the web's and mail's are texts."""
        if re.match("(?i)(https?|mailto):", url):
            return f"<a {url.lower().rstrip('/')}>", "</a>"
        return "", f" ({url})"


class Expected(Shown):
    """What CommonMark expects, as the page shows it: under the page's own headings."""

    def _heading(self, tag: str) -> str:
        return f"h{min(6, int(tag[1]) + 2)}"


RAW_HTML = re.compile(r"<(?![a-zA-Z][\w.+-]{1,31}:|[\w.+-]+@)[a-zA-Z/!?]")
# Addresses in the form that browsers give them; addresses in plain text are links.
OTHERWISE = {20, 346, 501} | {602, 608, 611}


def test_commonmark(screen: Screen) -> None:
    examples = json.loads((Path(__file__).parent / "commonmark.json").read_text())["examples"]
    asked = [one for one in examples if not RAW_HTML.search(one[1]) and one[0] not in OTHERWISE]
    assert len(asked) > 400
    made: list[str] = screen.page.evaluate(
        """async (texts) => {
          const { markdown } = await import("/page/markdown.js");
          return texts.map((text) => {
            const node = document.createElement("div");
            node.append(...markdown(text));
            return node.innerHTML;
          });
        }""",
        [text for _, text, _ in asked],
    )
    wrong = {
        number: (text, Expected(html).text, Shown(shown).text)
        for (number, text, html), shown in zip(asked, made, strict=True)
        if Expected(html).text != Shown(shown).text
    }
    assert not wrong
