"""A conversation in a file: its messages as JSON and its KV cache, under one checksum.

Layout: magic, blake2b digest of all that follows, length of the JSON (uint64, little endian), the JSON, and the KV
cache as `KVCache.save` writes it (nothing where nothing was said yet).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from twostroke.errors import CorruptFile
from twostroke.kv import storage
from twostroke.kv.cache import KVCache, PoolHolder

MAGIC = b"twostroke-session-1\n"
DIGEST_BYTES = 32


def save(path: Path, model: str, messages: list[dict[str, str]], rendered: str, kv: KVCache) -> None:
    """Write atomically: what was at `path` before stays until all is written. Raises KVError on failure."""
    text = json.dumps({"model": model, "messages": messages, "rendered": rendered}).encode()
    parts = [len(text).to_bytes(8, "little"), text, storage.encode(kv.contents()) if len(kv) else b""]
    storage.write(b"".join([MAGIC, _digest(parts), *parts]), path)


def load(path: Path, llm: PoolHolder) -> tuple[list[dict[str, str]], str, KVCache]:
    """Messages, rendered text and KV. Raises CorruptFile, GeometryMismatch, OutOfPages, or KVError if unreadable."""
    data = storage.read(path)
    if not data.startswith(MAGIC):
        raise CorruptFile(f"{path}: this is no conversation saved by this version of Twostroke")
    digest, body = data[len(MAGIC) :][:DIGEST_BYTES], data[len(MAGIC) + DIGEST_BYTES :]
    if _digest([body]) != digest:
        raise CorruptFile(f"{path}: the checksum is wrong: the file was truncated or altered; delete it")
    # From here on the file is what `save` wrote.
    stop = 8 + int.from_bytes(body[:8], "little")
    header = json.loads(body[8:stop])
    kv = KVCache.empty(llm.pool)
    if len(body) > stop:
        kv = KVCache.placed(llm.pool, storage.decode(body[stop:], path), f"{path}: this value")
    return header["messages"], header["rendered"], kv


def _digest(parts: Sequence[bytes | memoryview]) -> bytes:
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    return digest.digest()
