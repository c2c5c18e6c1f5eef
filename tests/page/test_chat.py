"""The chat: ask, stream, stop, ask again, edit, tools, JSON, two ways at once, reload, a server that comes back."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.page.conftest import Screen
from tests.server.conftest import LONG, Serving, eventually, serving
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


def test_what_is_left_while_it_is_answered_stays_as_it_is(screen: Screen, server: Serving) -> None:
    screen.extra(LONG)
    screen.ask("first", wait=False)
    screen.page.wait_for_selector(".going .markdown p")
    screen.page.click("#new")
    eventually(lambda: server.llm.engine.num_running == 0)
    screen.say("other")
    screen.ask("second")
    assert screen.find(".user .text").all_text_contents() == ["second"]
    screen.extra(LONG)
    screen.ask("third", wait=False)
    screen.page.wait_for_selector(".going .markdown p")
    screen.page.reload()
    assert screen.find(".going").count() == 0
    assert screen.find(".markdown").last.text_content()
    assert "stopped" in screen.find(".facts").last.text_content()
    screen.find("#list .title:text('first')").click()
    assert "stopped" in screen.find(".facts").text_content()


def test_answer_again_and_edit(screen: Screen) -> None:
    screen.say("before")
    screen.ask("one")
    screen.ask("two")
    screen.say("after")
    screen.find("button:text('Answer again')").last.click()
    screen.page.wait_for_selector(".markdown p:text('after')")
    screen.answered()
    assert [one["content"] for one in screen.bodies[-1]["messages"]] == ["one", "before", "two"]
    screen.find("button:text('Edit')").first.click()
    screen.page.fill(".user textarea", "another")
    screen.page.press(".user textarea", "Enter")
    screen.page.wait_for_selector(".user .text:text('another')")
    screen.answered()
    assert [one["content"] for one in screen.bodies[-1]["messages"]] == ["another"]
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
    screen.settings({"schema": "{"})
    screen.ask("Which pages?", wait=False)
    assert screen.find("#refused").text_content().startswith("JSON schema in the settings:")
    assert len(screen.bodies) == 1


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


def test_side_by_side(screen: Screen, server: Serving) -> None:
    """Plain beside PTDO: the second cache begins where the second copy of the prompt does."""
    screen.settings({"compare": "yes", "other": "repeat"})
    screen.extra({"max_tokens": 300, "ignore_eos": True})
    screen.ask("the quick brown fox jumps over the lazy dog " * 4)
    captions = screen.find(".cache figcaption")
    assert captions.count() == 2
    one, other = (captions.nth(i).text_content() for i in range(2))
    prompt = screen.find(".facts").first.text_content()
    size = int(re.search(r"of (\d+) prompt tokens", prompt)[1])  # pyright: ignore
    assert "at positions 0 to" in one
    assert f"at positions {size} to" in other
    assert [body["method"]["name"] for body in screen.bodies] == ["plain", "repeat"]
    drawn = "(all) => all.map((c) => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((x) => x))"
    assert screen.find(".cache canvas").evaluate_all(drawn) == [True, True]
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


def test_the_server_goes_and_comes_back(open_page: Callable[..., Screen], tiny_directory: Any) -> None:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=4 << 20, threads=1)
    with serving(llm) as first:
        screen = open_page(first.url)
        screen.extra(LONG)
        screen.ask("go on", wait=False)
        screen.page.wait_for_selector(".going .markdown p")
    screen.answered()
    assert screen.find(".error[role=alert]:visible").count() == 1, "the answer that was cut says so"
    screen.page.wait_for_selector("#link.gone")
    screen.find("button:text('Answer again')").click()
    screen.page.wait_for_selector("text=No answer: the server cannot be reached.")
    with serving(llm, port=int(first.url.rpartition(":")[2])):
        screen.page.wait_for_selector("#link:text('Connected')")
        screen.say("back again")
        screen.find("button:text('Answer again')").click()
        screen.page.wait_for_selector(".markdown p:text('back again')")
        screen.page.goto("about:blank")
    screen.complaints.clear()  # the browser's, about calls that nobody answered


def test_a_key(open_page: Callable[..., Screen], tiny_directory: Callable[[str], Path]) -> None:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=4 << 20, threads=1)
    with serving(llm, api_key="open sesame") as running:
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
