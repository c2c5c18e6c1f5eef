"""Kept answers and forks: trees of contexts that share pages, and whose answers are those of whole prompts."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.methods.watching import needs_native
from tests.server.conftest import Serving, eventually, serving
from tests.server.test_contexts import FOX, cached, cold, post, said
from twostroke.api.llm import LLM

CHAT = "/v1/chat/completions"
QUESTION: Any = [{"role": "user", "content": FOX * 10}]
NEXT: Any = [{"role": "user", "content": "the dog?"}]
OPTIONS: Any = {"max_tokens": 24, "seed": 5, "logprobs": True, "ignore_eos": True, "choice": [FOX * 2]}
FREE: Any = {"max_tokens": 12, "temperature": 1.0, "seed": 5, "logprobs": True, "ignore_eos": True}


@pytest.fixture(scope="module")
def running(tiny_directory: Callable[[str], Path]) -> Iterator[Serving]:
    with serving(LLM(str(tiny_directory("qwen3")), kv_bytes=16 << 20, threads=1)) as one:
        yield one


@pytest.fixture(autouse=True)
def empty(running: Serving) -> Iterator[None]:
    yield
    with running.http() as http:
        for context in http.get("/v1/contexts").json()["data"]:
            http.delete(f"/v1/contexts/{context['name']}")
    eventually(lambda: running.pages_used == 0)
    cold(running)


def content(answer: dict[str, Any]) -> str:
    return answer["choices"][0]["message"]["content"]


@needs_native
@pytest.mark.parametrize("stream", [False, True])
def test_a_kept_answer_is_gone_on_from(running: Serving, stream: bool) -> None:
    """The next turn, and the same answer continued, are those of the whole conversation, also from the host."""
    body = {"messages": QUESTION, **OPTIONS, "keep": "root"}
    if stream:
        with running.http() as http:
            lines = http.post(CHAT, json=body | {"stream": True}).text.splitlines()
        chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        text = "".join(one["choices"][0]["delta"].get("content", "") for one in chunks if one["choices"])
        assert [one["context"] for one in chunks if "context" in one] == ["root"]
    else:
        answer = post(running, CHAT, **body)
        text = content(answer)
        assert answer["context"] == "root"
    whole = [*QUESTION, {"role": "assistant", "content": text}]
    for more, asked in (({"messages": NEXT}, [*whole, *NEXT]), ({}, whole)):
        goes_on = {} if more else {"continue_final_message": True}
        expected = post(running, CHAT, messages=asked, **goes_on, **FREE)
        cold(running)
        found = post(running, CHAT, context="root", **more, **FREE)
        assert said(found) == said(expected)
        assert cached(found) >= 16 * 6


@needs_native
def test_a_fork_goes_on_from_any_token(running: Serving) -> None:
    root = post(running, CHAT, messages=QUESTION, **OPTIONS, keep=True, return_token_ids=True)
    ids = root["choices"][0]["token_ids"]
    for at, text in ((0, "a cat"), (5, ""), (7, " cat"), (None, " and on")):
        fork = post(running, f"/v1/contexts/{root['context']}/fork", at=at, text=text)
        begun = running.llm.tokenizer.decode(ids[:at]) + text
        assert (fork["parent"], fork["answer_tokens"] > 0) == (root["context"], True)
        whole = [*QUESTION, {"role": "assistant", "content": begun}]
        expected = post(running, CHAT, messages=whole, continue_final_message=True, **FREE)
        found = post(running, CHAT, context=fork["name"], keep=f"leaf-{at}", **FREE)
        assert said(found) == said(expected)
        again = post(running, f"/v1/contexts/leaf-{at}/fork")
        assert again["answer_tokens"] == fork["answer_tokens"] + 12


def test_a_tree_is_listed_pinned_and_dropped(running: Serving) -> None:
    post(running, CHAT, messages=QUESTION, **OPTIONS, keep="root")
    for name in ("one", "two"):
        post(running, "/v1/contexts/root/fork", name=name, at=3, text=name, pinned=True)
    post(running, CHAT, context="one", messages=NEXT, **FREE, keep="leaf")
    with running.http() as http:
        tree = {one["name"]: one for one in http.get("/v1/contexts").json()["data"]}
        assert {name: (one["parent"], one["children"]) for name, one in tree.items()} == {
            "root": (None, ["one", "two"]),
            "one": ("root", ["leaf"]),
            "two": ("root", []),
            "leaf": ("one", []),
        }
        assert [tree[name]["expires_at"] is None for name in tree] == [False, True, True, False]
        assert http.patch("/v1/contexts/leaf", json={"pinned": True}).json()["expires_at"] is None
        assert http.patch("/v1/contexts/leaf", json={"ttl": 60}).json()["expires_at"] > 0
        http.delete("/v1/contexts/root")
        assert http.get("/v1/contexts/one").json()["parent"] == "root", "it lives without it"
    assert post(running, CHAT, context="one", messages=NEXT, **FREE)


def test_branches_share_their_pages(running: Serving) -> None:
    """16 branches of one answer hold its pages once, and each computes what is its own."""
    page = running.llm.pool.page_size
    root = post(running, CHAT, messages=[{"role": "user", "content": FOX * 90}], **OPTIONS, keep="root")
    size = root["usage"]["total_tokens"]
    contexts = running.state.contexts
    before = contexts.size
    for i in range(16):
        fork = post(running, "/v1/contexts/root/fork", name=f"b{i}", at=15, text=f" try {i}")
        answer = post(running, CHAT, context=f"b{i}", **FREE)
        assert answer["usage"]["prompt_tokens"] - cached(answer) <= page
        assert fork["bytes"] > before / 2
    bodies = sum(len(json.dumps(QUESTION)) for _ in range(17)) * 12
    assert contexts.size - before < 16 * 2 * running.llm.pool.page_bytes + bodies
    assert len({page for one in contexts.all for page in one.pages}) <= size // page + 16 * 2


@pytest.mark.parametrize(
    ("path", "body", "status", "word"),
    [
        ("/v1/contexts/root/fork", {"at": 999}, 400, "at must be from 0 to"),
        ("/v1/contexts/root/fork", {"at": -1}, 400, "at"),
        ("/v1/contexts/plain/fork", {"at": 1}, 400, "does not end with an answer"),
        ("/v1/contexts/nobody/fork", {}, 404, "there is no context"),
        ("/v1/contexts/root/fork", {"name": "plain"}, 409, "stands for another"),
        (CHAT, {"messages": NEXT, "keep": True, "n": 2}, 400, "keep"),
        (CHAT, {"messages": NEXT, "keep": "a b"}, 400, "keep"),
        (CHAT, {"max_tokens": 2}, 400, "messages"),
    ],
)
def test_what_is_refused(running: Serving, path: str, body: dict[str, Any], status: int, word: str) -> None:
    post(running, CHAT, messages=QUESTION, **OPTIONS, keep="root")
    post(running, "/v1/contexts", name="plain", messages=QUESTION)
    assert word in post(running, path, status, **body)["error"]["message"]


def test_an_answer_for_which_there_is_no_room(tiny_directory: Callable[[str], Path]) -> None:
    """It is answered, and says why it is not kept."""
    llm = LLM(str(tiny_directory("qwen3")), kv_bytes=16 << 20, threads=1)
    with serving(llm, max_context_bytes=1000) as small:
        answer = post(small, CHAT, messages=QUESTION, **OPTIONS, keep=True)
        assert content(answer)
        assert answer["context"] is None
        assert "the context takes" in answer["context_error"]


@needs_native
def test_a_tree_outlives_the_server(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """Its contexts are listed, and taken from the disk; answers are the same, forks share pages, and the deleted stay
    away."""

    def opened() -> LLM:
        return LLM(str(tiny_directory("qwen3")), kv_bytes=16 << 20, threads=1, kv_disk=tmp_path / "disk")

    with serving(opened()) as one:
        post(one, CHAT, messages=QUESTION, **OPTIONS, keep="root", cache_salt="mine")
        post(one, "/v1/contexts/root/fork", name="one", at=5, text=" cat", pinned=True)
        post(one, "/v1/contexts/root/fork", name="gone", at=2)
        post(one, "/v1/contexts", prompt=[7, 8, 9, 10] * 20, name="ids", ttl=500)
        with one.http() as http:
            http.delete("/v1/contexts/gone")
            before = http.get("/v1/contexts").json()["data"]
        expected = [post(one, CHAT, context=name, **FREE) for name in ("root", "one")]
    [directory] = (tmp_path / "disk" / "contexts").iterdir()
    (directory / "bad.json").write_text("{}")
    (directory / "worse.json").write_text('{"format": "twostroke-context-1", "name": "other"}')
    with serving(opened()) as two:
        with two.http() as http:
            after = http.get("/v1/contexts").json()["data"]
        same = ("name", "tokens", "created_at", "parent", "children", "answer_tokens")
        assert [[one[key] for key in same] for one in after] == [[one[key] for key in same] for one in before]
        assert {one["name"]: one["expires_at"] is None for one in after} == {"root": False, "one": True, "ids": False}
        assert {one["tier"] for one in after} == {"disk"}
        found = [post(two, CHAT, context=name, **FREE) for name in ("root", "one")]
        assert [said(answer) for answer in found] == [said(answer) for answer in expected]
        with two.http() as http:
            data = {one["name"]: one for one in http.get("/v1/contexts").json()["data"]}
            assert [data[name]["tier"] for name in ("root", "one", "ids")] == ["pool", "pool", "disk"]
            shared = two.state.contexts
            root, fork = (set(shared.get(name).pages) for name in ("root", "one"))
            assert len(root & fork) >= len(fork) - 1, "a fork shares its pages again"
            assert http.delete("/v1/contexts/ids").status_code == 200
    assert sorted(path.name for path in directory.iterdir()) == ["bad.json", "one.json", "root.json", "worse.json"]
    with serving(LLM(str(tiny_directory("qwen3")), kv_bytes=16 << 20, threads=1)) as three, three.http() as http:
        assert http.get("/v1/contexts").json()["data"] == []


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"messages": NEXT, "keep": "a b"}, "keep: true, or a name of 1 to 128 letters, digits, _, . and -"),
        (CHAT, {"messages": NEXT, "keep": 5}, "keep: true, or a name of 1 to 128 letters, digits, _, . and -"),
        (CHAT, {"messages": NEXT, "keep": True, "n": 2}, "keep: this is for one answer: leave out n"),
        ("/v1/completions", {"prompt": "a", "keep": True}, "keep is not supported here"),
        ("/v1/completions", {"prompt": "a", "receipt": True, "max_tokens": 0}, "a receipt without an answer is not"),
        ("/v1/completions", {"prompt": "a", "receipt": True, "method": "repeat"}, "a receipt is made for plain"),
        ("/v1/responses", {"input": "a", "receipt": True, "method": "repeat"}, "a receipt is made for plain"),
    ],
)
def test_what_cannot_be_kept(running: Serving, path: str, body: dict[str, Any], message: str) -> None:
    assert message in post(running, path, 400, **body)["error"]["message"]


def test_files_that_cannot_be_written_or_have_expired(
    tiny_directory: Callable[[str], Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context lives without its file, and an expired one does not come back."""

    def opened() -> LLM:
        return LLM(str(tiny_directory("qwen3")), kv_bytes=16 << 20, threads=1, kv_disk=tmp_path / "disk")

    with serving(opened()) as one:
        post(one, "/v1/contexts", prompt=[7, 8, 9, 10] * 20, name="short", ttl=500)
        post(one, "/v1/contexts", prompt=[7, 8, 9, 10] * 20, name="later", pinned=True)
        [directory] = (tmp_path / "disk" / "contexts").iterdir()
        (directory / "full.json").mkdir()
        assert post(one, "/v1/contexts", prompt=[7, 8, 9] * 20, name="full")["name"] == "full"
        assert "context full will not outlive this server" in caplog.text
        with one.http() as http:
            assert http.delete("/v1/contexts/full").status_code == 200
    passed = time.time() + 600
    monkeypatch.setattr("twostroke.server.contexts.context.time.time", lambda: passed)
    with serving(opened()) as two, two.http() as http:
        assert [one["name"] for one in http.get("/v1/contexts").json()["data"]] == ["later"]
        assert not (directory / "short.json").exists()


