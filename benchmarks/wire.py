"""GB/s of a value's way into another process, beside what NIXL and a plain socket do with the same bytes.

    python -m benchmarks.wire

Two processes on one machine. A value of random bytes goes from one pool to the other, with everything that a transfer
does: connection, handshake, claim, a digest of every page made and checked. In turn with it, NIXL alone writes, and
reads, the same pages between the same pools (a list of pages, one request), and a plain socket sends as many bytes into
memory. The run fails unless what arrives is what was sent.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import numpy as np

from benchmarks.quiet import Others, doubt
from benchmarks.results_file import save
from benchmarks.terminal import command_line, ended_by, markdown, say
from twostroke.backends.interface import PAGE
from twostroke.backends.page_memory import HostMemory
from twostroke.cluster.wire import checksum
from twostroke.cluster.wire.channel import Channel
from twostroke.cluster.wire.incoming_transfer import IncomingTransfer
from twostroke.cluster.wire.nixl import NixlPendingRead, NixlReader, unavailable
from twostroke.cluster.wire.receiver import Receiver
from twostroke.cluster.wire.sender import Sender
from twostroke.cluster.wire.transport import open_transport
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import EntryTable
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.kv.provenance import NOTHING, Stretch
from twostroke.models.layer_groups import LayerGroup
from twostroke.models.rope import Rope

SHAPES = {  # layers, KV heads, head size
    "smollm2-135m": (30, 3, 64),
    "qwen2.5-coder-0.5b": (24, 2, 64),
    "qwen2.5-coder-1.5b": (28, 2, 128),
}
PAGE_SIZES = [16, 64]
LENGTHS = [512, 2000, 8000]
SECRET = "a secret of the benchmark"

DEFINITIONS = {
    "bytes_per_s": "bytes of K and V / seconds from the call of `receive` to the value; the median over rounds",
    "nixl, tcp": "our transfers, by transport",
    "nixl write, nixl read": "bytes / seconds of one WRITE or READ of the same pages with NIXL's Python API, from "
    "posting it to its end",
    "socket alone": "bytes / seconds of the same bytes over one loopback connection into one buffer, as seen there",
    "others_cpu": "processor time of everything else on the machine during the turn, the sender's included",
    "parts": "seconds in parts of a transfer, on either side (SENDER, RECEIVER); both sides work at once",
}


class Differs(Exception):
    """What arrived is not what was sent."""


@dataclass(frozen=True)
class Turn:
    bytes_per_s: float
    others_cpu: float
    parts: dict[str, float]


class Parts:
    """Seconds that this process has spent in parts of transfers: in functions that it replaces by timed ones."""

    def __init__(self, functions: dict[str, list[tuple[Any, str]]]) -> None:
        self._seconds = dict.fromkeys(functions, 0.0)
        for part, places in functions.items():
            for owner, name in places:
                setattr(owner, name, self._timed(part, getattr(owner, name)))

    def _timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                self._seconds[part] += time.perf_counter() - began

        return timed

    def take(self) -> dict[str, float]:
        """By part, since it was last called."""
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken


SENDER = {
    "digests": [(checksum, "checksum")],
    "messages": [(Channel, "send")],
}
RECEIVER = {
    "opening": [(IncomingTransfer, "open"), (IncomingTransfer, "accept_terms")],
    "copies": [(NixlReader, "begin"), (NixlPendingRead, "wait")],
    "checks": [(checksum, "is_right")],
    "attaching": [(IncomingTransfer, "_attached"), (IncomingTransfer, "end")],
}


def pool_of(model: str, page_size: int, pages: int) -> PagePool:
    layers, heads, size = SHAPES[model]
    group = LayerGroup(tuple(range(layers)), None, heads, size, layers)
    geometry = Geometry((group,), (Rope(1e4),) * layers, "bfloat16", "none")
    memory = HostMemory(pages, geometry.page_shape(page_size))
    return PagePool(geometry, memory, pages, page_size)


def value_of(pool: PagePool, length: int) -> KVCache:
    """A value of random bytes in whole pages."""
    count = length // pool.page_size
    pages, random = pool.allocate(count), np.random.default_rng(length)
    for page in pages:
        pool.put(page, random.bytes(pool.page_bytes), pool.page_size)
    starts = np.arange(count) * pool.page_size
    table = np.stack([np.zeros(count), np.full(count, pool.page_size), starts, pages], 1).astype(np.int32)
    tokens = np.zeros(count * pool.page_size, np.int32)
    kv = KVCache(pool, EntryTable(table, tokens, (Stretch(len(tokens), None, NOTHING),), len(tokens)))
    pool.release(np.array(pages))
    return kv


def sending(pipe: Connection, model: str, page_size: int, pages: int, kinds: list[str]) -> None:
    """The other process: does what it is told."""
    pool = pool_of(model, page_size, pages)
    transports = {kind: open_transport(kind, pool) for kind in kinds}  # pyright: ignore[reportArgumentType]
    senders = {kind: Sender(pool, "m", secret=SECRET, transport=one) for kind, one in transports.items()}
    values: dict[int, KVCache] = {}
    parts = Parts(SENDER)
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        what, length, more = asked
        if what == "parts":
            pipe.send(parts.take())
            continue
        if what == "memory":
            pipe.send(transports["nixl"].memory())
            continue
        if length not in values:
            values[length] = value_of(pool, length)
        kv = values[length]
        if what == "socket alone":
            with socket.create_connection(("127.0.0.1", more)) as connection:
                for page in kv.table[:, PAGE].tolist():
                    connection.sendall(pool.memory.read_pages([pool.frame(page)])[0])
        elif what == "nixl read":
            pipe.send(None)
        elif what == "nixl write":
            pipe.send(moved("WRITE", transports["nixl"], more, len(kv.table)))
        else:
            outgoing = senders[what].offer()
            outgoing.complete(kv)
            pipe.send(outgoing.handle)
    for sender in senders.values():
        sender.close()
    for transport in transports.values():
        transport.close()


def moved(operation: str, nixl: Any, memory: dict[str, Any], count: int) -> float:
    """Seconds that NIXL takes to write the first pages of this pool to another's, or to read them from there."""
    peer, indices = nixl._peer(memory), np.arange(count, dtype=np.int32)
    handle = nixl.agent.make_prepped_xfer(operation, nixl.pages, indices, peer.pages, indices)
    began = time.perf_counter()
    state = nixl.agent.transfer(handle)
    while state == "PROC":
        time.sleep(5e-5)
        state = nixl.agent.check_xfer_state(handle)
    seconds = time.perf_counter() - began
    handle.release()
    if state != "DONE":
        raise Differs(f"NIXL ended with {state}")
    return seconds


