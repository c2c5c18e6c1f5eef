"""A conversation in a file: its messages as JSON and its KV cache, under one checksum.

Layout: magic, length of the JSON (uint64, little endian), the JSON, the KV cache as `KVCache.save` writes it (nothing
where nothing was said yet), and the blake2b digest of all bytes before it.
"""

from __future__ import annotations

import json
from pathlib import Path

from twostroke.kv import storage
from twostroke.kv.cache import KVCache, PoolHolder

MAGIC = b"twostroke-session-1\n"


def save(path: Path, model: str, messages: list[dict[str, str]], rendered: str, kv: KVCache) -> None:
    """Write atomically: what was at `path` before stays until all is written. Raises KVError on failure."""
    text = json.dumps({"model": model, "messages": messages, "rendered": rendered}).encode()
    value = storage.encode(kv.contents()) if len(kv) else b""
    storage.write(storage.seal(b"".join([MAGIC, len(text).to_bytes(8, "little"), text, value])), path)


def load(path: Path, llm: PoolHolder) -> tuple[list[dict[str, str]], str, KVCache]:
    """Messages, rendered text and KV. Raises CorruptFile, GeometryMismatch, OutOfPages, or KVError if unreadable."""
    body = storage.unseal(storage.read(path), MAGIC, path, "conversation")[len(MAGIC) :]
    # From here on the file is what `save` wrote.
    stop = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(bytes(body[8:stop]))
    kv = KVCache.empty(llm.pool)
    if len(body) > stop:
        kv = KVCache.placed(llm.pool, storage.decode(bytes(body[stop:]), path), f"{path}: this value")
    return header["messages"], header["rendered"], kv
