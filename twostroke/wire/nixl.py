"""Pages written by NIXL from one pool's memory straight into another's, page to page (github.com/ai-dynamo/nixl).

A pool is registered once. UCX chooses how bytes go: shared memory within a machine, RDMA or TCP between machines.

NIXL cannot take back a write that is under way. So a sender closes its channel only when all of its writes have ended,
and a receiver that turns away keeps the pages until then.
"""

import base64
import importlib
import importlib.util
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.backends.memory import HostMemory
from twostroke.kv.moves import Source
from twostroke.kv.pool import PagePool
from twostroke.wire import form
from twostroke.wire.channel import Channel, WireError
from twostroke.wire.tcp import TcpWriter
from twostroke.wire.transport import Digests, Grant

log = logging.getLogger(__name__)

PAUSE_US = 1000  # of NIXL's thread, while nothing moves
AT_ONCE = 2  # writes of one transfer that are under way
POLL_S = 5e-5  # seconds between looks at a write, or for a notification
SLOW_S = 30.0  # seconds after which a write that is under way is told in the log
MOST_TAGS = 10_000  # notifications kept for transfers that nobody waits for


def unavailable(pool: PagePool) -> str | None:
    """Why NIXL cannot be used for a pool; None if it can."""
    if _package() is None:
        return "NIXL is not installed (pip install --no-deps nixl-cu12)"
    return None if isinstance(pool.memory, HostMemory) else "the pool is not in the host's memory"


def _package() -> str | None:
    """The package of NIXL's Python API. The package `nixl` chooses one too, and imports torch for that."""
    return next((name for name in ("nixl_cu12", "nixl_cu13") if importlib.util.find_spec(name) is not None), None)


def _patient_agent(api: Any, name: str, config: Any) -> Any:
    """An agent whose progress thread pauses. NIXL's Python API has no parameter for it, and its thread takes a part of
    a core while nothing moves."""
    made = api.nixlBind.nixlAgent

    def patient(name: str, config: Any) -> Any:
        config.pthrDelay = PAUSE_US
        return made(name, config)

    api.nixlBind.nixlAgent = patient
    try:
        return api.nixl_agent(name, config)
    finally:
        api.nixlBind.nixlAgent = made


class Nixl:
    """One NIXL agent, for a pool."""

    name = "nixl"
    late = True

    def __init__(self, pool: PagePool, devices: str = "lo") -> None:
        """Register the pool.

        Args:
            pool: in the host's memory.
            devices: network devices for UCX, such as "lo" or "eth0", or "all"; what the environment says in
                UCX_NET_DEVICES comes first.

        Raises WireError: NIXL does not start.
        """
        os.environ.setdefault("UCX_NET_DEVICES", devices)
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        api = importlib.import_module(f"{_package()}._api")
        assert isinstance(pool.memory, HostMemory)
        self._agent_name = secrets.token_hex(8)
        self._base, self.page_bytes, self._count = pool.memory.address, pool.page_bytes, pool.num_pages
        self._lock = threading.Lock()
        self._tags: dict[bytes, None] = {}
        self._peers: dict[str, Peer] = {}
        try:
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # threads of several transfers use the agent
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=strict)
            self.agent: Any = _patient_agent(api, self._agent_name, config)
            whole = self.agent.get_reg_descs([(self._base, self.page_bytes * self._count, 0, "")], "DRAM")
            self._registered = self.agent.register_memory(whole)
            table = places(self._base, self.page_bytes, self._count)
            self.pages = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", table, "DRAM")
        except Exception as error:  # of many kinds
            raise WireError(f"NIXL does not start: {error}") from None

    def claim(self) -> dict[str, Any]:
        about = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"agent": self._agent_name, "about": about, "base": self._base, "frames": self._count}

    def places(self, frames: Sequence[int]) -> list[int]:
        return list(frames)

    def writer(self, claim: dict[str, Any], channel: Channel) -> "NixlWriter | TcpWriter":
        if "agent" not in claim:  # the other side has no NIXL
            return TcpWriter(channel)
        return NixlWriter(self, self._peer(claim), channel)

    def _peer(self, claim: dict[str, Any]) -> "Peer":
        with self._lock:
            if (peer := self._peers.get(claim["agent"])) is None:
                try:
                    name = self.agent.add_remote_agent(base64.b64decode(claim["about"]))
                    table = places(claim["base"], self.page_bytes, claim["frames"])
                    peer = Peer(name, self.agent.prep_xfer_dlist(name, table, "DRAM"))
                except Exception as error:
                    raise WireError(f"NIXL cannot reach the receiver: {error}") from None
                self._peers[claim["agent"]] = peer
            return peer

    def forget(self, peer: "Peer") -> None:
        """A peer to which writes fail: its process may have ended."""
        with self._lock:
            if self._peers.pop(peer.name, None) is not None:
                try:
                    peer.pages.release()
                    self.agent.remove_remote_agent(peer.name)
                except Exception as error:
                    log.info("NIXL does not let go of a peer: %s", error)

    def arrived(self, tag: str, limit_s: float) -> None:
        until, wanted = time.monotonic() + limit_s, tag.encode()
        while True:
            with self._lock:
                for messages in self.agent.get_new_notifs().values():
                    self._tags.update(dict.fromkeys(messages))
                while len(self._tags) > MOST_TAGS:
                    del self._tags[next(iter(self._tags))]
                if self._tags.pop(wanted, self) is not self:
                    return
            if time.monotonic() > until:
                if limit_s:
                    log.info("a notification of NIXL was lost; the pages are checked")
                return
            time.sleep(POLL_S)

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            self.forget(peer)
        self.pages.release()
        self.agent.deregister_memory(self._registered)
        del self.agent


