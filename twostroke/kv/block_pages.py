"""The pages behind the blocks of a prefix index, in all groups of layers.

A *block* is the tokens of a page, with the pages that hold their entries in all groups of layers. The index knows a
block by its page of the first group. Pages of groups of one window come and go together. Of windowed groups, whose
entries only the tokens right behind them need, a block may have no pages any more: a hit ends where they are there.
Snapshots of states are like them: a hit ends behind a block that has one. Rows between snapshots are not indexed.
"""

from collections.abc import Collection, Iterator, Sequence

import numpy as np

from twostroke.kv.pool import PagePool
from twostroke.kv.spans import NO_PAGE


class BlockPages:
    """Which pages each block has. Those of each kind (groups of one window, snapshots) stand behind their first."""

    def __init__(self, pool: PagePool) -> None:
        groups = pool.geometry.kv_groups
        windows = {group.window: group.blocks_in_window(pool.page_size) for _, group in groups}
        self._kinds = [[g for g, group in groups if group.window == window] for window in windows]
        self._seen = list(windows.values())
        if pool.geometry.states:
            self._kinds.append([])
            self._seen.append(1)
        self._num_groups = pool.num_groups
        # Several groups: all pages of one kind of a block, by the first of them; the first windowed pages of each
        # block, by kind; and the block of windowed pages.
        self._sets: dict[int, list[int]] = {}
        self._windowed: dict[int, list[int]] = {}
        self._block_of: dict[int, int] = {}

    def add(self, block: int, pages: np.ndarray, snapshot: list[int], new: bool) -> tuple[list[int], list[int]]:
        """Know the pages of a block, [groups], and those of the snapshot behind it, as far as they are there.

        Of a block that is not `new` only windowed pages that it lacked are taken. Returns the first page of each
        windowed kind that came, and all pages that came besides `block`.
        """
        firsts, came = list[int](), list[int]()
        if new and len(self._kinds[0]) > 1:
            self._sets[block] = pages[self._kinds[0]].tolist()
            came += self._sets[block][1:]
        there = self._windowed.setdefault(block, [NO_PAGE] * (len(self._kinds) - 1)) if len(self._kinds) > 1 else []
        for k, first in enumerate(there):
            columns = self._kinds[k + 1]
            own: list[int] = pages[columns].tolist() if columns else snapshot
            if first == NO_PAGE and own and own[0] != NO_PAGE:
                there[k] = first = own[0]
                self._sets[first], self._block_of[first] = own, block
                firsts.append(first)
                came += own
        return firsts, came

    def snapshot(self, block: int) -> list[int]:
        """The pages of the snapshot behind a block; none if there is no snapshot."""
        return self._sets.get(self._windowed[block][-1], [])

    def of_block(self, block: int) -> list[int]:
        """The pages of all groups of a block; NO_PAGE for what windowed groups have given back."""
        if not self._sets:
            return [block]
        pages = [NO_PAGE] * self._num_groups
        for kind, first in zip(self._kinds, [block, *self._windowed.get(block, [])], strict=True):
            for group, page in zip(kind, self._sets.get(first, [first] * len(kind)) if kind else (), strict=True):
                pages[group] = page
        return pages

    def of_hit(self, blocks: list[int]) -> np.ndarray:
        """[n, groups] pages of a hit's blocks, of windowed groups those that the next token attends to."""
        pages = np.array([self.of_block(block) for block in blocks] if self._sets else blocks, np.int32)
        pages = pages.reshape(len(blocks), self._num_groups)
        for kind, seen in zip(self._kinds, self._seen, strict=True):
            pages[: max(0, len(blocks) - (len(blocks) if seen is None else seen)), kind] = NO_PAGE
        return pages

    def usable(self, blocks: list[int]) -> list[int]:
        """As many of a prompt's blocks that the windowed groups have all pages that the next token attends to."""
        if not self._windowed:
            return blocks
        usable = np.ones(len(blocks) + 1, bool)
        for k, seen in enumerate(self._seen[1:]):
            assert seen is not None
            there = np.array([self._windowed[block][k] != NO_PAGE for block in blocks], bool)
            number = np.arange(len(blocks) + 1)
            gaps = np.maximum.accumulate(np.where(there, 0, number[1:])) if blocks else number[1:]
            usable &= np.concatenate([[0], gaps]) <= np.maximum(0, number - seen)  # the last gap before each block
        return blocks[: int(np.flatnonzero(usable)[-1])]

    def used_by(self, blocks: list[int]) -> Iterator[int]:
        """The first pages of each kind that a hit of these blocks uses, the deepest first."""
        for i, block in enumerate(reversed(blocks)):
            yield block
            for k, first in enumerate(self._windowed.get(block, ()) if self._windowed else ()):
                if first != NO_PAGE and i < (self._seen[k + 1] or 0):
                    yield first

    def behind(self, first: int) -> Sequence[int]:
        """The pages that stand behind a first page of a kind, itself among them."""
        return self._sets.get(first, (first,))

    def behind_all(self, firsts: list[int]) -> list[int]:
        """The pages that stand behind each of these first pages."""
        return [page for first in firsts for page in self._sets.get(first, (first,))] if self._sets else firsts

    def count(self, firsts: Collection[int]) -> int:
        """The number of pages that stand behind these."""
        return sum(len(self._sets.get(first, (first,))) for first in firsts) if self._sets else len(firsts)

    def windowed(self, blocks: list[int]) -> list[int]:
        """The first pages of each windowed kind, and of snapshots, that these blocks have."""
        there = (self._windowed.get(block, ()) for block in blocks) if self._windowed else ()
        return [first for kinds in there for first in kinds if first != NO_PAGE]

    def is_windowed(self, first: int) -> bool:
        """Whether these are windowed pages or a snapshot, which leave without their block."""
        return first in self._block_of

    def part(self, first: int) -> list[int]:
        """Take windowed pages from their block."""
        there = self._windowed[self._block_of[first]]
        there[there.index(first)] = NO_PAGE
        return [first]

    def with_windowed(self, blocks: list[int]) -> list[int]:
        """These blocks, which leave the index, and the first pages of each windowed kind that leave with them."""
        leaving = [*blocks, *self.windowed(blocks)]
        for block in blocks:
            self._windowed.pop(block, None)
        return leaving

    def forget(self, first: int) -> int:
        """Forget what stands behind a first page, which its block does not have any more. Returns how many pages."""
        self._block_of.pop(first, None)
        return len(self._sets.pop(first, (first,)))
