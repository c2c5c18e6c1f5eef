"""Contexts as parts of messages, in any order: computed once, placed where they are named, with an estimate of the
error."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.methods.watching import needs_native
from tests.server.conftest import LOCAL, Serving, serving
from tests.server.test_contexts import MESSAGES, cold, post, put
from twostroke.api.llm import LLM
from twostroke.methods import Passages, Plain
from twostroke.models.checkpoints.chat_passages import PASSAGE, encode_chat
from twostroke.sampling.params import SamplingParams

TEXTS = {
    "fox": "the quick brown fox jumps over the lazy dog. " * 6,
    "cat": "and then the cat jumps over the dog, and a fox. " * 7,
    "dog": "a dog, a fox, a cat and the brown dog. " * 8,
}
CHAT = "/v1/chat/completions"
ASKED: Any = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def open_tiny(tiny_directory: Callable[[str], Path]) -> Callable[..., LLM]:
    """A model that the native backend runs, whose bits do not depend on the schedule."""
    return partial(LLM, str(tiny_directory("qwen3")), kv_bytes=16 << 20, threads=1)


@pytest.fixture
def running(open_tiny: Callable[..., LLM]) -> Iterator[Serving]:
    with serving(open_tiny()) as one:
        for name, text in TEXTS.items():
            put(one, name=name, prompt=text)
        yield one


def part(name: object) -> dict[str, Any]:
    return {"type": "context", "name": name}


def text(said: str, kind: str = "text") -> dict[str, Any]:
    return {"type": kind, "text": said}


def asking(*names: str, kind: str = "text") -> list[Any]:
    """A user's message with contexts and a question."""
    content = [text("read: ", kind), *(one for name in names for one in (part(name), text("\n\n", kind)))]
    return [{"role": "user", "content": [*content, text("who jumps?", kind)]}]


def facts_of(answer: dict[str, Any]) -> Any:
    """What the technique tells; None for a plain answer."""
    return answer.get("method_facts", answer.get("choices", [{}])[0].get("method_facts"))


def expected(llm: LLM, names: tuple[str, ...], method: Any) -> str:
    """The answer by the technique itself, over the same tokens."""
    content = "read: " + "".join(f"{PASSAGE}\n\n" for _ in names) + "who jumps?"
    named = [TEXTS[name] for name in names]
    ids = encode_chat(llm.tokenizer, [{"role": "user", "content": content}], named, add_generation_prompt=True)
    return llm.generate([ids], SamplingParams(max_tokens=8, temperature=0, ignore_eos=True), method=method)[0].text


