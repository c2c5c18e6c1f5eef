"""OpenAI's client: answers over HTTP equal those of `LLM.generate`."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest

from tests.server.conftest import Serving, eventually, serving
from tests.server.long_answers import LONG
from twostroke.api.conversation.fitting import cut_passages
from twostroke.api.llm import LLM
from twostroke.methods import method

SAMPLED: Any = {"max_tokens": 20, "temperature": 1.0, "seed": 5}
MESSAGES: Any = [{"role": "system", "content": "be quick"}, {"role": "user", "content": "the fox?"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "remember", "description": "Keep a person.", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "forget"}},
]


def texts(llm: LLM, prompts: list[Any], **options: Any) -> list[list[str]]:
    return [[output.text for output in completion.outputs] for completion in llm.generate(prompts, **options)]


def flat(lists: list[list[str]]) -> list[str]:
    return [text for texts in lists for text in texts]


def test_completions_plain(client: openai.OpenAI, reference: LLM) -> None:
    """Prompts as a text, token ids, several of both, and n: the texts equal those of generate, in order."""
    expected = texts(reference, ["the quick"], **SAMPLED, n=2)[0]
    made = client.completions.create(model="tiny", prompt="the quick", n=2, **SAMPLED)
    assert [choice.text for choice in made.choices] == expected
    assert expected[0] != expected[1]
    assert [choice.index for choice in made.choices] == [0, 1]
    ids = [[5, 6, 7], [9, 9]]
    batch = client.completions.create(model="tiny", prompt=ids, n=2, **SAMPLED)
    assert [choice.text for choice in batch.choices] == flat(texts(reference, ids, **SAMPLED, n=2))
    assert batch.usage is not None
    assert batch.usage.prompt_tokens == 5
    one = client.completions.create(model="tiny", prompt=ids[0], **SAMPLED)
    assert one.choices[0].text == batch.choices[0].text


def test_completions_stream(client: openai.OpenAI, reference: LLM) -> None:
    """The joined pieces of every choice equal its text, and usage is sent if requested."""
    prompts = ["the quick", "the lazy dog"]
    expected = flat(texts(reference, prompts, **SAMPLED, n=2))
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    pieces, usages = [""] * 4, []
    reasons: list[str | None] = [None] * 4
    chunks = list(
        client.completions.create(model="tiny", prompt=prompts, n=2, stream=True, stream_options=options, **SAMPLED)
    )
    for chunk in chunks:
        for choice in chunk.choices:
            pieces[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
        usages.append(chunk.usage)
    assert pieces == expected
    assert set(reasons) <= {"stop", "length"}
    counts = [usage.completion_tokens for usage in usages]
    assert not chunks[-1].choices
    ids = [output.tokens for completion in reference.generate(prompts, **SAMPLED, n=2) for output in completion.outputs]
    total = sum(map(len, ids))
    assert counts == [*range(1, total + 1), total], "every token is told of, also one that is part of a character"


def test_chat(client: openai.OpenAI, reference: LLM) -> None:
    expected = reference.chat(MESSAGES, **SAMPLED)
    made = client.chat.completions.create(model="tiny", messages=MESSAGES, **SAMPLED)
    assert made.choices[0].message.content == expected.text
    assert made.choices[0].finish_reason == expected.finish_reason
    parts: Any = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in MESSAGES]
    same = client.chat.completions.create(model="tiny", messages=parts, max_completion_tokens=20, **SAMPLED)
    assert same.choices[0].message.content == expected.text
    assert same.usage is not None
    assert same.usage.prompt_tokens_details is not None
    cached = same.usage.prompt_tokens_details.cached_tokens
    assert cached == (same.usage.prompt_tokens - 1) // 16 * 16, "all whole pages but the last token's"
    timings: Any = same.choices[0].timings  # pyright: ignore[reportAttributeAccessIssue]
    assert timings["ttft_ms"] == pytest.approx(timings["queue_ms"] + timings["prefill_ms"], abs=0.01)
    assert timings["itl_p99_ms"] >= timings["itl_mean_ms"] > 0
    streamed, roles = "", []
    for chunk in client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **SAMPLED):
        roles.append(chunk.choices[0].delta.role)
        streamed += chunk.choices[0].delta.content or ""
    assert streamed == expected.text
    assert roles == ["assistant", *[None] * (len(roles) - 1)]


def test_stop_min_tokens_and_ignore_eos(client: openai.OpenAI, reference: LLM) -> None:
    whole = texts(reference, ["the"], max_tokens=40, ignore_eos=True)[0][0]
    middle = whole[len(whole) // 2 :][:3]
    fields: Any = {"max_tokens": 40, "stop": [middle]}
    cut = client.completions.create(
        model="tiny", prompt="the", temperature=0, extra_body={"ignore_eos": True}, **fields
    )
    assert cut.choices[0].text == whole[: whole.index(middle)]
    assert cut.choices[0].finish_reason == "stop"
    late = {"ignore_eos": True, "min_tokens": 40}
    kept = client.completions.create(model="tiny", prompt="the", temperature=0, extra_body=late, **fields)
    assert kept.choices[0].text == whole


def test_logprobs(client: openai.OpenAI, reference: LLM) -> None:
    expected = reference.generate(["the"], max_tokens=6, logprobs=3, ignore_eos=True)[0].tokens
    more: Any = {"ignore_eos": True}
    made = client.completions.create(
        model="tiny", prompt="the", max_tokens=6, temperature=0, logprobs=3, extra_body=more
    ).choices[0]
    assert made.logprobs is not None
    assert made.logprobs.token_logprobs == pytest.approx([token.logprob for token in expected], abs=1e-4)
    assert made.logprobs.tokens == [reference.tokenizer.token_text(token.id) for token in expected]
    assert [len(top) for top in made.logprobs.top_logprobs or ()] == [3] * 6
    assert made.logprobs.text_offset is not None
    assert made.logprobs.text_offset[0] == 0
    ids = reference.tokenizer.encode_chat(MESSAGES)
    expected = reference.generate([ids], max_tokens=6, logprobs=2, ignore_eos=True)[0].tokens
    fields: Any = {"max_tokens": 6, "temperature": 0, "logprobs": True, "top_logprobs": 2, "extra_body": more}
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, **fields).choices[0]
    assert chat.logprobs is not None
    whole = chat.logprobs.content or []
    assert [entry.logprob for entry in whole] == pytest.approx([token.logprob for token in expected], abs=1e-4)
    assert [bytes(entry.bytes or ()) for entry in whole] == [
        reference.tokenizer.token_bytes(token.id, skip_special=False) for token in expected
    ]
    assert all(entry.top_logprobs[0].logprob >= entry.logprob - 1e-6 for entry in whole)
    stream = client.chat.completions.create(model="tiny", messages=MESSAGES, stream=True, **fields)
    entries = [e for chunk in stream for c in chunk.choices if c.logprobs for e in c.logprobs.content or ()]
    assert [entry.token for entry in entries] == [entry.token for entry in whole]


def test_methods(client: openai.OpenAI, reference: LLM) -> None:
    """By a field of the body, and by the model's alias."""
    prompt, fields = "the quick brown fox", cast(Any, {"max_tokens": 12, "temperature": 0})
    twice = reference.generate([prompt], max_tokens=12, method=method("repeat", sinks=4))[0].text
    wanted: Any = {"method": {"name": "repeat", "times": 2, "sinks": 4}}
    assert client.completions.create(model="tiny", prompt=prompt, extra_body=wanted, **fields).choices[0].text == twice
    alias: Any = {"method": {"sinks": 4}}
    made = client.completions.create(model="tiny:repeat", prompt=prompt, extra_body=alias, **fields)
    assert made.choices[0].text == twice
    assert made.model == "tiny:repeat"
    assert twice != texts(reference, [prompt], max_tokens=12)[0][0]
    several: Any = (
        {"name": "snap", "window": 2, "budget": 4},
        {"name": "keydiff", "budget": 4},
        {"name": "drop", "by": "attention", "window": 2, "every": 2},
        {"name": "critical-kv", "budget": 4, "newest": 1, "budgets": "ada"},
        {"name": "triattention", "budget": 4, "newest": 1, "every": 2},
        {"name": "compose", "first": "partrep:ratio=0.5", "then": "keydiff:budget=4"},
    )
    for chosen in several:
        few = reference.generate([prompt], max_tokens=12, method=method(**chosen))[0].text
        asked: Any = {"method": chosen}
        assert client.completions.create(model="tiny", prompt=prompt, extra_body=asked, **fields).choices[0].text == few
    with pytest.raises(openai.BadRequestError, match="window must be an integer from 1 to 64"):
        client.completions.create(model="tiny", prompt=prompt, extra_body={"method": {"name": "snap", "window": 10**6}})
    assert [model.id for model in client.models.list()] == ["tiny"]
    for name in ("tiny:repeat", "tiny:best-of", "tiny:latest"):
        assert client.models.retrieve(name).id == name
        assert client.completions.create(model=name, prompt=prompt, max_tokens=2).model == name


