"""Names and contents of pages for tests: a page's bytes are a function of its key, so wrong bytes show at once."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

from twostroke.kv.tiers.names import Namespace, PageName, chain

NAMESPACE = Namespace("a model", "identity", "geometry", "layout", 4, 1000)


@dataclass(frozen=True)
class Prompt:
    """Some pages of one prompt."""

    namespace: Namespace
    names: list[PageName]

    @property
    def pages(self) -> list[memoryview]:
        """What is to be kept."""
        return [memoryview(content(self.namespace, name)) for name in self.names]

    def room(self) -> list[memoryview]:
        """Memory for the pages, which holds something else."""
        return [memoryview(bytearray(b"\xff" * self.namespace.page_bytes)) for _ in self.names]

    def __getitem__(self, part: slice) -> "Prompt":
        return Prompt(self.namespace, self.names[part])

    def __len__(self) -> int:
        return len(self.names)


def prompt(count: int, seed: int = 0, page_bytes: int = 1000, namespace: Namespace = NAMESPACE) -> Prompt:
    """A prompt of `count` pages."""
    one = replace(namespace, page_bytes=page_bytes)
    tokens = np.random.default_rng(seed).integers(0, 1000, count * one.page_size, dtype=np.int32)
    return Prompt(one, chain(one, tokens))


def content(namespace: Namespace, name: PageName) -> bytes:
    return hashlib.shake_128(namespace.digest + name.key).digest(namespace.page_bytes)
