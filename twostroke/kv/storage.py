"""A value as bytes and in a file: what it is, its K and V, and a checksum over everything.

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

from twostroke.backends.rows import Stored
from twostroke.errors import CorruptFile, KVError
from twostroke.kv.contents import Contents, Tail
from twostroke.kv.geometry import Geometry
from twostroke.kv.provenance import Stretch
from twostroke.models.rope import Rope

MAGIC = b"twostroke-kv-1\n\0"
DIGEST_BYTES = 32


def encode(contents: Contents) -> bytes:
    """All of a value."""
    tail = contents.tail
    logits = np.asarray([] if tail is None or tail.row is None else tail.logits, np.float32)
    header = {
        "geometry": dataclasses.asdict(contents.geometry),
        "page_size": contents.page_size,
        "spans": contents.spans.tolist(),
        "tokens": contents.tokens.tolist(),
        "next_position": contents.next_position,
        "stretches": [[s.count, s.model, s.before.tolist()] for s in contents.stretches],
        "tail": tail and {"model": tail.model, "pending": tail.pending},
        "num_logits": len(logits),
    }
    text = json.dumps(header).encode()
    size = len(text).to_bytes(8, "little")
    return seal(b"".join([MAGIC, size, text, contents.entries.tobytes(), logits.tobytes()]))


def decode(data: bytes, source: Path) -> Contents:
    """What `encode` made. Raises CorruptFile naming `source`."""
    body = unseal(data, MAGIC, source, "KV cache")
    # From here on the bytes are what `encode` made.
    start = len(MAGIC) + 8
    stop = start + int.from_bytes(body[start - 8 : start], "little")
    header = json.loads(bytes(body[start:stop]))
    geometry = _geometry(header["geometry"])
    tokens = np.array(header["tokens"], np.int32)
    logits_start = len(body) - 4 * header["num_logits"]
    shape = (geometry.num_layers, 2, len(tokens), geometry.num_kv_heads, geometry.head_dim)
    tail = header["tail"]
    if tail is not None:
        logits = np.frombuffer(body[logits_start:], np.float32).copy() if header["num_logits"] else None
        tail = Tail(tail["model"], None if logits is None else Stored(logits[None]), tail["pending"])
    return Contents(
        geometry=geometry,
        page_size=header["page_size"],
        spans=np.array(header["spans"], np.int32).reshape(-1, 4),
        tokens=tokens,
        stretches=tuple(Stretch(count, model, np.array(b, np.int32)) for count, model, b in header["stretches"]),
        next_position=header["next_position"],
        tail=tail,
        entries=np.frombuffer(body[stop:logits_start], geometry.dtype).reshape(shape),
    )


def seal(body: bytes) -> bytes:
    """The bytes with a checksum behind them."""
    return body + _digest(body)


def unseal(data: bytes, magic: bytes, source: Path, what: str) -> memoryview:
    """The bytes that were sealed, `magic` included. Raises CorruptFile naming `source`, which should be a `what`."""
    if not data.startswith(magic):
        raise CorruptFile(f"{source}: this is no {what} saved by this version of Twostroke")
    body = memoryview(data)[:-DIGEST_BYTES]
    if _digest(body) != data[-DIGEST_BYTES:]:
        raise CorruptFile(f"{source}: the checksum is wrong: the file was truncated or altered; delete it")
    return body


def write(data: bytes, path: Path) -> None:
    """Write atomically: a crash or a full disk leaves what was at `path` before. Raises KVError on failure."""
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name, delete=False) as out:
            temporary = out.name
            out.write(data)
            out.flush()
            os.fsync(out.fileno())  # or the new name might survive a power failure, and its bytes not
        os.replace(temporary, path)
    except OSError as error:
        raise KVError(f"{path}: it cannot be saved: {error.strerror}") from None
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)  # it is gone already unless something failed


def read(path: Path) -> bytes:
    """The bytes of a file. Raises KVError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise KVError(f"{path}: it cannot be read: {error.strerror}") from None


def _geometry(fields: dict[str, Any]) -> Geometry:
    ropes = tuple(Rope(r["base"], tuple(r["factors"]) if r["factors"] else None) for r in fields.pop("ropes"))
    return Geometry(**fields, ropes=ropes)


def _digest(body: bytes | memoryview) -> bytes:
    return hashlib.blake2b(body, digest_size=DIGEST_BYTES).digest()
