"""Nothing is lost and nothing is wrong: several tabs, drafts, failures, panels, the numbers of the engine."""

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from tests.page.conftest import Screen
from tests.ports import kept_port
from tests.server.conftest import Serving, eventually, serving
from tests.server.long_answers import LONG
from twostroke.api.llm import LLM

COUNTS = ("running", "waiting", "arriving", "preemptions", "evicted")


def tab_beside(screen: Screen) -> Screen:
    """Another tab of the same browser, with the same conversation."""
    other = Screen(screen.page.context.new_page())
    other.page.goto(screen.page.url)
    other.page.wait_for_selector("#link:text('Connected')")
    return other


def stored(screen: Screen) -> list[dict[str, Any]]:
    script = "Object.entries(localStorage).filter(([key]) => key.includes('.conversation.')).map(([, value]) => value)"
    return [json.loads(text) for text in screen.page.evaluate(script)]


def test_tabs_keep_each_others_turns(screen: Screen) -> None:
    screen.say("yes")
    screen.ask("one")
    other = tab_beside(screen)
    assert other.find(".user .text").all_text_contents() == ["one"]
    screen.ask("two")
    other.page.wait_for_selector("#list .title")
    other.settings({"system": "Be brief."})
    other.page.close(run_before_unload=False)
    assert len(stored(screen)[0]["turns"]) == 4
    third = tab_beside(screen)
    third.ask("three")
    screen.ask("four")
    [conversation] = stored(screen)
    assert [turn["content"] for turn in conversation["turns"].values() if turn["role"] == "user"] == [
        "one",
        "two",
        "three",
        "four",
    ]
    assert conversation["settings"]["system"] == "Be brief."
    third.page.close()


def test_two_tabs_that_answer_at_once(screen: Screen) -> None:
    screen.say("yes " * 25)
    screen.ask("one")
    other = tab_beside(screen)
    screen.ask("from here", wait=False)
    other.ask("from there", wait=False)
    screen.answered()
    other.answered()
    eventually(lambda: len(stored(screen)[0]["turns"]) == 6)
    eventually(lambda: {turn.get("state") for turn in stored(screen)[0]["turns"].values()} == {None, "done"})
    other.page.close()


def test_a_tab_that_saved_before_it_saw_what_another_had_saved(screen: Screen) -> None:
    screen.say("yes")
    screen.ask("one")
    other = tab_beside(screen)
    [before] = stored(screen)
    screen.ask("two")
    [after] = stored(screen)
    half = json.loads(json.dumps(after))
    half["turns"][after["at"]] |= {"state": "answering", "content": ""}
    kept = ("turns", "at")
    for olds in ([before], [half], [before, half]):
        saved = stored(screen)[0]["changed"]
        for old in olds:
            script = "(old) => localStorage.setItem(`twostroke.api.conversation.${old.id}`, JSON.stringify(old))"
            other.page.evaluate(script, old)
        eventually(lambda saved=saved: stored(screen)[0]["changed"] > saved)
        eventually(lambda: [stored(screen)[0][name] for name in kept] == [after[name] for name in kept])
        eventually(lambda: screen.find(".markdown").all_text_contents() == ["yes", "yes"])
    other.page.close()


def test_a_conversation_that_another_tab_deletes(screen: Screen) -> None:
    screen.say("yes")
    screen.ask("one")
    other = tab_beside(screen)
    screen.page.click("#new")
    other.page.on("dialog", lambda dialog: dialog.accept())
    screen.page.evaluate("window.title = document.querySelector('#list .title')")
    other.find("#list .drop").click()
    screen.until("document.querySelectorAll('#list .title').length === 0")
    screen.page.evaluate("window.title.click()")
    assert screen.find("#status").text_content() == "Another tab has deleted this conversation"
    assert screen.find(".turn").count() == 0
    other.page.close()


def test_conversations_of_before_are_still_there(screen: Screen) -> None:
    """Until November 2026, a conversation was a list of turns."""
    answer = {"name": "page-1", "method": "plain", "content": "a", "calls": [], "count": 1, "state": "done"}
    old = {"id": "old", "title": "first", "changed": 1, "settings": {"system": "", "parameters": {}, "extra": ""}}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "answers": [answer, answer | {"content": "b", "method": "repeat"}], "chosen": 1},
        {"role": "user", "content": "r"},
        {"role": "assistant", "answers": [answer | {"content": "c"}], "chosen": 0},
    ]
    text = json.dumps(old | {"turns": turns})
    screen.page.evaluate("(text) => localStorage.setItem('twostroke.api.conversation.old', text)", text)
    screen.page.reload()
    screen.find("#list .title").click()
    assert screen.find(".user .text").all_text_contents() == ["q", "r"]
    assert screen.find(".markdown").all_text_contents() == ["a", "b", "c"]
    screen.say("d")
    screen.ask("s")
    assert [one["content"] for one in screen.bodies[0]["messages"]] == ["q", "b", "r", "c", "s"]


