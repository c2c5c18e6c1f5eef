"""The interface of a tier that keeps pages by their keys.

A store is called from I/O threads, several at once, never from the thread that steps. No method raises for what the
outside does (a full disk, a server that hangs): canonical pages are then misses, counted in `counters`. Only private
pages, which nobody can compute again, raise `PageLost` or `OutOfPages`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from twostroke.kv.tiers.counters import TierCounters
from twostroke.kv.tiers.names import Namespace, PageName


class Store(Protocol):
    """Pages by key, each with a digest under the user's key that is checked at its destination.

    Attributes:
        used_bytes, most_bytes: what it takes and may take, for operators; None if it does not know. Never waits.
        answering: False while it is not asked, since it failed before (the circuit is open).
    """

    tier: str  # "disk" or "remote"; where: the directory or the URL (without a password), for messages
    where: str
    counters: TierCounters  # what went in and out, and what went wrong

    @property
    def used_bytes(self) -> int | None: ...

    @property
    def most_bytes(self) -> int | None: ...

    @property
    def answering(self) -> bool: ...

    def find(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        """How many leading pages are there, without reading them. A hint: they may be gone when they are read."""
        ...

    def find_any(self, namespace: Namespace, names: Sequence[PageName]) -> int:
        """The index of the first of these pages that is there, without reading it; their number if none is."""
        ...

    def read(self, namespace: Namespace, names: Sequence[PageName], into: Sequence[memoryview], limit_s: float) -> int:
        """Read pages into memory of `page_bytes` each. Returns how many leading ones are right.

        Views after those may hold anything. It returns soon after `limit_s` seconds with what is there by then.
        """
        ...

    def write(self, namespace: Namespace, names: Sequence[PageName], pages: Sequence[memoryview]) -> int:
        """Write pages that are not there yet. Returns how many of them are there now.

        `names` are consecutive pages of one prompt, or parts of one snapshot: a page goes in only if its parent is in,
        so that a prefix has no hole. The views must not change until it returns.
        """
        ...

    def touch(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        """Note that these pages were used, for the order of eviction."""
        ...

    def keep(self, namespace: Namespace, name: PageName, page: memoryview) -> None:
        """Write a private page. It stays until `discard`, or until this process has ended.

        Raises OutOfPages: there is no room, or the tier cannot be written to.
        """
        ...

    def fetch(self, namespace: Namespace, name: PageName, into: memoryview) -> None:
        """Read a private page. Raises PageLost: it is gone or damaged, or the tier does not answer."""
        ...

    def discard(self, namespace: Namespace, names: Sequence[PageName]) -> None:
        """Delete private pages."""
        ...

    def close(self) -> None:
        """Delete what is private and let go of everything. Calls that are under way end first."""
        ...


@dataclass(frozen=True)
class StoreUsage:
    """The pages of one model in a store that this user has written."""

    model: str  # its checkpoint's name
    pages: int  # pages of prompts; private: pages of values that some process holds
    private: int
    bytes: int  # what all of these take in the store
    damaged: int = 0  # pages that were not what they said, and were deleted; only a check finds them
    unchecked: int = 0  # pages that a check could not judge: they are under another key, or cannot be read
    left: int = 0  # pages that were to be deleted, and could not be
