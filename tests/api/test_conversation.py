"""A conversation's value equals a fresh prefill of the same tokens, and no entry is computed twice."""

# pyright: reportPrivateUsage=false

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.watching import entered_rows
from twostroke.api.conversation import Conversation, file
from twostroke.api.llm import LLM
from twostroke.engine.request import Choice
from twostroke.errors import CorruptFile, GeometryMismatch, InvalidRequest, KVError, OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import EntryTable, Tail
from twostroke.kv.provenance import NOTHING, Stretch

PLAIN: dict[str, Any] = {
    "max_tokens": 12,
    "logit_bias": {0: -1e9},
    "ignore_eos": True,
}  # no special tokens inside a reply
SHOUTING = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content if m.role != 'assistant' else m.content | upper }}</s>"
    "{% endfor %}[assistant]"
)


@pytest.fixture(scope="module")
def model(tiny_directory: Callable[[str], Path]) -> LLM:
    return LLM(str(tiny_directory("llama")), prefix_index="off", kv_bytes=16 << 20, threads=1)


@pytest.fixture
def rows(model: LLM, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of tokens that each forward pass of the model enters."""
    return entered_rows(model, monkeypatch)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A separate home, so that no key is made in this user's."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def no_page_is_lost(model: LLM) -> Iterator[None]:
    before = model.pool.num_used
    yield
    assert model.pool.num_used == before


def rewritten(tiny_directory: Callable[[str], Path], where: Path, template: str | None) -> LLM:
    """The tiny model with another chat template, or none."""
    directory = Path(shutil.copytree(tiny_directory("llama"), where / "rewritten"))
    path = directory / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    settings["chat_template"] = template
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))
    return LLM(str(directory), prefix_index="off", kv_bytes=16 << 20, threads=1)


def assert_equals_fresh_prefill(conversation: Conversation) -> None:
    kv = conversation.kv
    fresh = conversation.llm.prefill(kv.tokens)
    assert kv.positions == list(range(len(kv)))
    np.testing.assert_allclose(kv.entries(), fresh.entries(), rtol=1e-4, atol=1e-4, equal_nan=False)
    assert kv.canonical_length(conversation.llm.model.id) == len(kv)


def test_turns_extend_the_value_and_compute_no_entry_twice(model: LLM, rows: list[int]) -> None:
    conversation = Conversation(model, "be brief", **PLAIN)
    held = 0
    for text in ("the quick fox", "jumps over", "the lazy dog"):
        reply = conversation.say(text)
        assert (reply.reused, reply.recomputed) == (held, 0)
        tokens = list(reply)
        assert len(tokens) == 12
        assert conversation.kv.pending == tokens[-1].id
        held = len(conversation.kv)
        assert held == reply.prompt_tokens + 11
    assert sum(rows) == len(conversation.kv)
    assert [m["role"] for m in conversation.messages] == ["system"] + ["user", "assistant"] * 3
    whole = [*conversation.kv.tokens, tokens[-1].id]
    assert model.tokenizer.decode(whole, skip_special=False) == conversation.rendered
    assert_equals_fresh_prefill(conversation)


def test_an_ending_token_is_not_entered_twice(model: LLM, rows: list[int]) -> None:
    end = model.tokenizer.encode("</s>", add_bos=False)[0]
    conversation = Conversation(model, max_tokens=12, logit_bias={0: -1e9})
    reply = conversation.say("the fox")
    said = next(reply).id
    reply.close()
    conversation.reset()
    list(conversation.say("the fox", logit_bias={end: 1e9}))  # ends at once
    assert conversation.kv.pending == end
    assert conversation.messages[-1] == {"role": "assistant", "content": ""}
    list(conversation.say("again"))
    start = model.tokenizer.encode_chat([{"role": "user", "content": "the fox"}])
    assert conversation.kv.tokens[: len(start) + 2] == [*start, end, model.tokenizer.encode("[", add_bos=False)[0]]
    assert said != end
    assert_equals_fresh_prefill(conversation)
    assert sum(rows) > len(conversation.kv)  # including the first one and the check


def test_the_text_is_that_of_a_chat_from_scratch(model: LLM) -> None:
    conversation = Conversation(model, **PLAIN)
    list(conversation.say("the quick fox"))
    kv = conversation.kv
    reply = conversation.say("jumps")
    assert kv.pending is not None
    fresh = model.prefill(
        [*kv.tokens, kv.pending, *model.tokenizer.encode("</s>[user]jumps</s>[assistant]", add_bos=False)]
    )
    assert "".join(t.text for t in reply) == "".join(t.text for t in model.decode(fresh, **PLAIN))


def test_closing_keeps_what_was_said(model: LLM, rows: list[int]) -> None:
    conversation = Conversation(model, **PLAIN)
    reply = conversation.say("the quick fox")
    start = reply.prompt_tokens
    said = [token.id for token in islice(reply, 5)]
    reply.close()
    reply.close()
    assert list(reply) == []
    assert conversation.messages[-1]["content"] == reply.text
    assert conversation.kv.tokens[start:] == said
    assert_equals_fresh_prefill(conversation)
    after = conversation.say("jumps over")
    assert (after.reused, after.recomputed) == (start + 5, 0)
    list(after)
    assert_equals_fresh_prefill(conversation)


def test_what_was_said_before_an_interruption_is_entered_with_the_next_turn(model: LLM, rows: list[int]) -> None:
    conversation = Conversation(model, **PLAIN)
    reply = conversation.say("the quick fox")
    list(islice(reply, 5))
    after = conversation.say("jumps over")  # the reply before it was not closed
    assert after.reused == reply.prompt_tokens
    list(after)
    assert sum(rows) == len(conversation.kv) + 4  # four of the five tokens had been entered while decoding
    assert_equals_fresh_prefill(conversation)


def test_closed_before_its_first_token_a_turn_did_not_happen(model: LLM) -> None:
    conversation = Conversation(model, **PLAIN)
    list(conversation.say("the quick fox"))
    before = conversation.kv.tokens, conversation.rendered, list(conversation.messages)
    conversation.say("jumps").close()
    assert (conversation.kv.tokens, conversation.rendered, conversation.messages) == before


def test_a_reply_that_outgrows_the_pool_ends(tiny_directory: Callable[[str], Path]) -> None:
    model = LLM(str(tiny_directory("llama")), prefix_index="off", kv_bytes=48 * 3 * 2 * 2 * 16 * 4, threads=1)
    longer: dict[str, Any] = {**PLAIN, "max_tokens": 500}
    conversation = Conversation(model, **longer)
    reply = conversation.say("the quick fox")
    assert list(reply)[-1].finish_reason == "length"
    assert conversation.messages[-1] == {"role": "assistant", "content": reply.text}
    conversation.reset()
    assert list(conversation.say("the", max_tokens=3))


def test_an_error_amid_a_reply_keeps_what_was_said(
    tiny_directory: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = LLM(str(tiny_directory("llama")), prefix_index="off", kv_bytes=1 << 20, threads=1)
    conversation = Conversation(model, **PLAIN)
    reply = conversation.say("the quick fox")
    next(reply)
    with monkeypatch.context() as patch:
        patch.setattr(Choice, "deliver", lambda *_, **__: (_ for _ in ()).throw(OutOfPages("full")))
        patch.setattr(model.engine.programs, "end_with_length", lambda *_: False)
        with pytest.raises(OutOfPages):
            list(reply)
    assert conversation.messages[-1] == {"role": "assistant", "content": reply.text}
    assert reply.tokens
    conversation.reset()
    assert list(conversation.say("the", max_tokens=3))


def test_a_template_that_rewrites_history(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    model = rewritten(tiny_directory, tmp_path, SHOUTING)
    conversation = Conversation(model, **PLAIN)
    first = conversation.say("the quick brown fox")
    list(first)
    before = conversation.kv
    second = conversation.say("jumps")
    assert second.recomputed > 0
    assert second.reused == len(before) - second.recomputed >= first.prompt_tokens - 1
    list(second)
    prompt = model.tokenizer.encode_chat(conversation.messages[:-1])
    assert conversation.kv.tokens[: len(prompt)] == prompt
    assert_equals_fresh_prefill(conversation)


def test_another_system_message_keeps_only_what_is_common(model: LLM) -> None:
    conversation = Conversation(model, "be brief", **PLAIN)
    list(conversation.say("the quick fox"))
    held = len(conversation.kv)
    conversation.system = "be bold"
    assert conversation.system == "be bold"
    reply = conversation.say("jumps")
    assert 0 < reply.reused < held
    assert reply.recomputed == held - reply.reused
    list(reply)
    assert_equals_fresh_prefill(conversation)
    conversation.system = None
    assert [m["role"] for m in conversation.messages] == ["user", "assistant"] * 2


def test_reset_forgets_all_but_the_system_message(model: LLM) -> None:
    conversation = Conversation(model, "be brief", **PLAIN)
    first = "".join(token.text for token in conversation.say("the fox"))
    conversation.reset()
    assert conversation.messages == [{"role": "system", "content": "be brief"}]
    assert len(conversation.kv) == 0
    assert "".join(token.text for token in conversation.say("the fox")) == first


@pytest.mark.parametrize("stopped", [None, 4])
def test_saved_and_loaded_it_goes_on_the_same(model: LLM, tmp_path: Path, stopped: int | None) -> None:
    conversation = Conversation(model, "be brief", **PLAIN)
    reply = conversation.say("the quick fox")
    list(islice(reply, stopped))
    reply.close()
    (tmp_path / "deep").mkdir()
    conversation.save(tmp_path / "deep" / "talk")
    again = Conversation.load(tmp_path / "deep" / "talk", model, **PLAIN)
    assert again.messages == conversation.messages
    assert again.kv.tokens == conversation.kv.tokens
    known = len(again.kv)
    ours, theirs = conversation.say("jumps"), again.say("jumps")
    assert theirs.reused == known
    assert theirs.recomputed == 0
    assert [t.id for t in theirs] == [t.id for t in ours]
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["talk"]


def test_one_that_nothing_was_said_in_is_saved_too(model: LLM, tmp_path: Path) -> None:
    Conversation(model, "be brief").save(tmp_path / "talk")
    assert Conversation.load(tmp_path / "talk", model).system == "be brief"


def test_damaged_files_are_told(model: LLM, tmp_path: Path) -> None:
    conversation = Conversation(model, **PLAIN)
    list(conversation.say("the fox"))
    path = tmp_path / "talk"
    conversation.save(path)
    data = path.read_bytes()
    step = len(data) // 40
    for damaged in [
        b"",
        b"other",
        data[:-1],
        data[:30],
        data + b"x",
        *(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :] for i in range(0, len(data), step)),
    ]:
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match="talk"):
            Conversation.load(path, model)
    with pytest.raises(KVError, match="missing"):
        Conversation.load(tmp_path / "missing", model)
    with pytest.raises(KVError, match="cannot be saved: there is no directory /proc/no/such: make it first"):
        conversation.save("/proc/no/such/place")
    path.write_bytes(b"twostroke-session-1\n" + bytes(100))
    with pytest.raises(CorruptFile, match="this conversation was saved by an earlier version of Twostroke"):
        Conversation.load(path, model)
    Conversation(model, **PLAIN).kv.save(path)
    with pytest.raises(CorruptFile, match="this is not a conversation saved by Twostroke"):
        Conversation.load(path, model)


def with_said(data: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file with other messages and a valid checksum."""
    start = len(b"twostroke-conversation-2\n")
    size = int.from_bytes(data[start : start + 8], "little")
    said = json.loads(data[start + 8 : start + 8 + size])
    text = json.dumps(change(said)).encode()
    head = len(text).to_bytes(8, "little") + text + hashlib.sha256(text).digest()
    return data[:start] + head + data[start + 8 + size + 32 :]


@pytest.mark.parametrize(
    "change",
    [
        lambda said: [said],
        lambda said: said | {"more": 1},
        lambda said: said | {"model": None},
        lambda said: said | {"rendered": 3},
        lambda said: said | {"messages": {}},
        lambda said: said | {"messages": ["hi"]},
        lambda said: said | {"messages": [{"role": "user"}]},
        lambda said: said | {"messages": [{"role": "user", "content": ["hi"]}]},
        lambda said: said | {"messages": [{"role": "user", "content": "hi", "more": ""}]},
    ],
)
def test_hostile_files_are_told(model: LLM, tmp_path: Path, change: Callable[[Any], Any]) -> None:
    conversation = Conversation(model, **PLAIN)
    list(conversation.say("the fox"))
    path = tmp_path / "talk"
    conversation.save(path)
    data = path.read_bytes()
    path.write_bytes(with_said(data, lambda said: said))
    assert path.read_bytes() == data
    path.write_bytes(with_said(data, change))
    with pytest.raises(CorruptFile, match="talk: the file is damaged"):
        Conversation.load(path, model)


@pytest.mark.parametrize("pending", [False, True])
def test_tokens_that_the_model_does_not_have_are_told(model: LLM, tmp_path: Path, pending: bool) -> None:
    kv = model.prefill([1, 2, 3])
    tokens = kv.token_array if pending else np.array([1, 2, model.config.vocab_size], np.int32)
    tail = Tail("m", pending=model.config.vocab_size) if pending else None
    hostile = KVCache(model.pool, EntryTable(kv.table, tokens, (Stretch(3, None, NOTHING),), 3, tail))
    file.save(tmp_path / "talk", file.SavedConversation("m", [], ""), hostile)
    with pytest.raises(CorruptFile, match="tokens that the model does not have"):
        Conversation.load(tmp_path / "talk", model)
    hostile.save(tmp_path / "value")
    loaded = KVCache.load(tmp_path / "value", model)
    with pytest.raises(InvalidRequest, match="token ids must be from 0 to"):
        list(model.decode(loaded, max_tokens=2))
    with pytest.raises(InvalidRequest, match="token ids must be from 0 to"):
        model.prefill([4], after=loaded)


def test_a_conversation_of_another_user_goes_on(model: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(model, "be brief", **PLAIN)
    list(conversation.say("the quick fox"))
    conversation.save(tmp_path / "talk")
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "other"))
    again = Conversation.load(tmp_path / "talk", model, **PLAIN)
    assert again.kv.canonical_length(model.model.id) == 0
    ours, theirs = conversation.say("jumps"), again.say("jumps")
    assert [t.id for t in theirs] == [t.id for t in ours]
    assert theirs.recomputed == 0


