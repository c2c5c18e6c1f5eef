"""The chat: ask, stream, stop, ask again, edit, tools, JSON, two ways at once, reload, a server that comes back."""

import json
import re
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import Screen
from tests.ports import kept_port
from tests.server.conftest import Serving, eventually, serving
from tests.server.long_answers import LONG, num_long
from twostroke.api.llm import LLM
from twostroke.study.explain.attention import attention_of

SHOWN = """# A cache

It holds **keys** and `values`.

- one
- two

```python
print("kv")
```"""


def test_ask(screen: Screen) -> None:
    screen.say(SHOWN)
    screen.ask("What is a KV cache?")
    answer = screen.find(".markdown")
    assert answer.locator("h3").text_content() == "A cache"
    assert [answer.locator(tag).first.text_content() for tag in ("strong", "p code", "li")] == ["keys", "values", "one"]
    assert answer.locator("pre").text_content() == 'print("kv")'
    told = screen.find("#status").text_content()
    assert answer.locator("figcaption span").text_content() == "python"
    answer.locator("figcaption button").click()
    answer.locator("figcaption button:text('Copied')").wait_for()
    assert screen.page.evaluate("navigator.clipboard.readText()") == 'print("kv")'
    assert re.search(r"\d+ tokens · first after .* ms · .* tokens/s · 0 of \d+", screen.find(".facts").text_content())
    assert re.match(r"The answer is complete: \d+ tokens. A cache", told)
    assert screen.bodies[0]["messages"] == [{"role": "user", "content": "What is a KV cache?"}]


def test_a_conversation_goes_on_with_a_system_prompt(screen: Screen) -> None:
    screen.settings({"system": "Be brief.", "temperature": "0.5", "seed": "7"})
    screen.say("first")
    screen.ask("one")
    screen.say("second")
    screen.ask("two")
    roles = [(message["role"], message["content"]) for message in screen.bodies[1]["messages"]]
    assert roles == [("system", "Be brief."), ("user", "one"), ("assistant", "first"), ("user", "two")]
    assert (screen.bodies[1]["temperature"], screen.bodies[1]["seed"]) == (0.5, 7)


def test_stream_and_stop(screen: Screen, server: Serving) -> None:
    screen.extra(LONG)
    screen.ask("go on", wait=False)
    text = screen.find(".markdown")
    grown = "(least) => document.querySelector('.answer[aria-busy=true] .markdown')?.textContent.length > least"
    screen.until(grown, 0)
    screen.until(grown, len(text.text_content()))
    assert not screen.find("#send").is_visible()
    screen.page.click("#stop")
    screen.answered()
    assert "stopped" in screen.find(".facts").text_content()
    assert text.text_content()
    eventually(lambda: server.llm.engine.num_running == 0)
    screen.page.press("#ask", "Escape")  # stops nothing now