class Here:
    """This process, which receives."""

    def __init__(self, model: str, page_size: int, lengths: list[int], kinds: list[str], parts: Parts) -> None:
        self.pages = 2 * (max(lengths) // page_size + 2)
        self.pool = pool_of(model, page_size, self.pages)
        for page in self.pool.allocate(self.pages):  # touched once: new memory is slow
            self.pool.put(page, bytes(self.pool.page_bytes), 0)
            self.pool.release(np.array([page]))
        self.transports = {kind: open_transport(kind, self.pool) for kind in kinds}  # pyright: ignore[reportArgumentType]
        self.receivers = {
            kind: Receiver(self.pool, "m", secret=SECRET, transport=one) for kind, one in self.transports.items()
        }
        self.pipe, theirs = multiprocessing.get_context("spawn").Pipe()
        arguments = (theirs, model, page_size, self.pages, kinds)
        self.process = multiprocessing.get_context("spawn").Process(target=sending, args=arguments)
        self.process.start()
        assert self.pipe.recv() == "ready"
        self.parts = parts
        self.theirs: dict[str, Any] = {}
        if "nixl" in kinds:
            self.pipe.send(("memory", 0, None))
            self.theirs = self.pipe.recv()
        self.buffer = np.ones(self.pages // 2 * self.pool.page_bytes, np.uint8)

    def turn(self, what: str, length: int, checked: bool) -> Turn:
        size = length // self.pool.page_size * self.pool.page_bytes
        others, parts = Others(), dict[str, float]()
        if what == "socket alone":
            seconds, cpu = self._socket(length, size), others.cpu
        elif what == "nixl write":
            self.pipe.send((what, length, self.transports["nixl"].memory()))
            seconds, cpu = self.pipe.recv(), others.cpu
        elif what == "nixl read":
            self.pipe.send((what, length, None))  # now the value is there
            self.pipe.recv()
            seconds = moved("READ", self.transports["nixl"], self.theirs, length // self.pool.page_size)
            cpu = others.cpu
        else:
            self.pipe.send((what, length, None))
            handle = self.pipe.recv()
            began = time.perf_counter()
            received = self.receivers[what].receive(handle).result()
            seconds = time.perf_counter() - began
            cpu = others.cpu
            self.pipe.send(("parts", 0, None))
            parts = self.pipe.recv() | self.parts.take()
            if checked:
                self._check(length, received.kv)
        return Turn(size / seconds, cpu, parts)

    def _socket(self, length: int, size: int) -> float:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.pipe.send(("socket alone", length, listener.getsockname()[1]))
            connection, _ = listener.accept()
            with connection:
                began, view = time.perf_counter(), self.buffer.data[:size]
                while len(view):
                    if not (count := connection.recv_into(view)):
                        raise Differs("the other process has closed its socket")
                    view = view[count:]
                return time.perf_counter() - began

    def _check(self, length: int, kv: KVCache) -> None:
        frames = [self.pool.frame(page) for page in kv.table[:, PAGE].tolist()]
        data = b"".join(bytes(view) for view in self.pool.memory.read_pages(frames))
        random = np.random.default_rng(length)
        sent = b"".join(random.bytes(self.pool.page_bytes) for _ in range(len(kv.table)))
        if data != sent:
            raise Differs("what arrived is not what was sent")

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join()
        for receiver in self.receivers.values():
            receiver.close()
        for transport in self.transports.values():
            transport.close()


def measure(
    model: str, page_size: int, lengths: list[int], rounds: int, kinds: list[str], parts: Parts
) -> dict[str, Any]:
    """All lengths of one kind of page, in turn."""
    here = Here(model, page_size, lengths, kinds, parts)
    ways = [*kinds, *(["nixl write", "nixl read"] if "nixl" in kinds else []), "socket alone"]
    cells: dict[str, Any] = {}
    try:
        for length in lengths:
            for way in ways:  # what is used for the first time is slow: connections, and memory of the sender
                here.turn(way, length, checked=True)
            turns: dict[str, list[Turn]] = {way: [] for way in ways}
            for _ in range(rounds):
                for way in ways:
                    turns[way].append(here.turn(way, length, checked=False))
            cells[str(length)] = {
                way: {"bytes_per_s": median(t.bytes_per_s for t in some), "turns": [asdict(t) for t in some]}
                for way, some in turns.items()
            }
    finally:
        here.close()
    return {"page_bytes": here.pool.page_bytes, "cells": cells}


def table(model: str, facts: dict[str, Any]) -> str:
    """A Markdown table: GB/s by page and length."""
    nixl = ("NIXL", "NIXL's WRITE alone", "", "NIXL's READ alone", "")
    rows: list[list[str]] = []
    for page_size, one in facts.items():
        for length, cell in one["cells"].items():
            rates = {way: some["bytes_per_s"] / 1e9 for way, some in cell.items()}
            shown: list[str] = []
            for ours, others in (("nixl", ("nixl write", "nixl read")), ("tcp", ("socket alone",))):
                shown.append(f"{rates[ours]:.2f}" if ours in rates else "")
                for alone in others:
                    shown += [f"{rates[alone]:.2f}", f"{rates[ours] / rates[alone]:.0%}"] if ours in rates else ["", ""]
            page = f"{page_size} entries, {one['page_bytes'] / 1024:,.0f} KiB"
            rows.append([page, f"{int(length):,}", *shown])
    return f"**{model}**, GB/s\n\n{markdown(['page', 'tokens', *nixl, 'TCP', 'socket alone', ''], rows)}"


def parts_table(facts: dict[str, Any]) -> str:
    """A Markdown table: where the time of the longest value goes, on both sides. Both work at once."""
    rows: list[list[str]] = []
    for page_size, one in facts.items():
        length, cell = list(one["cells"].items())[-1]
        for way in [way for way in cell if way in ("nixl", "tcp")]:
            turns = cell[way]["turns"]
            size = int(length) // int(page_size) * one["page_bytes"]
            times = [median(size / turn["bytes_per_s"] for turn in turns)]
            times += [median(turn["parts"][part] for turn in turns) for part in [*SENDER, *RECEIVER]]
            rows.append([f"{page_size} entries", way, f"{int(length):,}", *(f"{1e3 * one:.1f}" for one in times)])
    return markdown(["page", "over", "tokens", "whole, ms", *SENDER, *RECEIVER], rows, words=2)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--models", nargs="+", default=list(SHAPES), choices=list(SHAPES), help="whose shape of pages")
    parser.add_argument("--page-sizes", nargs="+", type=int, default=PAGE_SIZES, help="entries of a page")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="tokens")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    missing = unavailable(pool_of(arguments.models[0], 16, 1))
    parts = Parts(RECEIVER)
    kinds = ["tcp"] if missing else ["nixl", "tcp"]
    if missing:
        say(f"without NIXL: {missing}")
    for model in arguments.models:
        facts = {
            str(page_size): measure(model, page_size, arguments.lengths, arguments.rounds, kinds, parts)
            for page_size in arguments.page_sizes
        }
        save("wire", DEFINITIONS, model, {"pages": facts})
        cells = [cell for one in facts.values() for cell in one["cells"].values()]
        crowds = [turn["others_cpu"] for cell in cells for way in cell.values() for turn in way["turns"]]
        print("\n".join([table(model, facts), "", parts_table(facts), "", *doubt(crowds)]), flush=True)


if __name__ == "__main__":
    with ended_by(Differs):
        main()
