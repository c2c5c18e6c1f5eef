"""What people expect of such a page: search, export and import, files, keys, a phone, accessibility."""

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import Screen
from tests.server.conftest import Serving, serving
from tests.thinking import thinking_model, write
from twostroke.api.llm import LLM


def test_search_and_rename(screen: Screen) -> None:
    screen.say("a purple answer")
    screen.ask("first question")
    screen.page.click("#new")
    screen.say("a green answer")
    screen.ask("second question")
    titles = screen.find("#list .title")
    for query, found in (("PURPLE", ["first question"]), ("question answer", 2), ("green first", 0), ("", 2)):
        screen.page.fill("#search", query)
        assert titles.all_text_contents() == found if isinstance(found, list) else titles.count() == found
        assert screen.find("#none-found").is_visible() == (titles.count() == 0)
    screen.page.on("dialog", lambda dialog: dialog.accept("another name"))
    screen.find("[aria-label='Rename first question']").click()
    screen.page.reload()
    assert sorted(titles.all_text_contents()) == ["another name", "second question"]


def test_export_and_import(screen: Screen, open_page: Callable[..., Screen], server: Serving, tmp_path: Path) -> None:
    screen.say("an answer")
    screen.ask("a question")
    screen.find("button:text('Answer again')").click()
    screen.answered()
    for name, file in (("#export", tmp_path / "all.json"), ("#export-this", tmp_path / "this.md")):
        with screen.page.expect_download() as download:
            screen.page.click(name)
        download.value.save_as(file)
    assert (tmp_path / "this.md").read_text() == "# a question\n\n## Question\n\na question\n\n## Answer\n\nan answer\n"
    other = open_page(server.url)
    for _ in range(2):  # twice is once
        other.page.set_input_files("#import-file", tmp_path / "all.json")
        other.page.wait_for_selector("#list .title")
    other.find("#list .title").click()
    assert other.find(".markdown").all_text_contents() == ["an answer"]
    assert other.find(".assistant .others").inner_text().split()[1] == "2/2"
    other.page.set_input_files("#import-file", tmp_path / "this.md")
    other.until("document.querySelectorAll('#list .title').length === 2")
    other.find("#list .title").first.click()
    assert other.find(".assistant .others").count() == 0
    other.say("more")
    other.ask("go on")
    assert [one["content"] for one in other.bodies[-1]["messages"]] == ["a question", "an answer", "go on"]
    other.page.once("dialog", lambda dialog: dialog.accept())
    other.find("[aria-label='Delete a question']").first.click()
    kept = json.loads((tmp_path / "all.json").read_text())[0]
    turns = list(kept["turns"].values())
    circle = {turn["id"]: turn | {"parent": turns[-1]["id"]} for turn in turns}
    texts = {turn["id"]: turn | {"content": {"a": "<b>"}} for turn in turns}
    calls = {turn["id"]: turn | {"calls": [{}]} for turn in turns}
    for wrong in ({}, None, {"turns": circle}, {"turns": texts}, {"turns": calls}, {"at": "nowhere"}, {"turns": None}):
        made = wrong if not wrong else kept | {"id": "wrong"} | wrong
        (tmp_path / "wrong.json").write_text(json.dumps(made))
        other.page.set_input_files("#import-file", tmp_path / "wrong.json")
        other.page.wait_for_selector("#import-error:text('Nothing was imported')")
        assert other.find("#list .title").count() == 1
        other.page.evaluate("document.getElementById('import-error').hidden = true")
        other.page.evaluate("(text) => localStorage.setItem('twostroke.api.conversation.x', text)", json.dumps(made))
        other.page.reload()
        assert other.find("#list .title").count() == 1, "also if it is stored, nothing fails"


def test_markdown_leads_there_and_back(screen: Screen) -> None:
    """Turns with headings like its own, calls and their results; another text is none."""
    read = """async (turns) => {
      const { asMarkdown, fromMarkdown } = await import("/page/transcript.js");
      const { fresh } = await import("/page/conversations.js");
      const { add, messages } = await import("/page/tree.js");
      const one = { ...fresh(), title: "two\\nlines" };
      for (const turn of turns) add(one, { ...turn });
      const other = fromMarkdown(asMarkdown(one), fresh());
      const plain = (all) => messages(all).map(({ tool_calls: calls, tool_call_id, ...rest }) => [
        rest, (calls ?? []).map((call) => call.function)]);
      const ids = messages(other).flatMap(({ tool_calls: calls }) => (calls ?? []).map(({ id }) => id));
      const used = messages(other).map(({ tool_call_id: id }) => id).filter(Boolean);
      return [plain(one), plain(other), ids, used, other.title, fromMarkdown("# a\\n\\ntext", fresh())];
    }"""
    calls = [{"id": f"c{i}", "name": "look", "arguments": f'{{"at": "{i})"}}'} for i in range(2)]
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "## Question\n\\## Answer\n## Other"},
        {"role": "assistant", "content": "so\n\n```json\n{}\n```", "calls": calls, "state": "done"},
        {"role": "tool", "call": "c0", "content": "first"},
        {"role": "tool", "call": "c1", "content": "second"},
        {"role": "assistant", "content": "done", "calls": [], "state": "done"},
    ]
    before, after, ids, used, title, nothing = screen.page.evaluate(read, turns)
    assert after == before
    assert (used, title, nothing) == (ids, "two lines", None)


