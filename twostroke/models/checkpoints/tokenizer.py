"""Text to token ids and back, the same for GGUF files and Hugging Face directories."""

import hashlib
import json
import logging
import re
import threading
import unicodedata
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from twostroke.errors import CheckpointError, InvalidRequest, TwostrokeError
from twostroke.models.checkpoints.chat_templates import ChatTemplates
from twostroke.models.checkpoints.chat_tokens import ChatTokens
from twostroke.models.checkpoints.checkpoint import GgufTokenizerSource, HfTokenizerSource
from twostroke.models.checkpoints.gguf.tokenizer import read_gguf
from twostroke.models.checkpoints.huggingface.tokenizer import read_directory
from twostroke.models.checkpoints.infill import NO_INFILL, InfillTokens
from twostroke.models.checkpoints.text_stream import TextStream
from twostroke.models.checkpoints.token_bytes import TokenBytes, byte_reader

log = logging.getLogger(__name__)

# Texts that end an answer in every model whose vocabulary has them as one token (as in llama.cpp), in addition to the
# EOS of its metadata and to what its chat template writes after an assistant's message.
END_TOKENS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>",
    "<turn|>", "<|endoftext|>", "<|end_of_text|>", "<|EOT|>", "<EOT>", "_<EOT>", "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek's bars are full-width)
)  # fmt: skip
CONTROL = re.compile(r"<[^<>\s]+>|\[/?[A-Z_]+\]")  # what control tokens look like
HARMONY = ("<|return|>", "<|call|>")  # with both, <|end|> ends a message of several in a turn, not the turn

# The tokenizer's files in a Hugging Face directory.
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model",
         "vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja")  # fmt: skip


