"""Malformed HTTP: incomplete requests, garbage, and very slow clients."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from benchmarks.soak.requests import Ledger

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "the", "max_tokens": 300, "stream": true}'
LISTEN_S = 1.0  # time to wait for an answer

Bytes = Callable[[random.Random], AsyncIterator[bytes]]


async def half_a_head(rng: random.Random) -> AsyncIterator[bytes]:
    yield HEAD[: rng.randrange(len(HEAD))]


async def half_a_body(rng: random.Random) -> AsyncIterator[bytes]:
    yield HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY[: rng.randrange(len(BODY))]


async def too_much(rng: random.Random) -> AsyncIterator[bytes]:
    yield HEAD + b"Content-Length: 2\r\n\r\n" + BODY * 3


async def garbage(rng: random.Random) -> AsyncIterator[bytes]:
    yield rng.randbytes(rng.randint(1, 4000))


async def huge_headers(rng: random.Random) -> AsyncIterator[bytes]:
    yield HEAD
    for _ in range(200):
        yield b"x-a: " + b"y" * 1000 + b"\r\n"
    yield b"\r\n"


async def broken_chunks(rng: random.Random) -> AsyncIterator[bytes]:
    yield (
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + rng.choice((b"zz\r\n", b"-5\r\n", b"ffffffffffffffffff\r\n", b"5\r\n{"))
    )


async def wild_length(rng: random.Random) -> AsyncIterator[bytes]:
    yield HEAD + b"Content-Length: " + rng.choice((b"-1", b"9" * 30, b"1e3", b"5, 6", b"\xb2")) + b"\r\n\r\n" + BODY


async def pipelined(rng: random.Random) -> AsyncIterator[bytes]:
    yield (HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY) * 3


async def not_http(rng: random.Random) -> AsyncIterator[bytes]:
    yield rng.choice(
        (
            b"\x16\x03\x01\x02\x00\x01\x00",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /health HTTP/9.9\r\n\r\n",
            b"\r\n" * 500,
        )
    )


async def upgrade(rng: random.Random) -> AsyncIterator[bytes]:
    yield b"GET /v1/models HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"


async def slow(rng: random.Random) -> AsyncIterator[bytes]:
    """A request sent one byte at a time, for seconds."""
    whole = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
    for at in range(rng.randrange(1, 30)):
        yield whole[at : at + 1]
        await asyncio.sleep(0.2)


KINDS: tuple[Bytes, ...] = (
    half_a_head,
    half_a_body,
    too_much,
    garbage,
    huge_headers,
    broken_chunks,
    wild_length,
    pipelined,
    not_http,
    upgrade,
    slow,
)


async def vandal(port: int, rng: random.Random, ledger: Ledger) -> None:
    """Open one connection after another, forever. Any answer except a server error is allowed."""
    while True:
        kind = rng.choice(KINDS)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError as error:
            ledger.surprise(f"{kind.__name__}: no connection, {error}")
            await asyncio.sleep(1)
            continue
        heard = b""
        try:
            async for data in kind(rng):
                writer.write(data)
                await writer.drain()
            with suppress(TimeoutError):
                heard = await asyncio.wait_for(reader.read(4000), rng.uniform(0, LISTEN_S))
        except OSError:  # the server closed the connection, which is allowed
            pass
        finally:
            writer.transport.abort()
        ledger.count(kind.__name__)
        if (status := re.match(rb"HTTP/1.1 (5\d\d)", heard)) is not None:
            ledger.surprise(f"{kind.__name__}: {status[1].decode()}, {heard[:300]!r}")
