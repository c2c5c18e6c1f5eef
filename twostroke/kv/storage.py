"""A value in a file: what it is, its K and V, and a checksum over everything.

Layout: magic, length of the header (uint64, little endian), header (JSON), K and V as [layers, 2, len, Hkv, D],
logits of the tail (float32) if any, and the blake2b digest of all bytes before it.
"""

import dataclasses
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from twostroke.errors import CorruptFile, KVError
from twostroke.kernels.interface import PAGE
from twostroke.kv.cache import KVCache, Tail, _placed
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import Stretch
from twostroke.models.config import Rope

MAGIC = b"twostroke-kv-1\n\0"
DIGEST_BYTES = 32


def save(kv: KVCache, path: Path) -> None:
    """Write atomically: a crash or a full disk leaves what was at `path` before. Raises KVError on failure."""
    tail = kv.tail
    spans = kv.table.copy()
    spans[:, PAGE] = 0  # page ids mean nothing elsewhere
    header = {
        "geometry": dataclasses.asdict(kv.pool.geometry),
        "page_size": kv.pool.page_size,
        "spans": spans.tolist(),
        "tokens": kv.tokens,
        "next_position": kv.next_position,
        "stretches": [[s.count, s.model, s.before.tolist()] for s in kv.stretches],
        "tail": tail and {"model": tail.model, "pending": tail.pending, "logits": _length(tail.logits)},
    }
    text = json.dumps(header).encode()
    parts = [MAGIC, len(text).to_bytes(8, "little"), text, _to_bytes(kv.entries())]
    if tail is not None and tail.logits is not None:
        parts.append(_to_bytes(tail.logits.float()))
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in parts:
        digest.update(part)
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as out:
            temporary = out.name
            out.writelines([*parts, digest.digest()])
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise KVError(f"{path}: the KV cache cannot be saved: {error.strerror}") from error


def load(path: Path, pool: PagePool) -> KVCache:
    """Read a value into `pool`. Raises CorruptFile, GeometryMismatch or OutOfPages, having changed nothing."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise KVError(f"{path}: the KV cache cannot be read: {error.strerror}") from error
    if not data.startswith(MAGIC):
        raise CorruptFile(f"{path}: this is no KV cache saved by this version of Twostroke")
    body, digest = memoryview(data)[:-DIGEST_BYTES], data[-DIGEST_BYTES:]
    if hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest() != digest:
        raise CorruptFile(f"{path}: the checksum is wrong: the file was truncated or altered; delete it")
    # From here on the file is what `save` wrote.
    start = len(MAGIC) + 8
    stop = start + int.from_bytes(body[start - 8 : start], "little")
    header = json.loads(bytes(body[start:stop]))
    pool.geometry.require(_geometry(header["geometry"]), f"{path}: saved for another model")
    if header["page_size"] != pool.page_size:
        raise KVError(f"{path}: saved with pages of {header['page_size']} entries, the pool has {pool.page_size}")
    tokens = np.array(header["tokens"], np.int32)
    size = len(tokens) * pool.entry_bytes
    geometry = pool.geometry
    entries = _from_bytes(body[stop : stop + size], pool.storage.dtype).view(
        geometry.num_layers, 2, len(tokens), geometry.num_kv_heads, geometry.head_dim
    )
    tail = header["tail"]
    if tail is not None:
        logits = tail.pop("logits")
        if logits is not None:
            tail["logits"] = _from_bytes(body[stop + size : stop + size + 4 * logits], torch.float32)
        tail = Tail(**tail)
    stretches = tuple(Stretch(count, model, np.array(before, np.int32)) for count, model, before in header["stretches"])
    spans = np.array(header["spans"], np.int32).reshape(-1, 4)
    return _placed(pool, spans, entries, tokens, stretches, header["next_position"], tail)


def _geometry(fields: dict[str, Any]) -> Geometry:
    ropes = tuple(Rope(r["base"], tuple(r["factors"]) if r["factors"] else None) for r in fields.pop("ropes"))
    return Geometry(**fields, ropes=ropes)


def _length(logits: torch.Tensor | None) -> int | None:
    return None if logits is None else len(logits)


def _to_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes()


def _from_bytes(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype) if len(data) else torch.zeros(0, dtype=dtype)
    )
