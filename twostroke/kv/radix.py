"""A radix tree over pages. A node holds a run of pages; its children are keyed by the tokens of their first page."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from twostroke.kv.pool import PagePool
from twostroke.kv.prefix import PrefixIndex


class Node:
    """A run of pages; `keys[i]` are the tokens of `pages[i]`."""

    __slots__ = ("children", "keys", "last_used", "pages", "parent")

    def __init__(self, parent: Node | None, keys: list[bytes], pages: list[int], last_used: int) -> None:
        self.parent, self.keys, self.pages, self.last_used = parent, keys, pages, last_used
        self.children: dict[bytes, Node] = {}

    def split(self, at: int) -> None:
        """Keep the first `at` pages here; a new child takes the rest and all children."""
        below = Node(self, self.keys[at:], self.pages[at:], self.last_used)
        below.children = self.children
        for child in below.children.values():
            child.parent = below
        self.keys, self.pages, self.children = self.keys[:at], self.pages[:at], {below.keys[0]: below}

    def common(self, keys: list[bytes], start: int) -> int:
        """Number of this node's leading pages that agree with keys[start:]."""
        count = 0
        for mine, theirs in zip(self.keys, keys[start:], strict=False):
            if mine != theirs:
                break
            count += 1
        return count


class RadixIndex(PrefixIndex):
    """Prefix index as a radix tree."""

    def __init__(self, pool: PagePool, model: str) -> None:
        super().__init__(pool, model)
        self._root = Node(None, [], [], 0)

    def _find(self, keys: list[bytes]) -> list[int]:
        return [page for node in self._walk(keys) for page in node.pages]

    def _walk(self, keys: list[bytes]) -> Iterator[Node]:
        """The nodes along `keys`. A node that agrees only in part is split, so that the rest is not marked as used."""
        node, done = self._root, 0
        while done < len(keys) and (child := node.children.get(keys[done])) is not None:
            count = child.common(keys, done)
            if count < len(child.keys):
                child.split(count)
            child.last_used = self._clock
            yield child
            node, done = child, done + count

    def _add(self, keys: list[bytes], pages: list[int]) -> None:
        node, done = self._root, 0
        for child in self._walk(keys):
            node, done = child, done + len(child.keys)
        if done < len(keys):
            self._hold(pages[done:])
            node.children[keys[done]] = Node(node, keys[done:], pages[done:], self._clock)

    def _evict(self, count: int, in_use: bool) -> int:
        def goes(leaf: Node) -> bool:
            return in_use or self.pool.frees(leaf.pages[-1])

        freed = 0
        leaves = [(leaf.last_used, id(leaf), leaf) for leaf in self._leaves() if goes(leaf)]
        heapq.heapify(leaves)
        while freed < count and leaves:
            *_, leaf = heapq.heappop(leaves)
            first = leaf.keys[0]
            while freed < count and leaf.pages and goes(leaf):
                freed += self._drop(leaf.pages.pop())
                leaf.keys.pop()
            if not leaf.pages and (parent := leaf.parent) is not None:
                del parent.children[first]
                if parent is not self._root and not parent.children:
                    heapq.heappush(leaves, (parent.last_used, id(parent), parent))
        return freed

    def _leaves(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            if node.children:
                stack.extend(node.children.values())
            else:
                yield node
