"""Chats that outgrow the context: what stays equals a conversation that was written without what was dropped."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tiny import write_model
from twostroke.api.conversation import Conversation, Overflow
from twostroke.api.conversation.fitting import LeftOut, cut_passages, drop_oldest
from twostroke.api.llm import LLM
from twostroke.errors import ContextLengthExceeded, InvalidRequest

PLAIN: dict[str, Any] = {"max_tokens": 12, "logit_bias": {0: -1e9}, "ignore_eos": True}
SLOTS = 256  # KV entries of the small pool: positions are many more


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 320 positions."""
    return write_model("llama", tmp_path_factory.mktemp("short"), max_position_embeddings=320)


@pytest.fixture
def model(directory: Path) -> LLM:
    """A context of 256 tokens, bounded by the pool."""
    return LLM(str(directory), prefix_index="off", kv_bytes=SLOTS * 768, threads=1, backend="reference")


@pytest.fixture(scope="module")
def roomy(directory: Path) -> LLM:
    """The same model with a larger pool."""
    return LLM(str(directory), prefix_index="off", kv_bytes=16 << 20, threads=1, backend="reference")


def turn(number: int) -> str:
    return f"the fox number {number} jumps over the lazy dog"


def test_dropped_turns_leave_what_was_never_written(model: LLM, roomy: LLM) -> None:
    """After turns were dropped, tokens, positions and replies are those of a chat without them."""
    chat = Conversation(model, "be brief", overflow=Overflow("drop"), **PLAIN)
    dropped = 0
    for number in range(12):
        before = list(chat.messages)
        reply = chat.say(turn(number))
        said = [token.id for token in reply]
        left_out = reply.left_out
        if not left_out:
            continue
        dropped += left_out.messages
        assert chat.messages[0] == {"role": "system", "content": "be brief"}
        assert chat.messages[1]["role"] == "user"  # whole turns
        assert chat.messages[1:-2] == before[1 + left_out.messages :]
        prompt = model.tokenizer.encode_chat(chat.messages[:-1])
        kv = chat.kv
        assert kv.tokens[: len(prompt)] == prompt
        assert kv.positions == list(range(len(kv)))
        never = Conversation(roomy, "be brief", **PLAIN)
        never.messages = list(chat.messages[:-2])
        assert [token.id for token in never.say(turn(number))] == said
        assert never.kv.tokens == kv.tokens
        del kv
    assert dropped >= 4


def test_a_turn_is_dropped_only_when_it_must(model: LLM) -> None:
    """With one turn more the prompt would take more than three quarters of the context."""
    chat = Conversation(model, "be brief", overflow=Overflow("drop"), **PLAIN)
    while True:
        before = [*chat.messages, {"role": "user", "content": turn(0)}]
        reply = chat.say(turn(0))
        list(reply)
        if reply.left_out:
            break
    first = 1 + reply.left_out.messages
    aim = int(0.75 * (SLOTS - 12))
    longer = model.tokenizer.encode_chat([before[0], *before[first - 2 :]])
    kept = model.tokenizer.encode_chat([before[0], *before[first:]])
    assert len(kept) <= aim < len(longer)
    assert reply.left_out.tokens == len(model.tokenizer.encode_chat(before)) - len(kept)
    assert reply.prompt_tokens == len(kept)


def test_a_window_keeps_the_first_and_the_last_entries(model: LLM, roomy: LLM) -> None:
    """No token is computed again, and the reply is that of the value cut by hand."""
    chat = Conversation(model, "be brief", overflow=Overflow("window", sinks=2), **PLAIN)
    while True:
        before = chat.kv.copy_to(roomy.pool)
        reply = chat.say(turn(1))
        if reply.left_out:
            break
        list(reply)
    first = len(model.tokenizer.encode_chat([{"role": "system", "content": "be brief"}], add_generation_prompt=False))
    gone = reply.left_out.entries
    assert reply.recomputed == 0
    before = roomy.prefill([before.pending or 0], after=before.with_tail(None))  # the last token of a reply cut short
    assert reply.reused == len(before) - gone
    said = [token.id for token in reply]
    kv = chat.kv
    assert kv.positions == [*range(first), *range(first + gone, len(before) + reply.entered + 11)]
    entered = kv.tokens[reply.reused : reply.prompt_tokens]
    by_hand = roomy.prefill(entered, after=before[:first] + before[first + gone :])
    assert by_hand.tokens == kv.tokens[: reply.prompt_tokens]
    assert [token.id for token in roomy.decode(by_hand, **PLAIN)] == said


