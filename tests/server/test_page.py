"""The page's files and how they are protected, what they ask for, and the feed of the engine's work."""

import asyncio
import gzip
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.server.conftest import Serving, eventually, serving
from twostroke.api.llm import LLM
from twostroke.methods import METHODS
from twostroke.server.app import create_app
from twostroke.server.page import feed, routes
from twostroke.server.settings import Settings
from twostroke.study.explain.attention import attention_of

BROWSER = {"accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}


LATER = {"vendor/math.js", "vendor/highlight.js"}  # loaded when they are first needed


def test_the_page_is_small() -> None:
    """What a browser loads first: all other files, compressed."""
    files = routes.static_files()
    assert files.keys() > LATER
    assert sum(len(file.packed) for name, file in files.items() if name not in LATER) <= 120 << 10


def test_files_come_whole_and_with_their_types(server: Serving) -> None:
    with server.http() as http:
        index = http.get("/", headers=BROWSER)
        assert index.headers["content-type"] == "text/html; charset=utf-8"
        assert index.headers["content-encoding"] == "gzip"
        assert gzip.decompress(routes.static_files()["index.html"].packed).decode() == index.text
        named = set(re.findall(r'(?:src|href)="/page/([^"]+)"', index.text))
        script = set(
            re.findall(
                r'(?:from |import\()"\./([^"]+)"', "".join(one.data.decode() for one in routes.static_files().values())
            )
        )
        assert named | script | {"index.html"} == set(routes.static_files()), (
            "every file is used, and every used file is there"
        )
        for name, kind in (("style.css", "text/css"), ("main.js", "text/javascript"), ("icon.svg", "image/svg+xml")):
            got = http.get(f"/page/{name}")
            assert got.headers["content-type"].split(";")[0] == kind
            again = http.get(f"/page/{name}", headers={"if-none-match": got.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
            plain = http.get(f"/page/{name}", headers={"accept-encoding": "identity"})
            assert "content-encoding" not in plain.headers
            assert plain.content == got.content
        for name in (
            "nothing.js",
            "vendor",
            "vendor/LICENSES.txt",
            "routes.py",
            "../routes.py",
            "..%2froutes.py",
            "%2e%2e%2froutes.py",
        ):
            assert http.get(f"/page/{name}").status_code == 404


def test_other_clients_get_what_they_got_before(server: Serving) -> None:
    with server.http() as http:
        for accept in ("*/*", "application/json", "text/plain"):
            assert http.get("/", headers={"accept": accept}).text == "Twostroke is running"
        assert http.head("/", headers=BROWSER).status_code == 200


def test_browsers_are_told_to_be_strict(server: Serving) -> None:
    with server.http() as http:
        for answer in (http.get("/", headers=BROWSER), http.get("/page/main.js")):
            parts = (part.split() for part in answer.headers["content-security-policy"].split(";"))
            policy = {name: " ".join(values) for name, *values in parts}
            assert policy["default-src"] == "'none'"
            assert {policy[one] for one in ("script-src", "style-src", "connect-src")} == {"'self'"}
            assert {policy[one] for one in ("frame-ancestors", "base-uri", "form-action", "trusted-types")} == {
                "'none'"
            }
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["referrer-policy"] == "no-referrer"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"


def test_no_text_becomes_markup_and_nothing_comes_from_elsewhere() -> None:
    """Of libraries, code that makes markup is never called, and the browser would refuse it (trusted types)."""
    for name, file in routes.static_files().items():
        text = file.data.decode()
        assert not re.search(r"\beval\(|new Function\(|document\.write", text), name
        if name.startswith("vendor/"):
            continue
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML", text), name
        assert not re.search(r"(src|href)=\"(https?:)?//|import\((?!\"\./vendor/)|url\(|@import", text), name
        assert not re.search(r"<style|\sstyle=|\son\w+=\"", text), name


def test_a_key_protects_everything_but_the_files(open_tiny: Callable[..., LLM]) -> None:
    with serving(open_tiny(), api_key="secret") as running, running.http() as http:
        assert http.get("/", headers=BROWSER).status_code == 200
        assert http.get("/page/main.js").status_code == 200
        assert http.get("/").status_code == 401
        for path in ("/watch", "/methods", "/v1/models"):
            assert http.get(path, headers=BROWSER).status_code == 401
        assert http.post("/attention", json={"tokens": [1]}).status_code == 401
        assert http.post("/explain", json={"tokens": [1], "answer": [1]}).status_code == 401
        assert http.get("/methods", headers={"authorization": "Bearer secret"}).status_code == 200


def test_methods(server: Serving) -> None:
    with server.http() as http:
        told = http.get("/methods").json()
    assert (told["model"], told["max_model_len"]) == ("tiny", server.llm.max_model_len)
    offered = {one["name"]: one for one in told["methods"]}
    assert offered.keys() == {name for name in METHODS if not METHODS[name]().companions}
    times, sinks, keep, *_ = offered["repeat"]["parameters"]
    assert (times["name"], times["default"], sinks["default"]) == ("times", 2, 4)
    assert keep["choices"] == ["last", "all", "first"]
    assert offered["plain"]["about"] == "Prefill the prompt, decode the answer."


def test_attention(server: Serving) -> None:
    tokens = [5, 9, 80, 81, 7, 30]
    with server.http() as http:
        told = http.post("/attention", json={"tokens": tokens, "position": 3, "layer": 2, "head": 1}).json()
        expected = attention_of(server.llm, tokens, 3)
        assert told["tokens"] == expected.tokens == tokens[:4]
        assert told["weights"] == [round(float(weight), 6) for weight in expected.mean(2, 1)]
        assert (told["num_layers"], told["layers"], told["num_heads"]) == (3, [0, 1, 2], 4)
        assert [len(told[name]) for name in ("texts", "positions")] == [4, 4]
        last = http.post("/attention", json={"tokens": tokens}).json()
        assert last["weights"] == [round(float(weight), 6) for weight in attention_of(server.llm, tokens).mean()]
        long = json.dumps({"tokens": tokens}) + " " * (20 << 10)  # is tried out in another process first
        assert http.post("/attention", content=long, headers={"content-type": "application/json"}).json() == last
        for wrong, word in (
            ({"tokens": []}, "tokens"),
            ({"tokens": [1], "position": 1}, "position"),
            ({"tokens": [1], "layer": 3}, "layer"),
            ({"tokens": [1], "head": 4}, "head"),
            ({"tokens": [9999]}, "ids"),
            ({"tokens": [1] * 5000}, "2047"),
        ):
            answer = http.post("/attention", json=wrong)
            assert answer.status_code == 400, wrong
            assert re.search(word, answer.json()["error"]["message"]), answer.text
    eventually(lambda: server.pages_used == 0)


def test_explain(server: Serving) -> None:
    """The page's data are those of the answer that was made, though greedily the model would have said another."""
    prompt, answer = [5, 9, 80, 81, 7, 30], [7, 300, 12, 7]
    with server.http() as http:
        told = http.post("/explain", json={"tokens": prompt, "answer": answer, "title": "</title><b>"})
        assert told.headers["content-disposition"].startswith("attachment")
        assert "<b>" not in told.text
        [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', told.text, re.S)
        made = json.loads(data)
        assert [one["id"] for one in made["tokens"]] == prompt
        assert [made["prefill"]["token"]["id"], *(step["token_out"]["id"] for step in made["decode"])] == answer
        many = http.post("/explain", json={"tokens": prompt, "answer": answer * 30}).text
        assert many.count('"token_out"') == 63
        for wrong in ({"tokens": []}, {"tokens": prompt, "answer": []}, {"tokens": [1] * 1025}, {"tokens": [9999]}):
            refused = http.post("/explain", json={"answer": [1]} | wrong)
            assert (refused.status_code, "error" in refused.json()) == (400, True), refused.text
    eventually(lambda: server.pages_used == 0)


def test_token_ids_of_an_answer(server: Serving) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9, "seed": 4, "return_token_ids": True}
    with server.http() as http:
        whole = http.post("/v1/chat/completions", json=body).json()["choices"][0]
        lines = http.post("/v1/chat/completions", json=body | {"stream": True}).text.splitlines()
    chunks = [json.loads(line[6:])["choices"] for line in lines if line.startswith("data: {")]
    ids = [id for choices in chunks for one in choices for id in one.get("token_ids", [])]
    assert ids == whole["token_ids"]
    assert len(ids) == 9


def events(lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    name = ""
    for line in lines:
        if line.startswith("event: "):
            name = line[7:]
        elif line.startswith("data: "):
            yield name, json.loads(line[6:])


def test_the_feed_tells_what_the_engine_does(open_tiny: Callable[..., LLM]) -> None:
    with serving(open_tiny()) as running, running.http() as http:
        assert running.llm.engine.observer is None
        with http.stream("GET", "/watch") as watching:
            told = events(watching.iter_lines())
            name, facts = next(told)
            assert name == "hello"
            pool = running.llm.pool
            assert facts["pools"] == [{"pages": pool.num_pages, "page_size": 16}]
            name, first = next(told)
            assert name == "steps"
            assert first.pop("at") > 0
            counts = dict.fromkeys(("running", "waiting", "arriving", "preemptions", "evicted"), 0)
            assert first == {"steps": [], "tokens": 0, **counts}
            name, pages = next(told)
            assert pages["pools"][0]["runs"] == [pool.num_pages, 0]
            body = {"model": "tiny", "prompt": [7] * 40, "max_tokens": 30, "ignore_eos": True}
            with running.http() as other:
                other.post("/v1/completions", json=body, headers={"x-request-id": "page-1"})
            steps: list[dict[str, Any]] = []
            tokens = 0
            while not steps or steps[-1]["running"]:
                name, data = next(told)
                if name == "steps":
                    steps += [dict(zip(facts["fields"], values, strict=True)) for values in data["steps"]]
                    tokens = data["tokens"]
                elif data["lanes"]:
                    assert data["owners"][0][0] == "page-1"
                    assert data["lanes"][0]["bytes"] == data["lanes"][0]["entries"] * pool.entry_bytes
                    assert sum(data["pools"][0]["runs"][::2]) == pool.num_pages
            assert tokens == 30
            assert sum(step["prefill"] for step in steps) == 40
            assert sum(step["decode"] for step in steps) == 29
            assert sum(len(step["ttft_us"]) for step in steps) == 1
            assert sum(len(step["itl_us"]) for step in steps) == 29
            for name, data in told:
                if name == "pages" and not data["lanes"]:  # what the last step left behind
                    assert data["pools"][0]["runs"] == [4, 1, pool.num_pages - 4, 0]
                    break
        eventually(lambda: running.llm.engine.observer is None)


def test_a_long_first_step_is_told_of(open_tiny: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A lone prompt runs from the start, though no step of it is over and no record there."""
    llm = open_tiny()
    forward, told_of = llm.model.compiled.forward, threading.Event()
    monkeypatch.setattr(llm.model.compiled, "forward", lambda *rows: (told_of.wait(), forward(*rows))[1])
    with serving(llm) as running, running.http() as http, http.stream("GET", "/watch") as watching:
        told = events(watching.iter_lines())
        for _ in range(3):
            next(told)
        with ThreadPoolExecutor(1) as clients:
            body = {"prompt": [7] * 40, "max_tokens": 2}
            sent = clients.submit(httpx.post, f"{running.url}/v1/completions", json=body)
            news = next(data for name, data in told if name == "steps" and (data["steps"] or data["running"]))
            told_of.set()
            assert (news["steps"], news["running"]) == ([], 1)
            assert sent.result().status_code == 200


def test_a_watcher_that_reads_nothing_stops_nobody(open_tiny: Callable[..., LLM]) -> None:
    with (
        serving(open_tiny()) as running,
        running.http() as http,
        socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as slow,
    ):
        slow.sendall(b"GET /watch HTTP/1.1\r\nhost: localhost\r\n\r\n")
        eventually(lambda: running.llm.engine.observer is not None)
        body = {"model": "tiny", "prompt": "the", "max_tokens": 600, "ignore_eos": True}
        assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 600


def test_a_watcher_that_is_slow_skips(monkeypatch: pytest.MonkeyPatch, open_tiny: Callable[..., LLM]) -> None:
    """It gets what is in the ring; all others have got everything."""
    monkeypatch.setattr(feed, "TICK_S", 0.001)
    monkeypatch.setattr(feed, "IDLE_S", 0.0)

    async def run() -> None:
        llm = open_tiny()
        settings = Settings(model_name="tiny")
        app = create_app(llm, settings)
        async with app.router.lifespan_context(app):
            told = feed.EngineFeed(app.state.engine)
            quick, slow = told.messages(), told.messages()
            await anext(quick)
            await anext(slow)
            for _ in range(3 * feed.RING_SIZE):
                await anext(quick)
            first = await anext(slow)
            assert 1 <= first.count(b"event: steps") <= feed.RING_SIZE
            await quick.aclose()
            await slow.aclose()
            for _ in range(1000):
                if llm.engine.observer is None:
                    break
                await asyncio.sleep(0.005)
            assert llm.engine.observer is None

    asyncio.run(run())


def test_watchers_end_with_the_server(open_tiny: Callable[..., LLM]) -> None:
    with serving(open_tiny()) as running, running.http() as http, http.stream("GET", "/watch") as watching:
        lines = watching.iter_lines()
        next(lines)
        running.server.should_exit = True
        for _ in lines:  # it ends
            pass
        with pytest.raises(httpx.StreamConsumed):
            next(watching.iter_lines())
