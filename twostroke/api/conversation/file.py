"""A conversation in a file: the messages as JSON, and the KV cache that holds them.

Layout: magic, a section of JSON, and the value as a stream (`kv.stream`). Both have checksums, and the fields of the
JSON are checked before they are used.
"""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.kv import stream
from twostroke.kv.cache import KVCache
from twostroke.kv.header_fields import InvalidHeader, parse_json, require
from twostroke.kv.pool import PagePool

MAGIC = b"twostroke-conversation-2\n"
OLD_MAGICS = (b"twostroke-session-1\n",)


@dataclass(frozen=True)
class SavedConversation:
    """The saved text of a conversation."""

    model: str  # the name of the model that answered
    messages: list[dict[str, str]]  # [{"role": ..., "content": ...}, ...]
    rendered: str  # the text that the KV cache holds


def save(path: Path, saved: SavedConversation, kv: KVCache) -> None:
    """Write both. An existing file is replaced only when all is written. Raises KVError on failure."""
    with stream.saving(path) as out:
        out.write(MAGIC)
        stream.write_section(out, json.dumps(dataclasses.asdict(saved)).encode())
        kv.write_to(out)


def load(path: Path, pool: PagePool, vocab_size: int) -> tuple[SavedConversation, KVCache]:
    """Read both into `pool`. Raises CorruptFile, GeometryMismatch, OutOfPages, or KVError if it cannot be read."""
    with stream.opened(path) as source:
        source.check_magic(MAGIC, OLD_MAGICS, "conversation")
        text, _ = source.read_section(stream.MAX_HEADER)
        try:
            saved = _checked(parse_json(text))
        except InvalidHeader as error:
            raise source.corrupt(str(error)) from None
        kv = KVCache.read_from(source, pool)
        if max(int(kv.token_array.max(initial=0)), kv.pending or 0) >= vocab_size:
            raise source.corrupt("it holds tokens that the model does not have")
        return saved, kv


def _checked(value: Any) -> SavedConversation:
    names = {field.name for field in dataclasses.fields(SavedConversation)}
    require(isinstance(value, dict) and set(value) == names, f"it does not have the fields {', '.join(sorted(names))}")
    messages, texts = value["messages"], [value["model"], value["rendered"]]
    require(isinstance(messages, list), "messages are not a list")
    for message in messages:
        right = isinstance(message, dict) and set(message) - {"reasoning_content"} == {"role", "content"}
        require(right, "a message does not have the fields role and content")
        texts += message.values()
    require(all(isinstance(text, str) for text in texts), "a text is not a string")
    return SavedConversation(**value)