def test_an_answer_goes_on_while_another_conversation_is_open(
    screen: Screen, server: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    monkeypatch.setattr(server.llm.engine, "before_step", lambda _: left.wait(0.1))
    screen.extra({"choice": ["one two three " * 40]})
    screen.ask("first", wait=False)
    screen.page.wait_for_selector(".going .markdown > *")
    screen.page.click("#new")
    left.set()
    screen.say("other")
    screen.ask("second")
    assert screen.find(".user .text").all_text_contents() == ["second"]
    eventually(lambda: server.llm.engine.num_running == 0)
    screen.find("#list .title:text('first')").click()
    screen.answered()
    assert screen.find(".markdown").text_content() == ("one two three " * 40).strip()
    screen.extra(LONG)
    screen.ask("third", wait=False)
    screen.page.wait_for_selector(".going .markdown > *")  # a paragraph, or whatever random text is
    screen.page.reload()
    eventually(lambda: server.llm.engine.num_running == 0)
    assert screen.find(".going").count() == 0
    assert screen.find(".markdown").last.text_content()
    assert "stopped" in screen.find(".facts").last.text_content()


def test_answer_again_and_edit_lose_nothing(screen: Screen) -> None:
    screen.say("before")
    screen.ask("one")
    screen.ask("two")
    screen.say("after")
    screen.find("button:text('Answer again')").last.click()
    screen.page.wait_for_selector(".markdown p:text('after')")
    screen.answered()
    assert [one["content"] for one in screen.bodies[-1]["messages"]] == ["one", "before", "two"]
    assert screen.find(".assistant .others").inner_text().split()[1] == "2/2"
    screen.find("button:text('Edit')").first.click()
    screen.page.fill(".user textarea", "another")
    screen.page.press(".user textarea", "Enter")
    screen.page.wait_for_selector(".user .text:text('another')")
    screen.answered()
    assert [one["content"] for one in screen.bodies[-1]["messages"]] == ["another"]
    assert screen.find(".turn").count() == 2
    screen.page.reload()
    screen.find("[aria-label='The one before']").click()
    assert screen.find(".user .text").all_text_contents() == ["one", "two"]
    assert screen.find(".markdown").all_text_contents() == ["before", "after"]
    screen.find("[aria-label='The one before']").last.click()
    assert screen.find(".markdown").all_text_contents() == ["before", "before"]


def test_go_on_from_a_token(screen: Screen, server: Serving) -> None:
    """Another answer begins as the first one did, and shares the pages of the prompt with it."""
    screen.settings({"system": "the quick brown fox " * 8})
    screen.extra({"choice": ["the cat sat", "the dog ran", "the dog sat"], "seed": 1})
    screen.ask("Who?")
    tokens = 1500  # enough for a picture of its pages to come meanwhile, in a browser that is short of time too
    screen.extra({"max_tokens": tokens, "ignore_eos": True})
    screen.find("button:text('Tokens')").click()
    token = screen.find(".token").nth(3)
    token.click()
    before = "".join(screen.find(".token").all_text_contents()[:3])
    choice = screen.find(".answer > div .actions button").nth(1)
    other = choice.locator("code").text_content()
    choice.click()
    screen.answered()
    assert screen.find(".assistant .others").inner_text().split()[1] == "2/2"
    body = screen.bodies[-1]
    assert body["continue_final_message"] is True
    begun = body["messages"][-1]
    assert begun["role"] == "assistant"
    assert begun["content"] == (before + other).replace("·", " ").replace("⏎", "\n")
    facts = screen.find(".facts").text_content()
    assert int(facts.split()[0].replace(",", "")) == 4 + tokens
    found = re.search(r"(\d+) of (\d+) prompt tokens from the cache", facts)
    assert found is not None
    assert int(found[1]) >= int(found[2]) // 16 * 16 - 16
    assert screen.find(".markdown").text_content().startswith(begun["content"].strip())
    shared = f"there before, and cost nothing: {int(found[1]) // 16}"
    eventually(lambda: screen.find(".cache figcaption").text_content().endswith(shared))  # drawn from the next message


def test_a_fork_of_an_answer_that_is_being_made(screen: Screen, server: Serving) -> None:
    """Both are made side by side, and one stop ends both."""
    screen.extra(LONG)
    screen.ask("Who?", wait=False)
    # With keys: all of it moves while the answer grows, and a mouse that is let go elsewhere has pressed nothing.
    for pressed in ("button:text('Tokens')", ".token:nth-child(5)", ".answer > div .actions button:nth-child(2)"):
        screen.page.wait_for_selector(pressed).press("Enter")
    eventually(lambda: num_long(server.llm) == 2)
    assert screen.find(".assistant .others").inner_text().split()[1] == "2/2"
    screen.find("[aria-label='The one before']").click()
    assert screen.find(".assistant .others").inner_text().split()[1] == "1/2"
    assert screen.find(".answer.going").count() == 1
    assert num_long(server.llm) == 2
    screen.page.click("#stop")
    eventually(lambda: server.llm.engine.num_running == 0)
    screen.page.wait_for_selector("#send:not([hidden])")
    first = screen.find(".markdown").text_content()
    assert "stopped" in screen.find(".facts").text_content()
    screen.find("[aria-label='The next one']").click()
    assert "stopped" in screen.find(".facts").text_content()
    assert screen.find(".markdown").text_content() != first


def test_explain_this_answer(screen: Screen, tmp_path: Path) -> None:
    screen.say("the quick brown fox")
    screen.ask("Who?")
    with screen.page.expect_download() as download:
        screen.find("button:text('Explain')").click()
    download.value.save_as(tmp_path / "explanation.html")
    screen.page.wait_for_selector("button:text('Explain'):not([disabled])")
    text = (tmp_path / "explanation.html").read_text()
    assert "Twostroke: Who?" in text
    assert '"text": "the quick brown fox"' in text or '"text":"the quick brown fox"' in text


def test_a_fork_is_explained_too(screen: Screen, tmp_path: Path) -> None:
    """What the model has read of a fork's beginning is a text; all that follows, and its attention, are there."""
    screen.extra({"choice": ["the cat sat", "the dog ran"], "seed": 1})
    screen.ask("Who?")
    screen.extra({"max_tokens": 9, "ignore_eos": True, "seed": 2})
    for at, which in ((2, 1), (5, 0)):  # a fork, and a fork of it
        screen.find("button:text('Tokens')").last.click()
        screen.find(".token").nth(at).click()
        screen.find(".answer > div .actions button").nth(which).click()
        screen.answered()
    text = screen.find(".markdown").last.text_content()
    with screen.page.expect_download() as download:
        screen.find("button:text('Explain')").last.click()
    download.value.save_as(tmp_path / "explanation.html")
    screen.page.wait_for_selector("button:text('Explain'):not([disabled])")
    assert screen.find(".error:visible").count() == 0
    page = (tmp_path / "explanation.html").read_text()
    assert json.dumps(text.strip())[1:12] in page
    screen.find("button:text('Tokens')").last.click()
    for at in (1, 4, 12):
        screen.find(".token").nth(at).click()
        screen.page.wait_for_selector(".attention :text('attended')")
        assert screen.find(".error:visible").count() == 0


def test_a_cut_answer_is_continued(screen: Screen) -> None:
    screen.settings({"max_tokens": "3", "temperature": "0"})
    screen.extra({"ignore_eos": True})
    screen.ask("Count.")
    begun = screen.bodies and screen.find(".markdown").text_content()
    assert "cut at its limit of tokens" in screen.find(".facts").text_content()
    screen.find("button:text('Continue')").click()
    screen.page.wait_for_selector(".facts:text('6 tokens')")
    assert screen.bodies[1]["messages"][-1]["role"] == "assistant"
    assert screen.find(".markdown").text_content().startswith(begun)
    assert screen.find(".turn").count() == 2


def test_a_tool_is_called_and_its_result_goes_back(screen: Screen) -> None:
    warmth = {"type": "object", "properties": {"celsius": {"enum": [21]}}, "required": ["celsius"]}
    screen.settings(
        {"tools": json.dumps([{"name": "weather", "parameters": warmth | {"additionalProperties": False}}])}
    )
    screen.extra({"tool_choice": "required", "parallel_tool_calls": False})
    screen.ask("How warm is it?")
    call = screen.find(".call")
    assert call.locator("p code").text_content() == "weather"
    assert json.loads(call.locator("pre").text_content()) == {"celsius": 21}
    screen.extra({"tool_choice": "none", "choice": ["It is warm."]})
    call.locator("textarea").fill("sunny")
    call.locator("button:text('Send the result')").click()
    screen.page.wait_for_selector(".markdown p:text('It is warm.')")
    screen.answered()
    asked = screen.bodies[-1]["messages"]
    assert [one["role"] for one in asked] == ["user", "assistant", "tool"]
    assert asked[2] == {"role": "tool", "content": "sunny", "tool_call_id": asked[1]["tool_calls"][0]["id"]}


def test_json_is_shown_readably(screen: Screen) -> None:
    screen.settings({"format": "json_schema", "schema": '{"const": {"pages": [1, 2]}}'})
    screen.ask("Which pages?")
    assert screen.find(".markdown pre").text_content() == json.dumps({"pages": [1, 2]}, indent=2)


def test_a_setting_that_cannot_be_read_keeps_the_question(screen: Screen) -> None:
    screen.page.click("#show-settings")
    for name, wrong in (("tools", "{"), ("tools", "[1]"), ("extra", "[]"), ("extra", "nothing")):
        screen.page.fill(f"#{name}", wrong)
        assert screen.find(f"#{name}-error").is_visible(), "it says so while it is typed"
        assert screen.find(f"#{name}").get_attribute("aria-invalid") == "true"
        screen.page.click("#show-settings")
        screen.ask("Which pages?", wait=False)
        assert screen.find(f"#{name}").is_visible()
        assert screen.page.evaluate("document.activeElement.id") == name
        assert screen.page.input_value("#ask") == "Which pages?"
        screen.page.fill(f"#{name}", "")
        assert not screen.find(f"#{name}-error").is_visible()
    assert screen.bodies == []
    screen.page.click("#show-settings")
    screen.settings({"format": "json_schema", "schema": "{"})
    screen.ask("Which pages?", wait=False)
    assert screen.find("#schema-error").text_content().startswith("This is no JSON:")
    assert screen.bodies == []


def test_alternatives_and_attention(screen: Screen, server: Serving) -> None:
    screen.say("the quick brown fox")
    screen.ask("Who?")
    screen.find("button:text('Tokens')").click()
    tokens = screen.find(".token")
    tokens.nth(2).hover()
    shown = screen.find("#alternatives div")
    assert shown.count() >= 5
    assert screen.find("#alternatives .is").count() == 1
    assert re.search(r"\d+\.\d+%", shown.first.text_content())
    tokens.nth(2).focus()
    screen.page.keyboard.press("ArrowRight")
    assert screen.page.evaluate("document.activeElement.dataset.index") == "3"
    screen.page.keyboard.press("Enter")
    screen.find(".weighed").first.wait_for()

    prompt = server.llm.tokenizer.encode_chat([{"role": "user", "content": "Who?"}])
    answer = server.llm.tokenizer.encode("the quick brown fox", add_bos=False)
    expected = attention_of(server.llm, [*prompt, *answer[:3]])
    given = [
        float(text.rstrip("%")) for text in screen.find(".weighed").evaluate_all("(all) => all.map((n) => n.title)")
    ]
    assert given == pytest.approx([100 * float(weight) for weight in expected.mean()], abs=0.06)
    right = "getBoundingClientRect().right"
    assert screen.find(".weighed").evaluate_all(
        f"(all) => all.every((one) => one.{right} <= one.closest('.answer').{right})"
    )
    screen.find(".attention select").first.select_option("1")
    screen.find(".attention select").last.select_option("2")
    top = expected.most(1, layer=1, head=2)[0]
    screen.page.wait_for_selector(f".attention .hint:text('({top[0]}) {100 * top[1]:.1f}%')")


def test_side_by_side(screen: Screen, server: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain beside PTDO: the second cache has four entries, and goes on where the second copy of the prompt begins."""
    screen.settings({"compare": "yes", "other": "repeat"})
    screen.extra({"max_tokens": 300, "ignore_eos": True, "temperature": 0})
    drawn = threading.Event()
    # Caches are drawn from pictures of the engine, which come beside the answers, and while these are made.
    monkeypatch.setattr(server.llm.engine, "before_step", lambda _: drawn.wait(0.1))
    screen.ask("the quick brown fox jumps over the lazy dog " * 4, wait=False)
    captions = screen.find(".cache figcaption")
    eventually(lambda: captions.count() == 2 and all(captions.all_text_contents()))
    drawn.set()
    screen.answered()
    one, other = (captions.nth(i).text_content() for i in range(2))
    prompt = screen.find(".facts").first.text_content()
    size = int(re.search(r"of (\d+) prompt tokens", prompt)[1])  # pyright: ignore
    assert "at positions 0 to" in one
    assert f"at positions 0 to 3, {size} to" in other
    assert [body["method"]["name"] for body in screen.bodies] == ["plain", "repeat"]
    inked = "(all) => all.map((c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x))"
    assert screen.find(".cache canvas").evaluate_all(inked) == [True, True]
    text = screen.find(".answer").nth(1).locator(".markdown").text_content()
    screen.find("button:text('Go on with this one')").click()
    screen.settings({"compare": ""})
    screen.say("so")
    screen.ask("and?")
    assert len(screen.bodies) == 3
    assert text.split()[0] in screen.bodies[2]["messages"][1]["content"]


def test_reload(screen: Screen) -> None:
    screen.say("kept in the browser")
    screen.ask("a first question")
    screen.page.click("#new")
    assert screen.find(".turn").count() == 0
    screen.ask("a second one")
    screen.page.reload()
    assert screen.find(".user .text").text_content() == "a second one"
    titles = screen.find("#list .title")
    assert titles.all_text_contents() == ["a second one", "a first question"]
    titles.nth(1).click()
    assert screen.find(".user .text").text_content() == "a first question"
    assert screen.find(".markdown").text_content() == "kept in the browser"
    screen.page.on("dialog", lambda dialog: dialog.accept())
    screen.find("#list .drop").nth(1).click()
    screen.page.reload()
    assert titles.all_text_contents() == ["a second one"]


def test_the_server_goes_and_comes_back(
    open_page: Callable[..., Screen], servers: ExitStack, tiny_directory: Any
) -> None:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=4 << 20, threads=1)
    port = servers.enter_context(kept_port())
    with serving(llm, port=port) as first:
        screen = open_page(first.url)
        screen.extra(LONG)
        screen.ask("go on", wait=False)
        screen.page.wait_for_selector(".going .markdown > *")
    screen.answered()
    assert screen.find(".error[role=alert]:visible").count() == 1, "the answer that was cut says so"
    screen.page.wait_for_selector("#link.gone")
    screen.find("button:text('Answer again')").click()
    screen.page.wait_for_selector("text=No answer: the server cannot be reached.")
    with serving(llm, port=port):
        screen.page.wait_for_selector("#link:text('Connected')")
        screen.say("back again")
        screen.find("button:text('Answer again')").click()
        screen.page.wait_for_selector(".markdown p:text('back again')")
        screen.page.goto("about:blank")
    screen.complaints.clear()  # the browser's, about calls that nobody answered


def test_a_key(open_page: Callable[..., Screen], servers: ExitStack, tiny_directory: Callable[[str], Path]) -> None:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=4 << 20, threads=1)
    running = servers.enter_context(serving(llm, api_key="open sesame"))
    screen = open_page(running.url, wait=False)
    dialog = screen.find("#key-dialog")
    dialog.wait_for()
    for _ in range(3):
        screen.page.keyboard.press("Escape")
    dialog.wait_for()
    for key, told in (("wrong", True), ("open sesame", False)):
        screen.page.fill("#key", key)
        screen.page.press("#key", "Enter")
        if told:
            screen.find("#key-wrong").wait_for()
    screen.page.wait_for_selector("#link:text('Connected')")
    screen.say("let in")
    screen.ask("May I?")
    assert screen.find(".markdown").text_content() == "let in"
    screen.page.reload()
    screen.page.wait_for_selector("#link:text('Connected')")
    assert screen.page.evaluate("[sessionStorage.length, JSON.stringify(localStorage).includes('sesame')]") == [
        1,
        False,
    ]
    screen.page.goto("about:blank")
    screen.complaints.clear()  # the browser's, about answers with 401