def test_methods_that_need_a_student(client: openai.OpenAI, open_tiny: Callable[..., LLM]) -> None:
    """They work if the server was started with a student, and are refused in one line if not."""
    chosen: list[dict[str, Any]] = [{"name": "overfill"}, {"name": "refresh", "every": 4}]
    chosen += [{"name": "speculative", "draft": "student"}, {"name": "reread", "times": [" again "], "scope": "turn"}]
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "temperature": 0}
    llm = open_tiny(student="int8")
    expected = [llm.chat(MESSAGES, method=method(**fields), max_tokens=12).text for fields in chosen]
    with serving(open_tiny(student="int8")) as running:
        for fields, text in zip(chosen, expected, strict=True):
            made = running.client.chat.completions.create(**asked, extra_body={"method": fields})
            assert made.choices[0].message.content == text
            chunks = running.client.chat.completions.create(**asked, stream=True, extra_body={"method": fields})
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert running.client.models.retrieve("tiny:overfill").id == "tiny:overfill"
        listed = {one["name"] for one in running.http().get("/methods").json()["methods"]}
        assert {"refresh", "overfill"} <= listed
    for fields in chosen[:3]:
        with pytest.raises(openai.BadRequestError, match=f"method {fields['name']} needs a student"):
            client.chat.completions.create(**asked, extra_body={"method": fields})
    listed = {one["name"] for one in httpx.get(str(client.base_url.join("/methods"))).json()["methods"]}
    assert "overfill" not in listed