@needs_native
@LOCAL
@pytest.mark.parametrize("names", [("fox", "cat", "dog"), ("dog", "fox", "cat"), ("cat", "cat")])
def test_contexts_in_any_order(names: tuple[str, ...], running: Serving, open_tiny: Callable[..., LLM]) -> None:
    """The answer is the technique's, none of their KV is computed again, and the answer tells how far it may be off."""
    other = open_tiny(prefix_index="off")
    for away in (False, True):
        if away:
            cold(running)
        answer = post(running, CHAT, messages=asking(*names), **ASKED)
        assert answer["choices"][0]["message"]["content"] == expected(other, names, Passages())
        facts, usage = facts_of(answer), answer["usage"]
        assert (facts["passages"], facts["mended_tokens"]) == (len(names), 32 * len(names))
        assert facts["deviation"] > 0
        whole = sum((len(other.tokenizer.encode(TEXTS[name])) - 1) // 16 * 16 for name in set(names))
        assert usage["prompt_tokens_details"]["cached_tokens"] >= whole
    plain = post(running, CHAT, messages=asking(*names), method="plain", **ASKED)
    assert plain["choices"][0]["message"]["content"] == expected(other, names, Plain())
    assert facts_of(plain) is None
    assert plain["usage"]["prompt_tokens"] == usage["prompt_tokens"]


@needs_native
def test_the_other_bodies_that_allow_parts(running: Serving) -> None:
    names = ("dog", "fox")
    chat = post(running, CHAT, messages=asking(*names), **ASKED)
    said, prompt = chat["choices"][0]["message"]["content"], chat["usage"]["prompt_tokens"]
    asked = {"max_output_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"input": asking(*names, kind="input_text")}
    response = post(running, "/v1/responses", **body, **asked)
    assert response["output"][0]["content"][0]["text"] == said
    assert facts_of(response) == facts_of(chat)
    assert post(running, "/v1/responses/input_tokens", **body)["input_tokens"] == prompt
    again = {"input": "who?", "previous_response_id": response["id"]}
    assert facts_of(post(running, "/v1/responses", **again, **asked))["passages"] == 2
    content = [text("read"), part("dog"), part("fox"), text("who?")]
    messages = [{"role": "user", "content": content}]
    anthropic = post(running, "/v1/messages", model="tiny", messages=messages, max_tokens=8, temperature=0)
    assert facts_of(anthropic)["passages"] == 2
    counted = post(running, "/v1/messages/count_tokens", model="tiny", messages=messages)["input_tokens"]
    texts = [{"role": "user", "content": "\n\n".join(["read", TEXTS["dog"], TEXTS["fox"], "who?"])}]
    assert abs(counted - post(running, "/tokenize", messages=texts)["count"]) < 8


def test_a_system_message_and_what_is_named_first(running: Serving) -> None:
    """With parts of several messages, and behind a context that the prompt begins with."""
    put(running, name="begun", messages=MESSAGES)
    messages = [{"role": "user", "content": [part("fox")]}, {"role": "assistant", "content": "yes"}, *asking("cat")]
    answer = post(running, CHAT, messages=messages, context="begun", **ASKED)
    assert facts_of(answer)["passages"] == 2
    system = [{"role": "system", "content": [part("dog"), text("be quick")]}, *asking("fox")]
    assert facts_of(post(running, CHAT, messages=system, **ASKED))["passages"] == 2


def test_a_stream_and_several_answers(running: Serving) -> None:
    answer = post(running, CHAT, messages=asking("fox", "cat"), n=2, max_tokens=4, seed=1)
    assert len(answer["choices"]) == 2
    with running.http() as http:
        streamed = http.post(CHAT, json={"messages": asking("fox"), "stream": True, "max_tokens": 4})
    assert '"deviation"' in streamed.text


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"messages": asking("none")}, 404, "there is no context 'none'"),
        (
            {"messages": asking("ids")},
            400,
            "context ids has token ids: a part of a message needs one whose prompt is a",
        ),
        ({"messages": asking("chat")}, 400, "context chat has messages: a part of a message needs one whose prompt"),
        ({"messages": asking(*["fox"] * 60)}, 400, "tokens"),
        ({"messages": [{"role": "user", "content": [part(7)]}]}, 400, "must have the name of one"),
        ({"messages": [{"role": "user", "content": [part(None)]}]}, 400, "must have the name of one"),
        ({"messages": [{"role": "user", "content": [part("\u00e9")]}]}, 400, "must have the name of one"),
        ({"messages": [{"role": "user", "content": [{"type": "context"}]}]}, 400, "must have the name of one"),
        ({"messages": asking("fox"), "passage_budget": 9}, 400, "passage_budget cannot be combined with parts of type"),
        ({"messages": asking("fox"), "truncate_prompt_tokens": 9}, 400, "truncate_prompt_tokens cannot be combined"),
        (
            {"messages": asking("fox"), "method": {"name": "passages", "mend": "cacheblend"}},
            400,
            "--draft first-layers",
        ),
    ],
)
def test_what_is_refused(running: Serving, body: dict[str, Any], status: int, words: str) -> None:
    put(running, name="ids", prompt=[5, 6, 7])
    put(running, name="chat", messages=MESSAGES)
    error = post(running, CHAT, status, **body)["error"]
    assert words in error["message"]
    assert "\n" not in error["message"]


def test_bodies_without_contexts(running: Serving) -> None:
    """Where a context is made, a part that is one is refused in one line."""
    error = post(running, "/v1/contexts", 400, messages=asking("fox"))["error"]
    assert error["message"] == "a part of type context is not supported here: put its text"


