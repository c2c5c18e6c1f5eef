"""A chat in a window of its KV over HTTP: the tokens of a conversation that holds its KV, and what is told."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.conftest import Serving, serving
from tests.tiny import write_model
from twostroke.api.conversation import Conversation, Overflow
from twostroke.api.conversation.fitting import LeftOut
from twostroke.api.conversation.window import ContextRoom, Extent
from twostroke.api.llm import LLM

SLOTS, SINKS = 256, 2
WORDS = (" fox", " dog", " lazy", " quick")  # a token each, so that their text has the same tokens again
Turns = list[tuple[list[dict[str, str]], str, LeftOut]]  # what is asked, the reply, and what was left out by then


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model("llama", tmp_path_factory.mktemp("window"), max_position_embeddings=400)


def open_model(directory: Path, index: str) -> LLM:
    """A context of 256 tokens, bounded by the pool."""
    with LLM(str(directory), kv_bytes=1 << 20, threads=1) as one:
        size = one.pool.entry_bytes
    return LLM(str(directory), prefix_index=index, kv_bytes=SLOTS * size, threads=1)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Serving]:
    with serving(open_model(directory, "radix")) as running:
        yield running


def sampling(llm: LLM, *, ends: bool) -> dict[str, Any]:
    """Replies of words that the chat so far chooses, which `ends` by themselves or are cut off."""
    biases = {}
    for word in WORDS:
        [id] = llm.tokenizer.encode(word, add_bos=False)
        biases[id] = 50.0
    if ends:
        return {"max_tokens": 12, "min_tokens": 7, "logit_bias": biases | dict.fromkeys(llm.tokenizer.eos_ids, 100.0)}
    return {"max_tokens": 7, "ignore_eos": True, "logit_bias": biases}


def talk(llm: LLM, fields: dict[str, Any], count: int) -> Turns:
    """A conversation that holds its KV."""
    chat = Conversation(llm, "be brief", overflow=Overflow("window", sinks=SINKS), **fields)
    found: Turns = []
    history = list(chat.messages)
    for number in range(count):
        said = {"role": "user", "content": f"the fox number {number} jumps over the lazy dog"}
        reply = chat.say(said["content"])
        list(reply)
        text = chat.messages[-1]["content"]
        found.append(([*history, said], text, reply.left_out))
        history += [said, {"role": "assistant", "content": text}]
    return found


@pytest.mark.parametrize("ends", [False, True])
def test_the_tokens_of_a_conversation_that_holds_its_kv(served: Serving, directory: Path, *, ends: bool) -> None:
    """Turn by turn, streamed or not, alone or all at once: windows, and dropped turns where positions end."""
    with open_model(directory, "off") as llm:
        fields = sampling(llm, ends=ends)
        turns = talk(llm, fields, 14)
    assert any(gone.entries for _, _, gone in turns)
    assert any(gone.messages for _, _, gone in turns)
    body: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": fields["max_tokens"]}
    biases = {str(id): bias for id, bias in fields["logit_bias"].items()}
    extra = {name: fields[name] for name in ("ignore_eos", "min_tokens") if name in fields}
    extra |= {"truncation": "window", "sinks": SINKS}

    def asked(turn: int, *, stream: bool) -> tuple[str, Any]:
        create: Any = served.client.chat.completions.create
        made = create(messages=turns[turn][0], logit_bias=biases, extra_body=extra, stream=stream, **body)
        if not stream:
            return made.choices[0].message.content, made
        chunks = list(made)
        return "".join(one.choices[0].delta.content or "" for one in chunks if one.choices), chunks[0]

    entries = 0
    for turn, (_, text, gone) in enumerate(turns):
        answer, told = asked(turn, stream=turn % 2 == 1)
        assert answer.strip() == text.strip(), turn
        entries = gone.entries + (0 if gone.messages else entries)
        left_out: dict[str, int] = getattr(told, "left_out", {})
        assert left_out.get("entries", 0) == entries, "all that is gone by now"
        assert ("warnings" in told.model_extra) == bool(left_out)
    with ThreadPoolExecutor(7) as pool:
        together = list(pool.map(lambda turn: asked(turn, stream=False)[0], range(len(turns))))
    assert [one.strip() for one in together] == [text.strip() for _, text, _ in turns]


def test_the_servers_own_default(directory: Path) -> None:
    with open_model(directory, "off") as llm:
        turns = talk(llm, sampling(llm, ends=False), 8)
    messages: Any = turns[-1][0]
    fields: Any = {"model": "tiny", "max_tokens": 7, "messages": messages}
    with serving(open_model(directory, "radix"), when_full="window", sinks=SINKS) as running:
        told: Any = running.client.chat.completions.create(**fields)
        assert told.left_out["entries"] > 0
        assert told.usage.prompt_tokens == len(running.llm.tokenizer.encode_chat(messages)), "all are entered"
        again: Any = running.client.chat.completions.create(**fields)
        found = again.usage.prompt_tokens_details.cached_tokens
        assert 0 < found < SLOTS, "up to the first cut"
        long: Any = running.client.chat.completions.create(
            **fields, user="x" * 20_000
        )  # goes through the body validator
        assert long.left_out == told.left_out
        answer: Any = running.client.responses.create(model="tiny", input=messages, max_output_tokens=7)
        assert answer.truncation == "window"
        assert answer.left_out == told.left_out
        with pytest.raises(openai.BadRequestError, match="leave room"):
            running.client.chat.completions.create(**fields, extra_body={"truncation": "disabled"})


def test_what_is_refused(served: Serving) -> None:
    fields: Any = {"model": "tiny", "max_tokens": 7}
    window = {"truncation": "window"}
    short: Any = [{"role": "user", "content": "the fox"}]
    long: Any = [{"role": "user", "content": "the fox? " * 300}]
    create = served.client.chat.completions.create
    with pytest.raises(openai.BadRequestError, match="leave out method"):
        create(messages=short, extra_body=window | {"method": "repeat"}, **fields)
    with pytest.raises(openai.BadRequestError, match="leave no room") as refused:
        create(messages=long, extra_body=window, **fields)
    assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="sinks"):
        create(messages=short, extra_body=window | {"sinks": -1}, **fields)


def test_extents_count_the_pages_of_values(directory: Path) -> None:
    """Entries are where an extent says, and it never counts fewer pages than the value has."""
    with open_model(directory, "off") as llm:
        kv = llm.prefill(list(range(1, 150)))
        assert Extent.of(kv) == Extent(0, 0, 149)
        for first, new, most in ((1, 5, 60), (17, 0, 100), (33, 20, 64)):
            kept = Extent.of(kv).window(first, new, most)
            assert kept is not None
            cut = kept.cut(kv)
            assert len(cut) == len(kept) == most - new
            assert Extent.of(cut) == kept
            again = Extent.of(llm.prefill([1] * 30, after=cut))
            assert again == Extent(kept.head, kept.tail, kept.end + 30)
            assert ContextRoom(cut.num_pages, llm.pool.page_size, 400, 1).fits(kept, 0) is False, "a page may be copied"
        assert Extent.of(kv).window(10, 0, 149) is None
        assert Extent.of(kv).window(10, 0, 8) is None