def test_what_a_method_counts_is_in_the_answer(client: openai.OpenAI, reference: LLM) -> None:
    """As a whole and in a stream, in every API of OpenAI."""
    text = "the quick brown fox jumps over the lazy dog\n\nwho jumps?"
    wanted: Any = {"name": "compress", "budget": 4}
    expected = reference.chat(text, method=method(**wanted), max_tokens=4)
    facts = dataclasses.asdict(expected.facts)
    assert facts["dropped_tokens"] > 0
    fields: Any = {"model": "tiny", "temperature": 0, "extra_body": {"method": wanted}}
    asked: Any = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}
    made: Any = client.chat.completions.create(**asked)
    assert made.choices[0].message.content == expected.text
    assert made.choices[0].method_facts == facts
    *_, last = client.chat.completions.create(**asked, stream=True)
    assert cast(Any, last.choices[0]).method_facts == facts
    response: Any = client.responses.create(input=text, max_output_tokens=4, **fields)
    assert response.method_facts == facts
    single: Any = client.completions.create(prompt=text, max_tokens=4, **fields)
    assert single.choices[0].method_facts["dropped_tokens"] > 0
    plain: Any = client.chat.completions.create(**asked | {"extra_body": {}})
    assert not hasattr(plain.choices[0], "method_facts")


@pytest.mark.parametrize("seed", [1, 2])
def test_json_schema(seed: int, client: openai.OpenAI) -> None:
    """A random model's answers follow the schema, several at once and streamed too."""
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    fields: Any = {"messages": MESSAGES, "model": "tiny", "seed": seed, "response_format": form, "n": 3}
    made = client.chat.completions.create(**fields)
    contents = [choice.message.content or "" for choice in made.choices]
    for choice in made.choices:
        person = json.loads(choice.message.content or "")
        assert set(person) == {"name", "age"}
        assert len(person["name"]) <= 6
        assert 0 <= person["age"] <= 99
        assert choice.finish_reason == "stop"
    assert len(set(contents)) == 3
    streamed = [""] * 3
    for chunk in client.chat.completions.create(stream=True, **fields):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == contents