def with_disk(tiny_directory: Callable[[str], Path], disk: Path) -> LLM:
    """A model whose pages are quicker to load than to compute, but not so slow that each goes to the disk at once."""
    llm = LLM(str(tiny_directory("qwen3")), kv_bytes=16 << 20, threads=1, kv_disk=disk)
    assert llm.model.backing_stores is not None
    llm.model.backing_stores.computing = lambda context, count: 0.002 * count
    return llm


DAMAGES = ["nothing", "some pages are gone", "pages", "all pages are gone", "the description"]


@needs_native
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_computed_again(
    tiny_directory: Callable[[str], Path], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A context's pages are on the disk as soon as it has its name. Whatever is wrong with them, no answer is."""
    asked: Any = {"context": "root", "messages": NEXT, **FREE}
    with serving(with_disk(tiny_directory, tmp_path / "disk")) as one:
        made = post(one, "/v1/contexts", messages=QUESTION, name="root")
    pages = [path for path in sorted((tmp_path / "disk" / "pages").rglob("*")) if path.is_file() and not path.suffix]
    assert len(pages) == made["tokens"] // 16
    for number, path in enumerate(pages):
        if damage == "pages":
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 1
            path.write_bytes(data)
        elif damage == "all pages are gone" or (damage == "some pages are gone" and number % 3 == 1):
            path.unlink()
    [description] = (tmp_path / "disk" / "contexts").rglob("root.json")
    if damage == "the description":
        description.write_text(description.read_text().replace("quick", "thick", 1))
    with serving(with_disk(tiny_directory, tmp_path / "disk")) as two:
        if damage == "the description":
            assert "there is no context" in post(two, CHAT, 404, **asked)["error"]["message"]
            assert "root.json is no saved context, and is left alone: it is damaged" in caplog.text
            return
        with two.http() as http:
            [listed] = http.get("/v1/contexts").json()["data"]
        assert (listed["name"], listed["tier"]) == ("root", "disk")
        found = post(two, CHAT, **asked)
        assert two.llm.tiers.disk is not None
        read = two.llm.tiers.disk.counters.read()
        assert (read.pages_in >= len(pages)) == (damage == "nothing")
        cold(two)
        whole: Any = [*QUESTION, *NEXT]
        assert said(found) == said(post(two, CHAT, messages=whole, **FREE))