DROP = """([target, files]) => {
  const data = new DataTransfer();
  for (const [name, bytes] of files) data.items.add(new File([new Uint8Array(bytes)], name));
  const event = new DragEvent("drop", { dataTransfer: data, bubbles: true, cancelable: true });
  document.querySelector(target).dispatchEvent(event);
}"""


PASTE = DROP.replace('new DragEvent("drop", { dataTransfer:', 'new ClipboardEvent("paste", { clipboardData:')


def test_files_go_with_a_question(screen: Screen, server: Serving) -> None:
    text = "the quick brown fox\n```\n"
    files = [["notes.txt", list(text.encode())], ["picture.png", [137, 80, 78, 71, 0, 255]]]
    screen.page.evaluate(DROP, ["main", files])
    count = len(server.llm.tokenizer.encode(text, add_bos=False))
    screen.page.wait_for_selector(f"#files span:text('notes.txt: {count} tokens')")
    screen.page.wait_for_selector("#files .error:text('picture.png: it is no text in UTF-8')")
    screen.say("yes")
    screen.ask("What is this?")
    assert screen.bodies[0]["messages"][0]["content"] == f"What is this?\n\nnotes.txt:\n\n````\n{text}````"
    assert screen.find("#files li").count() == 0
    screen.page.set_input_files("#file", files=[{"name": "a", "mimeType": "text/plain", "buffer": b"x"}])
    screen.page.click("[aria-label='Leave out a']")
    screen.page.evaluate(PASTE, ["#ask", [["pasted.txt", list(b"x y")]]])
    screen.page.wait_for_selector("#files span:text('pasted.txt:')")
    screen.page.click("[aria-label='Leave out pasted.txt']")
    assert screen.find("#files li").count() == 0


def test_keys(screen: Screen) -> None:
    screen.say("yes")
    screen.ask("one")
    screen.page.press("#ask", "ArrowUp")
    assert screen.find(".user textarea").input_value() == "one"
    screen.page.keyboard.press("Escape")
    screen.page.press("#ask", "Control+Shift+F")
    assert screen.page.evaluate("document.activeElement.id") == "search"
    screen.page.evaluate("document.activeElement.blur()")
    screen.page.keyboard.press("?")
    shown = screen.find("#shortcuts dt").all_text_contents()
    assert "Ctrl+Shift+O" in shown
    screen.page.keyboard.press("Escape")
    screen.page.keyboard.press("/")
    assert screen.page.evaluate("document.activeElement.id") == "ask"
    screen.page.keyboard.press("Control+Shift+O")
    assert screen.find(".turn").count() == 0