def test_json_object_regex_and_choice(client: openai.OpenAI) -> None:
    fields: Any = {"model": "tiny", "prompt": "the", "max_tokens": 300, "seed": 1}
    for body, form in (({"regex": r"[A-Z]{3}-\d{2}"}, 6), ({"choice": ["yes", "no"]}, None)):
        text = client.completions.create(extra_body=body, **fields).choices[0].text
        assert len(text) == form or text in ("yes", "no")
    small: Any = {"response_format": {"type": "json_object"}, "logit_bias": {}}
    text = client.completions.create(extra_body=small, **fields | {"seed": 3}).choices[0]
    assert text.text.startswith("{")
    if text.finish_reason == "stop":
        assert isinstance(json.loads(text.text), dict)


def test_tools(client: openai.OpenAI) -> None:
    """A call is parsed, its arguments follow the schema, and a stream has the same pieces."""
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "seed": 4, "parallel_tool_calls": False}
    named: Any = {"type": "function", "function": {"name": "remember"}}
    made = client.chat.completions.create(tool_choice=named, **fields).choices[0]
    assert made.finish_reason == "tool_calls"
    assert made.message.content is None
    call: Any = (made.message.tool_calls or [])[0]
    assert call.function.name == "remember"
    assert set(json.loads(call.function.arguments)) == {"name", "age"}
    names, arguments, ids, reasons = "", "", [], []
    for chunk in client.chat.completions.create(tool_choice=named, stream=True, **fields):
        for delta in chunk.choices[0].delta.tool_calls or ():
            assert delta.function is not None
            names, arguments = names + (delta.function.name or ""), arguments + (delta.function.arguments or "")
            ids.append(delta.id)
        reasons.append(chunk.choices[0].finish_reason)
    assert (names, arguments) == ("remember", call.function.arguments)
    assert [id is not None for id in ids] == [True] + [False] * (len(ids) - 1)
    assert reasons[-1] == "tool_calls"
    any_of = client.chat.completions.create(tool_choice="required", **fields).choices[0]
    assert (any_of.message.tool_calls or [])[0].type == "function"
    none = client.chat.completions.create(tool_choice="none", max_tokens=5, **fields).choices[0]
    assert none.message.tool_calls is None
    auto = client.chat.completions.create(max_tokens=30, **fields).choices[0]
    assert auto.message.content
    # And the next turn, with the call's result.
    turn: Any = [*MESSAGES, made.message.model_dump(exclude_none=True)]
    turn.append({"role": "tool", "tool_call_id": call.id, "content": "done"})
    after = client.chat.completions.create(model="tiny", messages=turn, tools=TOOLS, max_tokens=5)
    before = client.chat.completions.create(model="tiny", messages=MESSAGES, tools=TOOLS, max_tokens=5)
    assert after.usage is not None
    assert before.usage is not None
    assert after.usage.prompt_tokens > before.usage.prompt_tokens + len(call.function.arguments) // 4


def test_a_stop_string_does_not_cut_a_call(client: openai.OpenAI) -> None:
    """It ends the text around calls; a call whose tokens run out is not called complete."""
    named: Any = {"type": "function", "function": {"name": "remember"}}
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "seed": 4, "tool_choice": named}
    made = client.chat.completions.create(**fields).choices[0]
    (call,) = made.message.tool_calls or []
    stopped = client.chat.completions.create(stop=['"', "}", "name"], **fields).choices[0]
    assert stopped.finish_reason == "tool_calls"
    (same,) = stopped.message.tool_calls or []
    assert cast(Any, same).function == cast(Any, call).function
    for most in range(1, 40, 6):
        short = client.chat.completions.create(max_tokens=most, **fields).choices[0]
        assert short.finish_reason == "length"
        assert not short.message.content