def test_closing_a_panel_keeps_the_settings(screen: Screen) -> None:
    screen.settings({"system": "Be brief.", "temperature": "0.3", "compare": "yes"})
    screen.page.click("#new")
    screen.page.reload()
    screen.page.click("#show-settings")
    assert screen.page.input_value("#system") == "Be brief."
    assert screen.page.input_value("#temperature") == "0.3"
    assert screen.find("#compare").is_checked()


def test_drafts_stay(screen: Screen) -> None:
    screen.page.fill("#ask", "not asked yet")
    screen.page.reload()
    assert screen.page.input_value("#ask") == "not asked yet"
    screen.say("yes")
    screen.page.press("#ask", "Enter")
    screen.answered()
    screen.page.fill("#ask", "half a question")
    screen.page.click("#new")
    assert screen.page.input_value("#ask") == ""
    screen.find("#list .title").click()
    assert screen.page.input_value("#ask") == "half a question"
    screen.page.fill("#ask", "")
    assert screen.page.evaluate("sessionStorage.length") == 0


def test_failed_answers_do_not_go_back_to_the_model(screen: Screen) -> None:
    screen.extra({"method": "nothing"})
    screen.ask("one", wait=False)
    screen.page.wait_for_selector("text=No answer:")
    screen.say("yes")
    screen.ask("two")
    assert screen.bodies[1]["messages"] == [{"role": "user", "content": "one\n\ntwo"}]
    screen.complaints.clear()  # the browser's, about the answer with 400


def test_the_numbers_are_those_of_metrics(screen: Screen, server: Serving) -> None:
    """While the engine is idle, loaded, stopped, and for a watcher that comes late."""

    def told() -> dict[str, str]:
        return {name: screen.find(f"#{name}-value").text_content() for name in COUNTS}

    def counted() -> dict[str, str]:
        with server.http() as http:
            text = http.get("/metrics").text
        found = re.findall(r'^twostroke_requests\{state="(\w+)"\} (\d+)', text, re.M)
        engine = server.llm.engine
        return dict(found) | {"preemptions": str(engine.preemptions), "evicted": str(engine.evicted_pages)}

    def made() -> float:
        with server.http() as http:
            [count] = re.findall(r'^twostroke_tokens_total\{kind="output"\} (\S+)', http.get("/metrics").text, re.M)
        return float(count)

    def rate(of: Screen) -> float:
        return float(of.find("#rate-value").text_content().replace("\u2013", "nan"))

    def summed(name: str) -> float:
        with server.http() as http:
            return float(re.findall(rf"^twostroke_{name}_seconds_sum\S* (\S+)", http.get("/metrics").text, re.M)[0])

    eventually(lambda: told() == counted())
    times = {"ttft": "time_to_first_token", "itl": "inter_token_latency"}
    sums = {name: summed(name) for name in times.values()}
    screen.extra({"max_tokens": 2, "ignore_eos": True})
    screen.ask("one gap")
    for shown, name in times.items():
        passed = 1e3 * (summed(name) - sums[name])
        text = f"{passed:.{1 if passed < 10 else 0}f} ms"
        eventually(lambda shown=shown, text=text: screen.find(f"#{shown}-value").text_content() == text)
    screen.extra(LONG)
    screen.ask("go on", wait=False)
    body = {"prompt": [7] * 30, "stream": True, **LONG}
    with server.http() as http, ExitStack() as others:
        for _ in range(2):
            others.enter_context(http.stream("POST", "/v1/completions", json=body))
        eventually(lambda: told()["running"] == "3" == counted()["running"])
        screen.page.wait_for_timeout(500)
        late = tab_beside(screen)

        def agree() -> bool:
            before, began = made(), late.page.evaluate("performance.now()")
            late.page.wait_for_timeout(2500)
            true = (made() - before) / (late.page.evaluate("performance.now()") - began) * 1e3
            return all(0.4 * true < rate(one) < 2.5 * true for one in (late, screen))

        eventually(agree)  # a machine may stand still for a moment
        late.page.close()
        screen.page.click("#stop")
        eventually(lambda: told()["running"] == counted()["running"] == "2")
    eventually(lambda: told() == counted() and told()["running"] == "0")
    screen.until("document.getElementById('rate-value').textContent === '0.0'")


def test_the_numbers_of_a_server_that_comes_back(
    open_page: Callable[..., Screen], servers: ExitStack, tiny_directory: Any
) -> None:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=4 << 20, threads=1)
    port = servers.enter_context(kept_port())
    with serving(llm, port=port) as first:
        screen = open_page(first.url)
        screen.page.wait_for_selector("#running-value:text('0')")
    screen.page.wait_for_selector("#link.gone")
    for name in COUNTS:
        screen.page.wait_for_selector(f"#{name}-value:text('\u2013')")
    with serving(llm, port=port):
        screen.page.wait_for_selector("#running-value:text('0')")
        screen.page.goto("about:blank")
    screen.complaints.clear()  # the browser's, about calls that nobody answered
