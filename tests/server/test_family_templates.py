"""The chat templates that families publish: thoughts set apart on every API, switched, and left out of later prompts.

The templates are those in llama.cpp's source (docs/families.md). Answers are those that a family's model writes.
"""

import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import anthropic
import pytest

from tests.models.llama_cpp import SOURCE
from tests.server.conftest import Serving, serving
from tests.server.test_thoughts import ANSWER, CHAT, THOUGHT, USER, WRITTEN, joined, post, writing
from tests.thinking import thinking_model
from tests.tiny import write_model
from twostroke.api.llm import LLM

TEMPLATES = SOURCE / "models" / "templates"
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not TEMPLATES.is_dir(), reason=f"there is no {TEMPLATES}: docs/families.md says how to get it"),
]
ASKED = "turns thoughts on and no more: the chat template has no levels"
UNUSED = "has no effect: the chat template does not use it"


class Published(NamedTuple):
    """What a family's template does.

    Attributes:
        file: its name there.
        written: how the model writes, a key of `WRITTEN`; None if it has no thoughts.
        on: what a request needs so that the model thinks.
        closed: whether the template itself ends the thought where thoughts are off.
        effort: what is said of an effort; None if the template has levels.
        kept: whether thoughts of earlier turns stay.
    """

    file: str
    written: str | None
    on: Mapping[str, Any] = MappingProxyType({})
    closed: bool = False
    effort: str | None = ASKED
    kept: bool = False