def test_a_schema_that_cannot_be_followed_does_not_refuse_the_others(client: openai.OpenAI) -> None:
    bad: Any = {"type": "function", "function": {"name": "bad", "parameters": {"type": "banana"}}}
    fields: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5}
    assert client.chat.completions.create(tools=[*TOOLS, bad], **fields).choices
    bad["function"]["strict"] = True
    with pytest.raises(openai.BadRequestError, match="bad"):
        client.chat.completions.create(tools=[*TOOLS, bad], **fields)


def test_tools_and_a_response_format(client: openai.OpenAI) -> None:
    """An answer calls, or has the format: instructor's Responses modes and LangChain's agents send both."""
    person: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "response_format": person}
    for seed in range(12):
        made = client.chat.completions.create(seed=seed, **fields).choices[0]
        if made.finish_reason == "stop":
            assert set(json.loads(made.message.content or "")) == {"name", "age"}
        else:
            assert made.message.content is None
        for call in made.message.tool_calls or ():
            assert isinstance(json.loads(cast(Any, call).function.arguments), dict)
    must = client.chat.completions.create(tool_choice="required", **fields).choices[0]
    assert must.finish_reason == "tool_calls"
    none = client.chat.completions.create(tool_choice="none", **fields).choices[0]
    assert set(json.loads(none.message.content or "")) == {"name", "age"}


