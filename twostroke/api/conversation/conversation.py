"""A conversation whose KV cache grows with it: every turn enters only new tokens."""

import time
from collections import deque
from pathlib import Path
from typing import Any

from twostroke.api.conversation import file
from twostroke.api.conversation.fitting import LeftOut, cut_passages
from twostroke.api.conversation.overflow import Message, Overflow, Turn, fit_turn, including_passages
from twostroke.api.conversation.reply import Reply
from twostroke.api.llm import LLM
from twostroke.api.reasoning.reasoning import set_apart
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.kv.common_prefix import common_prefix_length
from twostroke.sampling.params import SamplingParams, sampling_params

UNDO_TURNS = 8  # whose values are held besides the last one


class Conversation:
    """Messages, and the KV value that holds them.

    Attributes:
        llm: the model that answers.
        messages: [{"role": ..., "content": ...}, ...], of both sides; a thought is `reasoning_content` of its message.
        overflow: what happens to a turn that the context has no room for.
        sampling: fields of `SamplingParams` for every reply; `say` may override them.
    """

    def __init__(
        self, llm: LLM, system: str | None = None, *, overflow: Overflow | None = None, **sampling: Any
    ) -> None:
        """Raises InvalidRequest if the model has no chat template or a sampling field is out of range."""
        if llm.tokenizer.chat_template is None:
            raise InvalidRequest(
                f"model {llm.name} has no chat template, so it cannot chat: `twostroke generate --raw` continues a text"
            )
        sampling_params(None, sampling)
        self.llm, self.sampling, self.overflow = llm, sampling, overflow or Overflow()
        self.messages: list[Message] = []
        self._reply: Reply | None = None
        self._reset_kv()
        self.system = system

    # Facts -----------------------------------------------------------------------------------------------------

    @property
    def system(self) -> str | None:
        """The system message. Setting another one rewrites history: the next turn computes everything again."""
        first = self.messages[0] if self.messages else {"role": ""}
        return first["content"] if first["role"] == "system" else None

    @system.setter
    def system(self, text: str | None) -> None:
        rest = self.messages[1:] if self.system is not None else self.messages
        self.messages = rest if text is None else [{"role": "system", "content": text}, *rest]
        self._before.clear()

    @property
    def kv(self) -> KVCache:
        """The value of the whole conversation; its last token may be pending. Ends a reply in progress."""
        self._end_reply()
        if self._unentered:  # a reply that was interrupted
            self._kv, self._unentered = self.llm.prefill(self._unentered, after=self._kv), []
        return self._kv

    @property
    def rendered(self) -> str:
        """The text whose tokens the value holds, including a pending token."""
        return self._rendered

    # Operations ------------------------------------------------------------------------------------------------

    def say(self, text: str, **sampling: Any) -> Reply:
        """Take a turn. The user's message is entered at once; the reply is decoded as its iterator is read.

        Args:
            text: the user's message.
            sampling: fields of `SamplingParams`, which override the conversation's.

        Raises:
            InvalidRequest: a field is out of range, or the context is full (ContextLengthExceeded); the messages have
            not changed.
        """
        arrival = time.perf_counter()
        self._end_reply()
        params = sampling_params(None, self.sampling | sampling)
        if params.n != 1:
            raise InvalidRequest("a conversation has one reply at a time: leave out n")
        said: Message = {"role": "user", "content": text}
        cut = LeftOut()
        if (budget := self.overflow.passage_budget) is not None:
            [said], cut = cut_passages([said], budget, self.llm.tokenizer)
        messages = [*self.messages, said]
        prompt = self.llm.tokenizer.chat(messages)
        turn = Turn(messages, prompt, *self._extension(prompt))
        turn = fit_turn(self.llm, self.overflow, turn, params, self._extension)
        recomputed = max(0, len(self._kv) - len(turn.base) - turn.left_out.entries)
        self._drop_left_out(turn)
        start = self.llm.prefill(turn.tokens, after=turn.base)
        params = self.llm.chat_params(prompt, params)
        self._reply = Reply(turn, start, self.llm.decode(start, params), arrival, self._end_of)
        self._reply.recomputed, self._reply.left_out = recomputed, including_passages(turn.left_out, cut)
        return self._reply

    def undo(self) -> str:
        """Take the last turn back, the user's message and its reply. Returns the message.

        The value of before is held for the last turns, as far as nothing was left out since: then the conversation is
        as it was, to the bit. Else its entries are used again where they fit. Raises InvalidRequest without a turn.
        """
        self._end_reply()
        if len(self.messages) < 2 or self.messages[-1]["role"] != "assistant":
            raise InvalidRequest("there is no turn to take back")
        text = self.messages[-2]["content"]
        self._last = ("", [])
        if self._before:
            self.messages, self._kv, self._unentered, self._rendered = self._before.pop()
        else:
            self.messages = self.messages[:-2]
        return text

    def fork(self, at: int | None = None) -> "Conversation":
        """A conversation that goes on from here by itself. Its value shares all pages with this one.

        `at` is the number of tokens of the last reply that it keeps, None for all. Raises InvalidRequest if the last
        reply has fewer, or if it was not made in this conversation.
        """
        self._end_reply()
        made = Conversation(self.llm, overflow=self.overflow, **self.sampling)
        made.messages = list(self.messages)
        made._kv, made._unentered, made._rendered = self._kv, list(self._unentered), self._rendered
        made._last = self._last
        if at is not None:
            made._cut_reply(at)
        return made

    def reset(self) -> None:
        """Forget everything except the system message."""
        self._end_reply()
        self.messages = self.messages[: self.system is not None]
        self._reset_kv()

    def save(self, path: str | Path) -> None:
        """Write messages and KV to one file (see `file`). An existing file is replaced only when all is written.

        Raises KVError if it cannot be written.
        """
        kv = self.kv  # ends a reply in progress, which adds its message
        file.save(Path(path), file.SavedConversation(self.llm.name, self.messages, self._rendered), kv)

    @classmethod
    def load(cls, path: str | Path, llm: LLM, *, overflow: Overflow | None = None, **sampling: Any) -> "Conversation":
        """Load a saved conversation.

        Raises:
            CorruptFile: not such a file, truncated, altered or hostile. GeometryMismatch: saved with a model of another
            geometry. OutOfPages: no room. KVError: it cannot be read. InvalidRequest: as for a new conversation.
        """
        conversation = cls(llm, overflow=overflow, **sampling)
        saved, conversation._kv = file.load(Path(path), llm.pool, llm.config.vocab_size)
        conversation.messages, conversation._rendered = saved.messages, saved.rendered
        return conversation

    # Growth ----------------------------------------------------------------------------------------------------

    def _reset_kv(self) -> None:
        self._kv, self._rendered = KVCache.empty(self.llm.pool), ""
        self._unentered: list[int] = []  # tokens of an interrupted reply that are not entered yet
        self._last: tuple[str, list[int]] = ("", [])  # the prompt and the tokens of the last reply
        # Messages, value, what is not entered, and text before each of the last turns. They share their pages.
        self._before = deque[tuple[list[Message], KVCache, list[int], str]](maxlen=UNDO_TURNS)

    def _cut_reply(self, count: int) -> None:
        """Keep the first tokens of the last reply."""
        prompt, ids = self._last
        if not 0 <= count <= len(ids):
            raise InvalidRequest(f"at must be from 0 to {len(ids)}, the tokens of the last reply, not {count}")
        entered = [*self._kv.tokens, *([] if self._kv.pending is None else [self._kv.pending]), *self._unentered]
        stop = len(entered) - len(ids) + count
        _, whole = self._texts(ids[:count])
        self.messages = [*self.messages[:-1], self._message(prompt, ids[:count])]
        self._kv = self._kv[:stop].with_tail(None)
        self._unentered, self._rendered = entered[len(self._kv) : stop], prompt + whole
        self._last = prompt, ids[:count]

    def _message(self, prompt: str, ids: list[int]) -> Message:
        """The first tokens of a reply as a message."""
        params = self.llm.chat_params(prompt, SamplingParams())
        if params.reader is None:
            return _message("", self._texts(ids)[0])
        stream = self.llm.tokenizer.stream(shown=params.reader.shown)
        return _message(*set_apart("".join(map(stream.push, ids)) + stream.flush(), params))

    def _texts(self, ids: list[int]) -> tuple[str, str]:
        """The text of a reply's tokens, without and with special tokens."""
        token_bytes = self.llm.tokenizer.token_bytes
        plain = b"".join(map(token_bytes, ids)).decode(errors="replace")
        return plain, b"".join(token_bytes(id, skip_special=False) for id in ids).decode(errors="replace")

    def _drop_left_out(self, turn: Turn) -> None:
        """Let go of the entries that a turn goes on without: where the pool is nearly full it needs their pages."""
        if self.overflow.when_full == "refuse" or len(turn.base) == len(self._kv):
            return
        self._before.clear()
        if not turn.left_out.entries:
            self._rendered, self._unentered = "", []  # what is left is the beginning of other text
        self._kv = turn.base

    def _end_reply(self) -> None:
        """End a reply in progress."""
        if self._reply is not None:
            self._reply.close()

    def _extension(self, prompt: str) -> tuple[KVCache, list[int]]:
        """The value to extend, and the tokens to enter, so that the result holds `prompt`."""
        tokenizer, entries = self.llm.tokenizer, self._kv.tokens
        if entries and self._rendered and prompt.startswith(self._rendered):
            pending = [] if self._kv.pending is None else [self._kv.pending]
            last = [*entries, *pending, *self._unentered][-1]
            return self._kv, [*self._unentered, *self._tokens_after(last, prompt[len(self._rendered) :])]
        # Earlier text has changed or is gone (or this is the first turn): keep the common prefix.
        tokens = tokenizer.encode(prompt, add_bos=False)
        known = entries[: self._kv.canonical_length(self.llm.model.id)]  # behind a gap entries have other positions
        same = common_prefix_length(known, tokens[:-1])
        return self._kv[:same].with_tail(None), tokens[same:]

    def _tokens_after(self, last: int, text: str) -> list[int]:
        """Tokens of a text that follows the token `last`: some tokenizers treat the beginning of a text differently."""
        tokenizer = self.llm.tokenizer
        if last in tokenizer.special_ids:
            tokens = tokenizer.encode(tokenizer.token_text(last) + text, add_bos=False)
            if tokens[:1] == [last]:
                return tokens[1:]
        return tokenizer.encode(text, add_bos=False)

    def _end_of(self, reply: Reply, kv: KVCache | None, due: list[int]) -> None:
        """Add a reply, unless it was dropped (None), with its value, behind which `due` is not entered yet."""
        self._reply = None
        if kv is None:
            return
        ids = [token.id for token in reply.tokens]
        plain, whole = self._texts(ids)
        # Some tokenizers drop a space at the beginning of a text; within the conversation it is kept.
        content = plain if plain == " " + reply.text and not reply.thought else reply.text
        if reply.left_out.messages:
            self.messages = reply.messages[:-1]
        else:
            self._before.append((list(self.messages), self._kv, self._unentered, self._rendered))
        self.messages += [reply.messages[-1], _message(reply.thought, content)]
        self._kv, self._unentered, self._rendered = kv, due, reply.prompt + whole
        self._last = reply.prompt, ids


def _message(thought: str, content: str) -> Message:
    return {"role": "assistant", "content": content} | ({"reasoning_content": thought} if thought else {})