class Peer:
    """An agent of another pool, with all places for pages there."""

    def __init__(self, name: str, pages: Any) -> None:
        self.name, self.pages = name, pages


@dataclass
class Written:
    """Pages that are being written: their numbers and digests, NIXL's handle, and the last state that was seen."""

    numbers: Sequence[int]
    digests: list[str]
    handle: Any
    state: str


class NixlWriter:
    """Writes pages of one transfer."""

    def __init__(self, nixl: Nixl, peer: Peer, channel: Channel) -> None:
        self._nixl, self._peer, self._channel = nixl, peer, channel
        self._inline = TcpWriter(channel)

    def write(self, numbers: Sequence[int], sources: Sequence[Source], grant: Grant, digests: Digests) -> None:
        here = [source.copy is None for source in sources]
        if not all(here):  # pages that lie in the host tier are not registered
            absent = [i for i, is_here in enumerate(here) if not is_here]
            self._inline.write([numbers[i] for i in absent], [sources[i] for i in absent], grant, digests)
        if not any(here):
            return
        present = [i for i, is_here in enumerate(here) if is_here]
        numbers, sources = [numbers[i] for i in present], [sources[i] for i in present]
        under_way: deque[Written] = deque()
        tag = f"{grant.generation}:{numbers[0]}:{secrets.token_hex(4)}"
        try:
            for some in form.pieces(len(sources), form.piece(sources)):
                made = digests(numbers[some])  # just before they are copied: then they are in a cache
                # For the last alone: each takes NIXL about 40 us, and wakes a thread there.
                notice = tag if some.stop >= len(sources) else ""
                under_way.append(self._begin(numbers[some], sources[some], grant, made, notice))
                while under_way and (len(under_way) == AT_ONCE or self._is_done(under_way[0])):
                    self._end(under_way, grant, tag)
            while under_way:
                self._end(under_way, grant, tag)
        finally:
            for written in under_way:
                self._ended(written)

    def _begin(
        self, numbers: Sequence[int], sources: Sequence[Source], grant: Grant, digests: list[str], notice: str
    ) -> "Written":
        agent = self._nixl.agent
        try:
            handle = agent.make_prepped_xfer(
                "WRITE",
                self._nixl.pages,
                np.array([source.frame for source in sources], np.int32),
                self._peer.pages,
                np.array([grant.places[number] for number in numbers], np.int32),
                notice.encode(),
            )
            return Written(numbers, digests, handle, agent.transfer(handle))
        except Exception as error:
            self._nixl.forget(self._peer)
            raise WireError(f"NIXL cannot write: {error}") from None

    def _end(self, under_way: "deque[Written]", grant: Grant, tag: str) -> None:
        """Wait for the oldest write, and tell of its pages."""
        state, written = self._ended(under_way[0]), under_way.popleft()
        if state != "DONE":
            self._nixl.forget(self._peer)
            raise WireError(f"NIXL could not write to {self._channel.peer}")
        about: dict[str, Any] = {"numbers": list(written.numbers), "digests": written.digests}
        self._channel.send("pages", **about, generation=grant.generation, inline=False, tag=tag)

    def _is_done(self, written: "Written") -> bool:
        """Look at a write once. On one machine, that is where its bytes are copied."""
        if written.state == "PROC":
            try:
                written.state = self._nixl.agent.check_xfer_state(written.handle)
            except Exception:  # the peer is gone
                written.state = "ERR"
        return written.state != "PROC"

    def _ended(self, written: "Written") -> str:
        """Wait until nothing of a write is under way any more."""
        told = time.monotonic() + SLOW_S
        while not self._is_done(written):
            time.sleep(POLL_S)
            if time.monotonic() > told:
                log.warning("a write of NIXL to %s is under way for long", self._channel.peer)
                told += SLOW_S
        try:
            written.handle.release()
        except Exception as error:
            log.info("NIXL keeps the handle of a failed write: %s", error)
        return written.state


def places(base: int, size: int, count: int) -> np.ndarray:
    """The places of pages as NIXL describes them, [count, 3] uint64: address, bytes, device."""
    table = np.zeros((count, 3), np.uint64)
    table[:, 0], table[:, 1] = base + np.arange(count, dtype=np.uint64) * np.uint64(size), size
    return table