FAMILIES = {
    "Qwen3": Published("Qwen-Qwen3-0.6B", "switch", closed=True),
    "Qwen3.5": Published("Qwen3.5-4B", "open", closed=True),
    "gpt-oss": Published("openai-gpt-oss-120b", "harmony", effort=None),
    "Gemma 4": Published("google-gemma-4-31B-it", "gemma", {"reasoning_effort": "high"}, closed=True),
    "Granite 3.3": Published("ibm-granite-granite-3.3-2B-Instruct", "switch", {"thinking": {"type": "enabled"}}),
    "Granite 4": Published("ibm-granite-granite-4.1", None, effort=UNUSED),
    "SmolLM3": Published("HuggingFaceTB-SmolLM3-3B", "switch", closed=True),
    "GLM 4.6": Published("GLM-4.6", "switch", closed=True),
    "GLM 4.7": Published("GLM-4.7-Flash", "open", closed=True),
    "LFM2": Published("LFM2-8B-A1B", None, effort=UNUSED),
    "LFM2.5": Published("LFM2.5-8B-A1B", "switch", effort=UNUSED),
    "Ministral 3": Published("mistralai-Ministral-3-14B-Reasoning-2512", "mistral", effort=UNUSED, kept=True),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Published:
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def server(family: Published, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    plain, directory = (tmp_path_factory.mktemp(name) for name in ("plain", "thinking"))
    write_model("llama", plain, max_position_embeddings=8192)
    thinking_model(plain, directory, family.written or "switch")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    settings["chat_template"] = (TEMPLATES / f"{family.file}.jinja").read_text()
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    with serving(LLM(str(directory), kv_bytes=16 << 20, threads=1)) as running:
        yield running


def text_of(family: Published, thought: str = THOUGHT, answer: str = ANSWER) -> str:
    return answer if family.written is None else WRITTEN[family.written][0].format(thought, answer)


def prompt(server: Serving, *messages: Any, **fields: Any) -> str:
    with server.http() as http:
        told = http.post("/tokenize", json={"messages": list(messages), **fields})
    assert told.status_code == 200, told.text
    return server.llm.tokenizer.decode(told.json()["tokens"], skip_special=False)


def test_every_api(family: Published, server: Serving) -> None:
    """Whole and streamed."""
    thought = THOUGHT if family.written else ""
    effort = "high" if "reasoning_effort" in family.on else None
    thinking: Any = {"type": "enabled", "budget_tokens": 5000} if family.on else {"type": "adaptive"}
    with writing(server, text_of(family)):
        message = post(server, CHAT, messages=USER, **family.on)["choices"][0]["message"]
        events = post(server, CHAT, messages=USER, stream=True, **family.on)
        responses = server.client.responses
        asked: Any = {"model": "tiny", "input": "hi", "max_output_tokens": 300}
        asked |= {"reasoning": {"effort": effort}} if effort else {"extra_body": dict(family.on)}
        made, pieces = responses.create(**asked), list(responses.create(**asked, stream=True))
        client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
        body: Any = {"model": "tiny", "max_tokens": 6000, "messages": USER, "thinking": thinking}
        said = client.messages.create(**body)
        with client.messages.stream(**body) as stream:
            streamed = stream.get_final_message()
        ollama = {"messages": USER, "think": "high" if effort else True, "options": {"num_predict": 300}}
        chat = [post(server, "/api/chat", **ollama, stream=False)]
        parts = post(server, "/api/chat", **ollama, stream=True)
    assert (message.get("reasoning_content") or "", message["content"]) == (thought, ANSWER)
    assert (joined(events, "reasoning_content"), joined(events, "content")) == (thought, ANSWER)
    assert [item.type for item in made.output] == (["reasoning"] if thought else []) + ["message"]
    assert made.output_text == ANSWER
    assert "".join(e.delta for e in pieces if e.type == "response.reasoning_text.delta") == thought
    assert "".join(e.delta for e in pieces if e.type == "response.output_text.delta") == ANSWER
    for one in (said, streamed):
        blocks = [block.to_dict() for block in one.content]
        assert [block.get("thinking") or block.get("text") for block in blocks] == [*filter(None, [thought]), ANSWER]
    for told in (chat, parts):
        assert "".join(one["message"].get("thinking") or "" for one in told) == thought
        assert "".join(one["message"]["content"] for one in told) == ANSWER


def test_thoughts_are_turned_off(family: Published, server: Serving) -> None:
    """By the template, or by closing the thought at once; nobody is told that this has no effect."""
    closed = family.closed or family.written is None
    for fields in ({"reasoning_effort": "none"}, {"thinking": {"type": "disabled"}}, {"reasoning": {"enabled": False}}):
        with writing(server, "no" if closed else text_of(family, "the quick brown fox", "no")):
            made = post(server, CHAT, messages=USER, choice=["yes", "no"], **fields)
        message = made["choices"][0]["message"]
        assert message["content"] in ("yes", "no")
        assert "reasoning_content" not in message
        assert "warnings" not in made, fields


def test_efforts(family: Published, server: Serving) -> None:
    """A level is in the prompt, or it is said that there is none."""
    with writing(server, text_of(family)):
        made = post(server, CHAT, messages=USER, reasoning_effort="high")
    if family.effort is None:
        assert "warnings" not in made
        assert "Reasoning: high" in prompt(server, *USER, reasoning_effort="high")
        assert "none" not in prompt(server, *USER, reasoning_effort="none")
    else:
        assert f"reasoning_effort {family.effort}" in made["warnings"]


def test_a_grammar_a_budget_and_stop_strings(family: Published, server: Serving) -> None:
    rule = {"regex": "7+", "max_tokens": 300}
    with writing(server, text_of(family, answer="7")):
        message = post(server, CHAT, messages=USER, **rule, **family.on)["choices"][0]["message"]
    assert (message.get("reasoning_content") or "", message["content"]) == (THOUGHT if family.written else "", "7")
    if family.written is None:
        return
    with writing(server, text_of(family, "the quick brown fox jumps over the lazy dog", "7")):
        made = post(server, CHAT, messages=USER, **rule, thinking_budget=4, **family.on)
    thought = made["choices"][0]["message"]["reasoning_content"]
    assert 0 < len(thought) < 20
    assert set(made["choices"][0]["message"]["content"]) == {"7"}
    assert 0 < made["usage"]["completion_tokens_details"]["reasoning_tokens"] < 60
    with writing(server, text_of(family, "a STOP b", "c STOP d")):
        message = post(server, CHAT, messages=USER, stop=["STOP"], **family.on)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"].strip()) == ("a STOP b", "c")


def test_earlier_thoughts(family: Published, server: Serving) -> None:
    said = {"role": "assistant", "content": "so it is", "reasoning_content": "hmhm"}
    told = prompt(server, *USER, said, *USER)
    assert "so it is" in told
    assert ("hmhm" in told) is family.kept


def test_marks_in_the_templates_own_text_open_nothing(family: Published, server: Serving) -> None:
    """Some have them in their system prompts."""
    if server.front.tokenizer.template_for(False) and family.written in ("switch", "mistral"):
        with writing(server, ANSWER):
            message = post(server, CHAT, messages=USER)["choices"][0]["message"]
        assert (message["content"], "reasoning_content" in message) == (ANSWER, False)


def test_the_templates_are_there() -> None:
    assert all((TEMPLATES / f"{one.file}.jinja").is_file() for one in FAMILIES.values())
    assert {one.written for one in FAMILIES.values()} - {None} == set(WRITTEN)