class Tokenizer:
    """A model's tokenizer with its chat template. Safe to share between threads."""

    vocab_size: int
    bos_id: int | None
    eos_ids: frozenset[int]  # every id that ends generation: EOS and end-of-turn tokens
    add_bos: bool  # whether `encode` begins with BOS by default
    special_ids: frozenset[int]
    strips: bool  # whether a text's first space is SentencePiece's own
    infill: InfillTokens | None  # for fill-in-the-middle; None if the model has no tokens for it

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        where: Path,
        special_tokens: Mapping[str, str],
        eos_ids: Collection[int],
        affixes: tuple[Sequence[int], Sequence[int]],
        templates: Mapping[str, str],
        infill: Mapping[str, int] | None = None,
    ) -> None:
        """Args:
        special_tokens: the texts of bos_token, eos_token and others.
        affixes: surround every prompt.
        infill: ids that a file states for fill-in-the-middle (`InfillTokens.of`).
        """
        self._chat = ChatTemplates(templates, special_tokens)
        self.vocab_size = max(
            backend.get_vocab_size(with_added_tokens=True), max(backend.get_added_tokens_decoder(), default=-1) + 1
        )
        if bad := [index for index in eos_ids if not 0 <= index < self.vocab_size]:
            raise CheckpointError(f"{where}: EOS id {bad[0]} is outside the vocabulary of {self.vocab_size}")
        ends = {id for text in _end_texts(backend, self._chat) if (id := backend.token_to_id(text)) is not None}
        self.eos_ids = frozenset(eos_ids) | ends
        _make_special(backend, self.eos_ids, where)
        added = backend.get_added_tokens_decoder()
        names = {token.content: index for index, token in added.items() if token.special}
        self.backend = backend
        self.infill = InfillTokens.of(backend, infill or {})
        self._lock = threading.Lock()
        self._where = where
        self._prefix, self._suffix = list(affixes[0]), list(affixes[1])
        read, self.strips = byte_reader(backend, where)
        self._bytes = TokenBytes(read, self.vocab_size)
        self.special_ids = frozenset(names.values())
        bos = special_tokens.get("bos_token")
        self.bos_id = None if bos is None else backend.token_to_id(bos)
        self.add_bos = self.bos_id is not None and self._prefix[:1] == [self.bos_id]

    @classmethod
    def from_source(cls, source: GgufTokenizerSource | HfTokenizerSource) -> "Tokenizer":
        """Raises CheckpointError if the tokenizer is missing or of a kind that is not supported."""
        if isinstance(source, GgufTokenizerSource):
            return cls(**read_gguf(source))
        return cls(**read_directory(source.directory))

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all that determines ids: model, vocabulary, merges, normalization, splits, added tokens."""
        digest = hashlib.blake2b(digest_size=16)
        for part in (self.backend.model, self.backend.normalizer, self.backend.pre_tokenizer):
            digest.update(b"\n" if part is None else part.__getstate__() + b"\n")
        for index, token in sorted(self.backend.get_added_tokens_decoder().items()):
            digest.update(f"{index} {token!r}\n".encode())
        return digest.hexdigest()

    @property
    def special_tokens(self) -> Mapping[str, str]:
        """The texts of bos_token, eos_token, unk_token and pad_token, of those that the model has."""
        return self._chat.special_tokens

    @property
    def chat_template(self) -> str | None:
        """The source of the model's (default) chat template."""
        return self._chat.default

    def template_for(self, tools: bool) -> str | None:
        """The source of the chat template that conversations with tools, or without, are rendered with."""
        return self._chat.source(tools)

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """The ids of a text, as transformers' `tokenizer(text)` returns them.

        `add_bos` overrides the model's default. Without `parse_special`, text that looks like a special token is
        encoded as plain text: use this for untrusted input.
        """
        try:
            with self._lock:  # `encode_special_tokens` is state of the shared backend
                self.backend.encode_special_tokens = not parse_special
                # Of the library's calls, those for batches let other threads run meanwhile.
                [encoded] = self.backend.encode_batch_fast([text], add_special_tokens=False)
                ids = encoded.ids
        except (TypeError, UnicodeEncodeError):
            raise InvalidRequest("the prompt is not text that UTF-8 can encode (a lone surrogate?)") from None
        if add_bos is None:
            return [*self._prefix, *ids, *self._suffix]
        if not add_bos:
            return ids
        if self.bos_id is None:
            raise InvalidRequest("the model has no BOS token: leave add_bos out")
        return [self.bos_id, *ids]

    def encode_infill(
        self,
        prefix: str | Sequence[int],
        suffix: str | Sequence[int],
        extra: Sequence[tuple[str, str]] = (),
        most: int | None = None,
    ) -> list[int]:
        """The prompt that asks for what stands between two texts (`InfillTokens.prompt`); no text is a special token.

        Raises InvalidRequest if the model has no tokens for it.
        """
        if self.infill is None:
            raise InvalidRequest(NO_INFILL)
        encode = self.infill.guarded(lambda text: self.encode(text, add_bos=False, parse_special=False))
        before = encode(prefix) if isinstance(prefix, str) else prefix
        after = self._without_space(encode, suffix) if isinstance(suffix, str) else suffix
        most = None if most is None else most - len(self._prefix)
        return [*self._prefix, *self.infill.prompt(encode, before, after, extra, most)]

    def _without_space(self, encode: Callable[[str], list[int]], text: str) -> list[int]:
        """Encode without the space that SentencePiece puts before a text, as CodeLlama and Mistral do for suffixes."""
        mark = encode("\n") if self.strips else []
        whole = encode(f"\n{text}") if mark else []
        return whole[len(mark) :] if mark and whole[: len(mark)] == mark else encode(text)

    def least_tokens(self, text: str) -> int:
        """A lower bound on the number of tokens of a text, found without encoding it; 0 where there is none.

        A token stands for at most as many bytes as the longest one of the vocabulary has.
        """
        kinds, longest = self._bounds
        size = len(text.encode("utf-8", "surrogatepass"))
        if "NFC" in kinds and not unicodedata.is_normalized("NFC", text):
            size //= 3  # composed, a text has at least a third of its bytes
        return size // longest if longest else 0

    @cached_property
    def _bounds(self) -> tuple[set[str], int]:
        """(kinds of normalizer, most bytes that a token stands for; 0 where it may be any number)."""
        state = json.loads(self.backend.to_str())
        kinds = _normalizers(state["normalizer"])
        # Such tokens take in all spaces beside them, or all unknown characters in a row.
        greedy = any(token["lstrip"] or token["rstrip"] for token in state["added_tokens"])
        greedy |= bool(state["model"].get("fuse_unk")) and not state["model"].get("byte_fallback")
        if greedy or not kinds <= {"NFC", "Prepend", "Replace"}:
            return kinds, 0
        return kinds, max(len(self.token_bytes(id, skip_special=False)) for id in range(self.vocab_size))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if key not in ("_lock", "_bytes")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = threading.Lock()
        self._bytes = TokenBytes(byte_reader(self.backend, self._where)[0], self.vocab_size)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of all ids; bytes that are not UTF-8 become U+FFFD."""
        data = b"".join([self.token_bytes(index, skip_special=skip_special) for index in ids])
        return (data.removeprefix(b" ") if self.strips else data).decode("utf-8", errors="replace")

    def token_bytes(self, id: int, *, skip_special: bool = True) -> bytes:
        """The exact bytes of a token; a special token has none unless `skip_special` is False."""
        return b"" if skip_special and id in self.special_ids else self._bytes[id]

    def token_text(self, id: int) -> str:
        r"""One token in readable form: special tokens by name, bytes that are not UTF-8 as \xNN."""
        return self.token_bytes(id, skip_special=False).decode("utf-8", errors="backslashreplace")

    def stream(self, *, skip_special: bool = True, shown: frozenset[int] = frozenset()) -> TextStream:
        """An incremental `decode` for tokens as they are generated. `shown`: special tokens that are not skipped."""
        hidden = self.special_ids - shown if skip_special else frozenset[int]()
        return TextStream(self._bytes.__getitem__, hidden, strip_leading_space=self.strips)

    def chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """The prompt for a conversation; options and errors are those of `ChatTemplates.render`."""
        return self._chat.render(messages, **options)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> ChatTokens:
        """The ids of `chat`. Only the template adds BOS, as in transformers, so BOS never appears twice."""
        text = self.chat(messages, **options)
        said = [dict(message) for message in messages]
        ids = self.encode(text, add_bos=False)
        return ChatTokens(ids, said, text, partial(self.chat, **options), self.offsets)

    def offsets(self, text: str) -> list[tuple[int, int]]:
        """The first and past-the-last character of each token of a text."""
        with self._lock:
            self.backend.encode_special_tokens = False
            return self.backend.encode_batch([text], add_special_tokens=False)[0].offsets

    def save(self, directory: Path) -> None:
        """Write the files of a Hugging Face directory: the same ids, the same EOS, the same (default) template."""
        copy = tokenizers.Tokenizer.from_str(self.backend.to_str())
        affixes = {id: self.backend.id_to_token(id) for id in (*self._prefix, *self._suffix)}
        if affixes:
            around = [*(affixes[id] for id in self._prefix), "$A", *(affixes[id] for id in self._suffix)]
            names = [(text, id) for id, text in affixes.items() if text is not None]
            copy.post_processor = processors.TemplateProcessing(single=around, special_tokens=names)  # pyright: ignore[reportAttributeAccessIssue]
        copy.save(str(directory / "tokenizer.json"))
        config = {**self._chat.special_tokens, "chat_template": self.chat_template}
        (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False))
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": sorted(self.eos_ids)}))

    def __repr__(self) -> str:
        return f"Tokenizer({str(self._where)!r}, vocab_size={self.vocab_size})"


def _end_texts(backend: tokenizers.Tokenizer, chat: ChatTemplates) -> set[str]:
    """The texts of tokens that end an answer: those known, and the one that the template writes after an answer."""
    harmony = all(backend.token_to_id(text) is not None for text in HARMONY)
    found = {text for text in END_TOKENS if text != "<|end|>" or not harmony}
    if chat.default is not None and not harmony:
        mark = "\ue001"
        said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        with suppress(TwostrokeError):  # a template that takes no such conversation, or none at all
            _, present, after = chat.render(said, add_generation_prompt=False).rpartition(mark)
            if present and (end := re.match(r"\s*(<[^<>\s]+>)", after)):
                found.add(end[1])
    return found


def _make_special(backend: tokenizers.Tokenizer, ids: Iterable[int], where: Path) -> None:
    """Make tokens special that their file types as text: they are matched whole and never printed."""
    added = backend.get_added_tokens_decoder()
    texts = [backend.id_to_token(id) for id in sorted(ids) if not (id in added and added[id].special)]
    # A newline, too, may be declared to end answers. It stays text.
    if texts := [text for text in texts if text and (text in END_TOKENS or CONTROL.fullmatch(text))]:
        log.warning("%s: %s typed as text; it ends answers here, as a special token does", where, ", ".join(texts))
        backend.add_special_tokens([tokenizers.AddedToken(text, normalized=False, special=True) for text in texts])


def _normalizers(state: dict[str, Any] | None) -> set[str]:
    """The kinds of a normalizer's steps. A replacement counts only where it is that of spaces."""
    if state is None:
        return set()
    if state["type"] == "Sequence":
        return {kind for step in state["normalizers"] for kind in _normalizers(step)}
    if state["type"] == "Replace" and (state["pattern"], state["content"]) != ({"String": " "}, "▁"):
        return {"other"}
    return {state["type"]}