def test_a_window_ends_in_dropping(model: LLM) -> None:
    """Where positions end, turns are dropped, and entries behind the gap are not taken for others."""
    chat = Conversation(model, "be brief", overflow=Overflow("window"), **PLAIN)
    seen: list[LeftOut] = []
    for number in range(16):
        reply = chat.say(turn(number))
        list(reply)
        seen.append(reply.left_out)
        assert len(chat.kv) <= SLOTS
        if reply.left_out.messages:
            kv = chat.kv
            np.testing.assert_array_equal(kv.positions, np.arange(len(kv)))
            assert kv.tokens[: reply.prompt_tokens] == model.tokenizer.encode_chat(chat.messages[:-1])
            del kv  # its pages may be needed
    assert any(one.entries for one in seen)
    assert any(one.messages for one in seen)


def test_refused_a_chat_stays_as_it_was(model: LLM) -> None:
    chat = Conversation(model, "be brief", **PLAIN)
    while len(model.tokenizer.encode_chat([*chat.messages, {"role": "user", "content": turn(0)}])) < SLOTS:
        list(chat.say(turn(0)))
    before = list(chat.messages)
    with pytest.raises(InvalidRequest):
        chat.say(turn(0))
    assert chat.messages == before
    with pytest.raises(InvalidRequest, match="when_full must be one of refuse, drop, window"):
        Overflow("forget")


def test_a_turn_that_has_no_room_alone_is_refused(model: LLM) -> None:
    chat = Conversation(model, "be brief", overflow=Overflow("drop"), **PLAIN)
    list(chat.say("the fox"))
    before = list(chat.messages)
    with pytest.raises(ContextLengthExceeded, match="shorten it"):
        chat.say("the fox? " * 80)
    assert chat.messages == before
    assert list(chat.say("again"))


@given(st.lists(st.integers(0, 3), max_size=8), st.integers(0, 12))
def test_the_oldest_turns_go(replies: list[int], room: int) -> None:
    """Only whole turns from the front, and no more than needed."""
    roles = ["system", *(role for count in replies for role in ("user", *["assistant"] * count))]
    stay = drop_oldest(roles, lambda some: len(some) <= room)
    starts = [1, *(i for i, role in enumerate(roles) if role == "user" and i > 1)]
    fitting = [start for start in starts if len(roles) - start <= room]
    assert stay == range(min(fitting, default=starts[-1]), len(roles))


WORDS = st.lists(st.sampled_from(["the", "fox", "jumps", "lazily", "dog"]), max_size=12).map(" ".join)


@settings(max_examples=50)
@given(st.lists(WORDS, min_size=1, max_size=5), st.integers(0, 40))
def test_passages_take_their_budget(roomy: LLM, passages: list[str], budget: int) -> None:
    """Each is a beginning of whole words; the question stays, and so does all where there is room."""
    text = "\n\n".join([*passages, "which fox?"])
    messages = [{"role": "system", "content": "a\n\nb"}, {"role": "user", "content": text}]
    made, left_out = cut_passages(messages, budget, roomy.tokenizer)
    assert made[0] == messages[0]
    kept = made[1]["content"].split("\n\n")
    assert kept[-1] == "which fox?"

    def size(parts: list[str]) -> int:
        return sum(len(roomy.tokenizer.encode(part, add_bos=False)) for part in parts)

    assert size(kept[:-1]) <= budget
    for short, whole in zip(kept, text.split("\n\n"), strict=True):
        assert whole.startswith(short)
        assert whole[len(short) : len(short) + 1] in ("", " ") or short == ""
    if size(passages) <= budget:
        assert (made, left_out) == (messages, LeftOut())
    else:
        assert left_out.passages > 0
        assert left_out.text.startswith("passage cut" if left_out.passages == 1 else f"{left_out.passages} passages")


def test_a_conversation_cuts_passages(model: LLM) -> None:
    text = "the quick brown fox\n\njumps over the lazy dog\n\nwho jumps?"
    chat = Conversation(model, overflow=Overflow(passage_budget=4), **PLAIN)
    reply = chat.say(text)
    assert reply.left_out.passages == 2
    [made], _ = cut_passages([{"role": "user", "content": text}], 4, model.tokenizer)
    assert reply.messages == [made]
    assert reply.prompt_tokens == len(model.tokenizer.encode_chat([made]))
    reply.close()
