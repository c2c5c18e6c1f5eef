"""Pins: who needs pages to stay in their frames."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class PageHolder(Protocol):
    """An open writer, or something else that needs its pages where they are. They may grow while it is pinned."""

    @property
    def pages(self) -> Sequence[int] | np.ndarray: ...


@dataclass(frozen=True, eq=False)
class Pin:
    """A holder for pages that are read for a while."""

    pages: np.ndarray


class Pins:
    """The holders whose pages stay in their frames. A holder that is gone pins nothing."""

    def __init__(self) -> None:
        self._holders: dict[int, weakref.ref[PageHolder]] = {}  # by id

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, holder: PageHolder) -> None:
        """Keep the holder's pages in their frames, until `remove`. The pool's lock must be held."""
        self._holders[id(holder)] = weakref.ref(holder)

    def remove(self, holder: PageHolder) -> None:
        """Let the holder's pages go. Atomic: finalizers call this, and must not wait."""
        self._holders.pop(id(holder), None)

    def pages(self) -> set[int]:
        """The pages that stay in their frames. The pool's lock must be held."""
        holders = [pin() for pin in list(self._holders.values())]
        return {page for one in holders if one is not None for page in np.asarray(one.pages).tolist()}
