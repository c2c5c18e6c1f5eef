"""A radix tree over pages: each is found by the page before it, and by its own key."""

from collections.abc import Sequence

ROOT = -1  # stands before the first page of a prompt


class PageTree:
    """Pages by their prefixes; after SGLang's RadixAttention (Zheng et al. 2024), with one page in a node."""

    def __init__(self) -> None:
        self._after: dict[int, dict[bytes, int]] = {}  # of each page that others follow, these by their keys
        self._place: dict[int, tuple[int, bytes]] = {}  # of each page, the page before it and its key

    def find(self, keys: Sequence[bytes]) -> list[int]:
        """The pages along `keys`, from the first on, as far as they are known."""
        page, pages = ROOT, list[int]()
        for key in keys:
            after = self._after.get(page)
            if after is None or (found := after.get(key)) is None:
                break
            pages.append(page := found)
        return pages

    def add(self, keys: Sequence[bytes], pages: Sequence[int]) -> tuple[list[int], list[int]]:
        """Know pages by their keys, if there is none yet. Returns (the pages along `keys`, those that are new)."""
        known = self.find(keys)
        new, before = list(pages[len(known) :]), known[-1] if known else ROOT
        for key, page in zip(keys[len(known) :], new, strict=True):
            self._after.setdefault(before, {})[key] = page
            self._place[page] = before, key
            before = page
        return known + new, new

    def is_leaf(self, page: int) -> bool:
        """Whether no page comes after this one."""
        return page not in self._after

    def remove(self, page: int) -> list[int]:
        """Forget a page and all after it, and return them."""
        before, key = self._place[page]
        del self._after[before][key]
        if not self._after[before]:
            del self._after[before]
        gone = [page]
        for one in gone:
            del self._place[one]
            gone += self._after.pop(one, {}).values()
        return gone