def test_thoughts_are_folded(
    open_page: Callable[..., Screen], servers: ExitStack, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    llm = LLM(str(thinking_model(tiny_directory("llama"), tmp_path, "switch")), kv_bytes=4 << 20, threads=1)
    write(llm, "<think>first this, then that</think>So it is.")
    server = servers.enter_context(serving(llm))
    thoughts_are_folded(open_page(server.url))


def thoughts_are_folded(screen: Screen) -> None:
    screen.ask("Why?")
    assert screen.find(".markdown").inner_text() == "So it is."
    assert not screen.find(".thought pre").is_visible()
    screen.find(".thought summary").click()
    assert screen.find(".thought pre").inner_text() == "first this, then that"
    screen.ask("And now?")
    told = {"role": "assistant", "content": "So it is.", "reasoning_content": "first this, then that"}
    assert screen.bodies[1]["messages"][1] == told
    go_on_behind_a_thought(screen, told)


def go_on_behind_a_thought(screen: Screen, told: dict[str, str]) -> None:
    """From a token of the answer; the thought is before it in the prompt, and the walk through both is shown."""
    screen.find("button:text('Tokens')").last.click()
    tokens = screen.find(".token")
    texts = tokens.all_text_contents()
    first = next(i for i in range(len(texts)) if "".join(texts[: i + 1]).endswith("</think>S"))
    tokens.nth(first - 1).click()
    assert "a token of the thought" in screen.find(".answer > div > .actions").last.inner_text()
    tokens.nth(first + 3).click()
    screen.find("button:has-text('the same')").click()
    screen.answered()
    assert screen.bodies[-1]["messages"][-1] == told | {"content": "So i"}
    assert screen.bodies[-1]["continue_final_message"] is True
    assert screen.find(".assistant .others").last.inner_text().split()[1] == "2/2"
    assert screen.find(".thought pre").last.text_content() == told["reasoning_content"]
    assert screen.find(".markdown").last.text_content().startswith("So i")
    with screen.page.expect_download():
        screen.find("button:text('Explain')").last.click()
    screen.page.wait_for_selector("button:text('Explain'):not([disabled])")
    assert screen.find(".error:visible").count() == 0


def test_why_an_answer_waits(screen: Screen, server: Serving) -> None:
    """Queued, then computing its prompt; and how much of the context is used in the end."""
    told = """(cases) => import("/page/pages.js").then(({ progressOf }) => {
      const lanes = [
        { owner: 0, decodes: false, entries: 1536, todo: 2464, arriving: false },
        { owner: 1, decodes: true, entries: 9, todo: 1, arriving: false },
        { owner: 2, decodes: false, entries: 0, todo: 64, arriving: true },
      ];
      const waiting = [["x", "waiting"], ["d", "waiting"], ["e", "preempted"]];
      const picture = { owners: [["a", 1, 0], ["b", 2, 0], ["c", 3, 0]], lanes, waiting };
      return cases.map(([name, facts, step]) => progressOf(picture, facts, name, step));
    })"""
    computing = "computing the prompt, 1,536 of 4,000 tokens"
    expected = {
        ("a", None): computing,
        ("a", 40): f"{computing}, in small chunks: others are to get their tokens within 40 ms",
        ("b", None): "",
        ("c", None): "its pages are arriving from another tier",
        ("d", None): "queued behind 1 others",
        ("e", None): "its pages were taken: it starts again when there is room",
        ("nobody", None): "",
    }
    cases = [[name, {"itl_ms": itl_ms}, {"decode": 1, "prefill": 16}] for name, itl_ms in expected]
    assert screen.page.evaluate(told, cases) == list(expected.values())
    screen.say("yes")
    screen.ask("the quick brown fox " * 10)
    screen.until("document.querySelector('#context').textContent")  # the page may still ask how much that is
    used = screen.find("#context").text_content()
    facts = screen.find(".facts").text_content()
    assert used.endswith(f" of {server.llm.max_model_len:,} tokens of context used")
    assert int(used.split()[0]) == int(facts.split()[0]) + int(facts.split(" prompt tokens")[0].split()[-1])


def test_the_map_shows_what_is_used(screen: Screen) -> None:
    shown = screen.page.evaluate(
        """() => import("/page/pages.js").then(({ drawPool }) => {
          const canvas = document.createElement("canvas");
          document.body.append(canvas);
          const few = new Uint16Array(100_000);
          few[400] = 1;
          const all = new Uint16Array(100_000).fill(1);
          return [drawPool(canvas, few, []), drawPool(canvas, all, []), drawPool(canvas, new Uint16Array(50), [])];
        })"""
    )
    assert [(one["shown"], one["each"]) for one in shown] == [(500, 1), (100_000, 17), (50, 1)]
    assert (shown[0]["free"], shown[0]["prefix"]) == (99_999, 1)


def test_panels_of_a_phone_close(open_page: Callable[..., Screen], server: Serving) -> None:
    screen = open_page(server.url, viewport={"width": 360, "height": 640}, has_touch=True)
    screen.say("yes")
    screen.ask("one")
    for control, panel in (("list", "#conversations"), ("engine", "#engine"), ("settings", "#settings")):
        screen.page.click(f"#show-{control}")
        assert screen.find(panel).is_visible()
        screen.find(f"{panel} .close").click()
        assert not screen.find(panel).is_visible()
        assert screen.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    screen.page.click("#show-engine")
    screen.page.click("#show-list")
    assert not screen.find("#engine").is_visible()
    screen.find("#list .title").click()
    assert not screen.find("#conversations").is_visible()
    screen.page.click("#show-engine")
    screen.page.keyboard.press("Escape")
    assert not screen.find("#engine").is_visible()


ANSWER = """# A heading

A [link](https://x.example), `code`, and \\(x\\).

- [x] done
1. one

| a | b |
|---|--:|
| 1 | 2 |

> quoted[^1]

```python
def f(x):  # a comment
    return "text" + str(1.5)
```

$$
\\frac{a}{b}
$$

[^1]: a note
"""


def test_axe_finds_nothing(screen: Screen) -> None:
    """In both schemes: two answers, the second one's tokens and attention, settings with an error, a search."""
    axe = pytest.importorskip("axe_playwright_python.base", reason="this test needs axe-playwright-python")
    screen.say(ANSWER)
    screen.ask("one")
    screen.page.wait_for_selector("math")
    screen.page.wait_for_selector(".code-keyword")
    screen.say("two")
    screen.ask("again")
    screen.find("button:text('Answer again')").last.click()
    screen.answered()
    screen.find("button:text('Tokens')").last.click()
    screen.find(".token").first.click()
    screen.find(".weighed").first.wait_for()
    screen.page.fill("#search", "nothing")
    screen.page.click("#show-settings")
    screen.page.fill("#tools", "{")
    screen.page.evaluate(axe.AXE_FILE_PATH.read_text() + "; null")
    for scheme in ("light", "dark"):
        screen.page.emulate_media(color_scheme=scheme)
        found = screen.page.evaluate("axe.run({ resultTypes: ['violations'] })")["violations"]
        assert [(one["id"], [node["html"][:300] for node in one["nodes"]]) for one in found] == []
    screen.page.click("#show-shortcuts")
    found = screen.page.evaluate("axe.run('dialog[open]', { resultTypes: ['violations'] })")["violations"]
    assert [one["id"] for one in found] == []