def test_responses(client: openai.OpenAI, reference: LLM) -> None:
    expected = reference.chat(MESSAGES, max_tokens=20, temperature=1.0, seed=5)
    fields: Any = {"model": "tiny", "instructions": "be quick", "input": "the fox?", "max_output_tokens": 20}
    fields["extra_body"] = {"seed": 5}
    made = client.responses.create(**fields)
    assert made.output_text == expected.text
    assert made.status == ("completed" if expected.finish_reason == "stop" else "incomplete")
    events = list(client.responses.create(stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == expected.text
    assert events[0].type == "response.created"
    last: Any = events[-1]
    assert last.response.output_text == expected.text
    assert last.response.usage.output_tokens == len(expected.tokens)
    form: Any = {"format": {"type": "json_schema", "name": "person", "schema": SCHEMA, "strict": True}}
    shaped = client.responses.create(model="tiny", input="the fox?", text=form)
    assert set(json.loads(shaped.output_text)) == {"name", "age"}


def test_cancellation(server: Serving, client: openai.OpenAI) -> None:
    """A client that closes its stream frees the pages; the others' text does not change."""
    text = client.completions.create(model="tiny", prompt="the quick", **SAMPLED).choices[0].text
    stream = client.completions.create(model="tiny", prompt="the lazy", stream=True, extra_body=LONG)
    next(iter(stream))
    assert server.pages_used > 0
    assert client.completions.create(model="tiny", prompt="the quick", **SAMPLED).choices[0].text == text
    stream.close()
    eventually(lambda: server.pages_used == 0 and server.llm.engine.num_running == 0)


def test_tokenize(server: Serving, reference: LLM) -> None:
    with server.http() as http:
        made = http.post("/tokenize", json={"prompt": "the quick fox"}).json()
        assert made["tokens"] == reference.tokenizer.encode("the quick fox")
        assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"] == "the quick fox"
        chat = http.post("/tokenize", json={"messages": MESSAGES}).json()
        assert chat["tokens"] == reference.tokenizer.encode_chat(MESSAGES)
        for open_end in (True, False):
            asked = {"messages": MESSAGES, "add_generation_prompt": open_end}
            expected = reference.tokenizer.encode_chat(MESSAGES, add_generation_prompt=open_end)
            assert http.post("/tokenize", json=asked).json()["tokens"] == expected


def test_a_models_own_defaults(tiny_directory: Callable[[str], Path], tmp_path: Path, reference: LLM) -> None:
    """They apply to parameters that a client leaves out, on every endpoint."""
    directory = shutil.copytree(tiny_directory("llama"), tmp_path / "model")
    own: dict[str, Any] = {"temperature": 0.25, "top_k": 3}
    (directory / "generation_config.json").write_text(json.dumps(own))
    common: Any = {"max_tokens": 20, "seed": 5}
    with serving(LLM(str(directory), kv_bytes=16 << 20, threads=1)) as running:
        client = running.client
        left_out = client.completions.create(model="tiny", prompt="the quick", **common)
        assert [choice.text for choice in left_out.choices] == texts(reference, ["the quick"], **common, **own)[0]
        given = client.completions.create(model="tiny", prompt="the quick", temperature=1.0, **common)
        expected = texts(reference, ["the quick"], **common, **(own | {"temperature": 1.0}))[0]
        assert [choice.text for choice in given.choices] == expected
        chat = client.chat.completions.create(model="tiny", messages=MESSAGES, **common)
        assert chat.choices[0].message.content == reference.chat(MESSAGES, **common, **own).text
        response = client.responses.create(model="tiny", input="the fox?", max_output_tokens=20, extra_body={"seed": 5})
        asked = [{"role": "user", "content": "the fox?"}]
        assert response.output_text == reference.chat(asked, **common, **own).text
        assert (response.temperature, response.top_p) == (0.25, 1.0)


def test_openais_defaults_where_a_model_states_none(client: openai.OpenAI, reference: LLM) -> None:
    common: Any = {"max_tokens": 20, "seed": 5}
    made = client.completions.create(model="tiny", prompt="the quick", **common)
    assert [choice.text for choice in made.choices] == texts(reference, ["the quick"], **common, temperature=1.0)[0]


def test_a_chat_that_outgrows_the_context(client: openai.OpenAI, server: Serving) -> None:
    """The oldest turns go, whole; the answer is that of the chat without them; what is gone is told three times."""
    system: Any = {"role": "system", "content": "be quick"}
    turns: Any = [{"role": role, "content": "the fox? " * 100} for _ in range(4) for role in ("user", "assistant")]
    turns.append({"role": "user", "content": "the end"})
    most = server.llm.config.max_position
    fields: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}

    def size(messages: Any) -> int:
        return len(server.llm.tokenizer.encode_chat(messages))

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(messages=[system, *turns], **fields)
    assert refused.value.code == "context_length_exceeded"
    raw = client.chat.completions.with_raw_response.create(
        messages=[system, *turns], extra_body={"truncation": "auto"}, **fields
    )
    made: Any = raw.parse()
    starts = [start for start in range(0, 9, 2) if size([system, *turns[start:]]) + 8 <= most]
    kept = [system, *turns[min(starts) :]]
    assert 0 < min(starts) < 8
    assert made.usage.prompt_tokens == size(kept)
    without = client.chat.completions.create(messages=kept, **fields)
    assert made.choices[0].message.content == without.choices[0].message.content
    gone = size([system, *turns]) - size(kept)
    assert made.left_out == {"messages": min(starts), "tokens": gone}
    told = f"not all of the conversation is in the prompt: the {min(starts)} oldest messages ({gone:,} tokens) left out"
    assert made.warnings == [told]
    assert raw.headers["x-twostroke-warnings"] == told
    chunks = list(
        client.chat.completions.create(
            messages=[system, *turns], stream=True, extra_body={"truncation": "auto"}, **fields
        )
    )
    assert chunks[0].left_out == made.left_out  # pyright: ignore
    long: Any = [{"role": "user", "content": "the fox? " * 1500}]
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(messages=long, extra_body={"truncation": "auto"}, **fields)


def test_passages_are_cut_to_a_budget(client: openai.OpenAI, server: Serving) -> None:
    """As if the client had sent the shorter passages."""
    text = "\n\n".join(["the quick brown fox " * 10, "jumps over " * 3, "who jumps?"])
    fields: Any = {"model": "tiny", "max_tokens": 8, "temperature": 0}
    made: Any = client.chat.completions.create(
        messages=[{"role": "user", "content": text}], extra_body={"passage_budget": 20}, **fields
    )
    [cut], left_out = cut_passages([{"role": "user", "content": text}], 20, server.llm.tokenizer)
    without = client.chat.completions.create(messages=[cut], **fields)  # pyright: ignore
    assert made.choices[0].message.content == without.choices[0].message.content
    assert made.usage.prompt_tokens == len(server.llm.tokenizer.encode_chat([cut]))
    assert made.left_out == {"passages": left_out.passages, "passage_tokens": left_out.passage_tokens}
