"""Pages read by NIXL from one pool's memory straight into another's, page to page (github.com/ai-dynamo/nixl).

A pool is registered once. UCX chooses how bytes go: shared memory within a machine, RDMA or TCP between machines.

The receiver reads, as it knows where it has room, and what it has read is in its core's cache when it is checked. NIXL
cannot take back a read that is under way. So a receiver that turns away keeps the pages until it has ended.
"""

import base64
import importlib
import importlib.util
import logging
import os
import secrets
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from twostroke.backends.page_memory import HostMemory
from twostroke.cluster.wire.channel import WireError
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

PAUSE_US = 1000  # of NIXL's thread, while nothing moves
POLL_S = 5e-5  # seconds between looks at a read


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

    def __init__(self, pool: PagePool) -> None:
        """Register the pool, which is in the host's memory.

        UCX uses the loopback device alone, unless the environment names others in UCX_NET_DEVICES.

        Raises WireError: NIXL does not start.
        """
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        api = importlib.import_module(f"{_package()}._api")
        assert isinstance(pool.memory, HostMemory)
        self._agent_name = secrets.token_hex(8)
        self._base, self.page_bytes, self._count = pool.memory.address, pool.page_bytes, pool.num_pages
        self._lock = threading.Lock()
        self._peers: dict[str, NixlPeer] = {}
        try:
            strict = api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT  # threads of several transfers use the agent
            config = api.nixl_agent_config(backends=["UCX"], sync_mode=strict)
            self.agent: Any = _patient_agent(api, self._agent_name, config)
            whole = self.agent.get_reg_descs([(self._base, self.page_bytes * self._count, 0, "")], "DRAM")
            self._registered = self.agent.register_memory(whole)
            table = page_descriptors(self._base, self.page_bytes, self._count)
            self.pages = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", table, "DRAM")
        except Exception as error:  # of many kinds
            raise WireError(f"NIXL does not start: {error}") from None

    def memory(self) -> dict[str, Any]:
        about = base64.b64encode(self.agent.get_agent_metadata()).decode()
        return {"agent": self._agent_name, "about": about, "base": self._base, "pages": self._count}

    def reader(self, memory: dict[str, Any]) -> "NixlReader":
        return NixlReader(self, self._peer(memory))

    def _peer(self, memory: dict[str, Any]) -> "NixlPeer":
        with self._lock:
            if (peer := self._peers.get(memory["agent"])) is None:
                try:
                    name = self.agent.add_remote_agent(base64.b64decode(memory["about"]))
                    table = page_descriptors(memory["base"], self.page_bytes, memory["pages"])
                    peer = NixlPeer(name, self.agent.prep_xfer_dlist(name, table, "DRAM"))
                except Exception as error:
                    raise WireError(f"NIXL cannot reach the sender: {error}") from None
                self._peers[memory["agent"]] = peer
            return peer

    def forget(self, peer: "NixlPeer") -> None:
        """A peer from which reads fail: its process may have ended."""
        with self._lock:
            if self._peers.pop(peer.name, None) is not None:
                try:
                    peer.pages.release()
                    self.agent.remove_remote_agent(peer.name)
                except Exception as error:
                    log.info("NIXL does not let go of a peer: %s", error)

    def close(self) -> None:
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            self.forget(peer)
        self.pages.release()
        self.agent.deregister_memory(self._registered)
        del self.agent


class NixlPeer:
    """An agent of another pool, with all places for pages there."""

    def __init__(self, name: str, pages: Any) -> None:
        self.name, self.pages = name, pages


class NixlReader:
    """Reads from one peer."""

    def __init__(self, nixl: Nixl, peer: NixlPeer) -> None:
        self._nixl, self._peer = nixl, peer

    def begin(self, places: Sequence[int], frames: Sequence[int]) -> "NixlPendingRead":
        agent, ours, theirs = self._nixl.agent, np.array(frames, np.int32), np.array(places, np.int32)
        try:
            handle = agent.make_prepped_xfer("READ", self._nixl.pages, ours, self._peer.pages, theirs)
            return NixlPendingRead(self._nixl, self._peer, handle, agent.transfer(handle))
        except Exception as error:
            self._nixl.forget(self._peer)
            raise WireError(f"NIXL cannot read: {error}") from None


class NixlPendingRead:
    """A read that has begun. On one machine, its bytes are copied as it begins."""

    def __init__(self, nixl: Nixl, peer: NixlPeer, handle: Any, state: str) -> None:
        self._nixl, self._peer, self._handle, self._state = nixl, peer, handle, state

    def wait(self, limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while self._looked() == "PROC":
            if time.monotonic() >= until:
                return False
            time.sleep(POLL_S)
        if self._handle is not None:
            try:
                self._handle.release()
            except Exception as error:
                log.info("NIXL keeps the handle of a read that has ended: %s", error)
            self._handle = None
        if self._state != "DONE":
            self._nixl.forget(self._peer)
            raise WireError("NIXL could not read from the sender's memory: its process may have ended")
        return True

    def _looked(self) -> str:
        if self._state == "PROC":
            try:
                self._state = self._nixl.agent.check_xfer_state(self._handle)
            except Exception:  # the peer is gone
                self._state = "ERR"
        return self._state


def page_descriptors(base: int, size: int, count: int) -> np.ndarray:
    """The places of pages as NIXL describes them, [count, 3] uint64: address, bytes, device."""
    table = np.zeros((count, 3), np.uint64)
    table[:, 0], table[:, 1] = base + np.arange(count, dtype=np.uint64) * np.uint64(size), size
    return table
