"""A radix tree over pages. A node holds a run of pages; its children are keyed by the tokens of their first page."""

from collections.abc import Iterator

from twostroke.kv.common_prefix import common_prefix_length
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex


class RadixNode:
    """A run of pages; `keys[i]` are the tokens of `pages[i]`."""

    __slots__ = ("children", "keys", "pages", "parent")

    def __init__(self, parent: "RadixNode | None", keys: list[bytes], pages: list[int]) -> None:
        self.parent, self.keys, self.pages = parent, keys, pages
        self.children: dict[bytes, RadixNode] = {}

    def split(self, at: int) -> "RadixNode":
        """Keep the first `at` pages here; a new child, which is returned, takes the rest and all children."""
        below = RadixNode(self, self.keys[at:], self.pages[at:])
        below.children = self.children
        for child in below.children.values():
            child.parent = below
        self.keys, self.pages, self.children = self.keys[:at], self.pages[:at], {below.keys[0]: below}
        return below


class RadixIndex(PrefixIndex):
    """Prefix index as a radix tree."""

    def __init__(self, pool: PagePool, model: str) -> None:
        super().__init__(pool, model)
        self._root = RadixNode(None, [], [])
        self._nodes: dict[int, RadixNode] = {}  # of each page

    def _find(self, keys: list[bytes]) -> list[int]:
        node, done, pages = self._root, 0, list[int]()
        while done < len(keys) and (child := node.children.get(keys[done])) is not None:
            count = common_prefix_length(child.keys, keys[done:])
            pages += child.pages[:count]
            if count < len(child.keys):
                break
            node, done = child, done + count
        return pages

    def _add(self, keys: list[bytes], pages: list[int]) -> list[int]:
        node, done, known = self._root, 0, list[int]()
        while done < len(keys) and (child := node.children.get(keys[done])) is not None:
            count = common_prefix_length(child.keys, keys[done:])
            known += child.pages[:count]
            node, done = child, done + count
            if count < len(child.keys):
                if done < len(keys):  # the prompt leaves the run here
                    self._moved(child.split(count))
                break
        if done < len(keys):
            self._retain(pages[done:])
            node.children[keys[done]] = added = RadixNode(node, keys[done:], pages[done:])
            self._moved(added)
        return known + pages[done:]

    def _moved(self, node: RadixNode) -> None:
        self._nodes.update(dict.fromkeys(node.pages, node))

    def _is_leaf(self, page: int) -> bool:
        node = self._nodes[page]
        return not node.children and node.pages[-1] == page

    def _remove(self, page: int) -> list[int]:
        node = self._nodes[page]
        at = len(node.pages) - 1 if node.pages[-1] == page else node.pages.index(page)
        gone = node.pages[at:]
        for below in self._below(node):
            gone += below.pages
        if not at and node.parent is not None:
            del node.parent.children[node.keys[0]]
        node.children = {}
        del node.pages[at:], node.keys[at:]
        for one in gone:
            del self._nodes[one]
        return gone

    def _below(self, node: RadixNode) -> Iterator[RadixNode]:
        stack = list(node.children.values())
        while stack:
            one = stack.pop()
            stack.extend(one.children.values())
            yield one