@needs_native
def test_the_prompt_can_be_looked_at_and_explained(running: Serving) -> None:
    """Tokens are those of the answer's prompt, and the plain walk through it is a page as that of any other."""
    ids = post(running, "/tokenize", messages=asking("fox", "cat"), add_generation_prompt=True)["tokens"]
    answer = post(running, CHAT, messages=asking("fox", "cat"), return_token_ids=True, **ASKED)
    assert answer["usage"]["prompt_tokens"] == len(ids)
    with running.http() as http:
        page = http.post("/explain", json={"tokens": ids, "answer": answer["choices"][0]["token_ids"]})
    assert page.status_code == 200
    assert "fox" in page.text


def test_marks_in_a_text_place_nothing(running: Serving) -> None:
    """Whoever writes the mark of a passage into a text gets no context there."""
    answer = post(running, CHAT, messages=[{"role": "user", "content": f"a {PASSAGE} b"}], **ASKED)
    assert facts_of(answer) is None
    messages = asking("fox")
    messages[0]["content"].append(text(PASSAGE))
    assert "does not write each message once" in post(running, CHAT, 400, messages=messages)["error"]["message"]


def test_what_needs_a_plain_answer_gets_one(running: Serving) -> None:
    answer = post(running, CHAT, messages=asking("fox"), receipt=True, **ASKED)
    assert facts_of(answer) is None
    assert answer["receipt"]


def test_a_kept_conversation_is_a_text(running: Serving) -> None:
    kept = post(running, CHAT, messages=asking("fox"), keep="talk", **ASKED)
    assert kept["context"] == "talk"
    answer = post(running, CHAT, messages=[{"role": "user", "content": "why?"}], context="talk", **ASKED)
    assert facts_of(answer) is None
    assert answer["usage"]["prompt_tokens"] > kept["usage"]["prompt_tokens"]


def test_long_bodies(running: Serving) -> None:
    """A long body goes through the body validator, which knows no context."""
    answer = post(running, CHAT, messages=asking("fox", "cat"), user=" " * 20_000, **ASKED)
    assert facts_of(answer)["passages"] == 2


def test_contexts_are_a_tenants_own(open_tiny: Callable[..., LLM], tmp_path: Path) -> None:
    """A part names the caller's context alone, and no KV of another tenant's is found by its text."""
    file = tmp_path / "keys.toml"
    keys = [f'[{name}]\nkey = "{name}"\nprivate = true\n' for name in ("anna", "bert")]
    file.write_text("".join([*keys, '[c]\nkey = "c"\nmethods = ["plain"]\n']))
    with serving(open_tiny(), api_key_file=str(file)) as running, running.http() as http:

        def ask(key: str, path: str, **body: Any) -> httpx.Response:
            return http.post(path, headers={"x-api-key": key}, json=body)

        def question(key: str, *names: str, **more: Any) -> httpx.Response:
            return ask(key, CHAT, messages=asking(*names), **ASKED, **more)

        for key, name, said in (("anna", "one", "fox"), ("bert", "two", "fox"), ("bert", "one", "cat")):
            made = ask(key, "/v1/contexts", name=name, prompt=TEXTS[said])
            assert made.status_code == 200
        refused = question("anna", "two")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "context_not_found")
        first, second, other = question("anna", "one"), question("bert", "two"), question("bert", "one")
        cached = [one.json()["usage"]["prompt_tokens_details"]["cached_tokens"] for one in (first, second, other)]
        assert min(cached) >= 48  # each finds its own
        assert first.json()["choices"][0]["message"] == second.json()["choices"][0]["message"]
        assert first.json()["usage"]["prompt_tokens"] != other.json()["usage"]["prompt_tokens"]
        assert ask("c", "/v1/contexts", name="mine", prompt=TEXTS["dog"]).status_code == 200
        assert question("c", "mine").status_code == 403
        assert question("c", "mine", method="plain").status_code == 200