def test_a_model_of_another_geometry_refuses_it(
    model: LLM, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    conversation = Conversation(model, **PLAIN)
    list(conversation.say("the fox"))
    conversation.save(tmp_path / "talk")
    other = LLM(str(tiny_directory("qwen3")), backend="reference", kv_bytes=16 << 20, threads=1)
    with pytest.raises(GeometryMismatch, match=r"talk: .*layers of 2 KV heads of 16\] is not"):
        Conversation.load(tmp_path / "talk", other)


def test_what_cannot_be_is_told(model: LLM, tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="generate --raw"):
        Conversation(rewritten(tiny_directory, tmp_path, None))
    with pytest.raises(InvalidRequest, match="temperature"):
        Conversation(model, temperature=-1)
    conversation = Conversation(model, **PLAIN)
    list(conversation.say("the fox"))
    held = conversation.kv.tokens
    for text, more in (("hi", {"n": 2}), ("hi", {"top_p": 2.0}), ("the fox " * 3000, {})):
        with pytest.raises(InvalidRequest):
            conversation.say(text, **more)
        assert conversation.kv.tokens == held
    list(conversation.say("jumps"))


def test_a_real_model_and_its_template(smollm: LLM) -> None:
    conversation = Conversation(smollm, max_tokens=12)
    first = conversation.say("What is the capital of France?")
    assert [token.finish_reason for token in first][-1] == "stop"
    assert "Paris" in first.text
    second = conversation.say("Tell me more.", max_tokens=4)
    assert [token.finish_reason for token in second][-1] == "length"
    assert (second.reused, second.recomputed) == (first.prompt_tokens + len(first.tokens) - 1, 0)
    kv = conversation.kv
    assert [*kv.tokens, kv.pending] == smollm.tokenizer.encode(conversation.rendered, add_bos=False)


def spoken(conversation: Conversation, text: str) -> list[int]:
    return [token.id for token in conversation.say(text)]


def test_undo_is_as_if_the_turn_had_not_been(model: LLM, rows: list[int]) -> None:
    conversation = Conversation(model, **PLAIN)
    first = spoken(conversation, "the fox")
    kv = conversation.kv
    again = spoken(conversation, "jumps")
    assert conversation.undo() == "jumps"
    assert conversation.kv.fingerprint == kv.fingerprint
    assert spoken(conversation, "jumps") == again
    assert conversation.undo() == "jumps"
    assert conversation.undo() == "the fox"
    assert conversation.messages == []
    assert spoken(conversation, "the fox") == first
    conversation.reset()
    with pytest.raises(InvalidRequest, match="no turn to take back"):
        conversation.undo()


@pytest.mark.parametrize("at", [None, 0, 5, 12])
def test_a_fork_goes_on_by_itself(model: LLM, rows: list[int], at: int | None) -> None:
    """It enters only what is new, shares all other pages, and says what a conversation with this reply says."""
    conversation = Conversation(model, **PLAIN)
    ids = spoken(conversation, "the fox jumps over the lazy dog " * 4)
    fork = conversation.fork(at)
    kept = ids if at is None else ids[:at]
    assert fork.messages[-1]["content"] == model.tokenizer.decode(kept)
    shared = set(conversation.kv.entry_table.pages.tolist()) & set(fork.kv.entry_table.pages.tolist())
    assert len(shared) >= len(fork.kv) // 16
    rows.clear()
    made = spoken(fork, "and then?")
    new = len(fork.kv) - len(conversation.kv) + len(ids) - len(kept)
    assert sum(rows) <= new + 16, "no more than a page is computed again"
    assert fork.kv.pending == made[-1]
    whole = [*fork.kv.tokens, made[-1]][: -len(made)]
    assert made == [token.id for token in model.decode(model.prefill(whole), **PLAIN)]
    ends = len(conversation.kv) + 1 - len(ids) + len(kept)
    assert whole[:ends] == [*conversation.kv.tokens, conversation.kv.pending][:ends]
    assert spoken(conversation, "and then?")
    assert conversation.messages[1]["content"] == model.tokenizer.decode(ids)


def test_a_fork_at_a_token_that_is_not_there(model: LLM) -> None:
    conversation = Conversation(model, **PLAIN)
    spoken(conversation, "the fox")
    for at in (-1, 13):
        with pytest.raises(InvalidRequest, match="at must be from 0 to 12"):
            conversation.fork(at)
