"""Which pages leave a prefix index first where hits end at snapshots: what saves the fewest tokens for its bytes.

A snapshot saves the tokens since the snapshot before it, which would be computed again without it. Its price is these
tokens over the pages of the snapshot and of its tokens, as a block is of no use without a snapshot behind it. A use
adds the price to the credit of the last page that left: so what is used again stays, and what is not is driven out by
the credits of later uses, the cheap sooner (GreedyDual-Size, Cao and Irani 1997, section 4). Marconi (Pan et al. 2024,
arXiv:2411.19379) weighs recent use against saved operations in a similar way.
"""

from collections.abc import Collection, Iterable

from twostroke.kv.block_pages import BlockPages


class SnapshotPrices:
    """What indexed pages are worth. The pool's lock guards it."""

    def __init__(self, blocks: BlockPages, snapshot_pages: int) -> None:
        """`snapshot_pages`: pages of a snapshot; 0 of a model without: then nothing has a price."""
        self._blocks, self._snapshot_pages = blocks, snapshot_pages
        self.credits: dict[int, float] = {}  # by the first page of each kind of a block
        self._floor = 0.0  # credit of the last page that left

    def use(self, blocks: list[int]) -> None:
        """Note the use of a prompt's blocks, from its first on, and of the snapshot at their end.

        A block has at least the credit of all snapshots behind it, so it does not leave before them.
        """
        if not self._snapshot_pages:
            return
        prices = self._prices(blocks)
        best = 0.0
        for i in range(len(blocks) - 1, -1, -1):
            block = blocks[i]
            if i in prices:
                snapshot, price = self._blocks.snapshot(block)[0], prices[i]
                best = max(best, price)
                if i == len(blocks) - 1 or snapshot not in self.credits:
                    self.credits[snapshot] = self._floor + price
            self.credits[block] = max(self.credits.get(block, 0.0), self._floor + best)

    def cheapest_first(self, firsts: Collection[int]) -> Collection[int]:
        """Pages in the order in which they leave, of equal credit in the order given; without prices what was given."""
        if not self._snapshot_pages:
            return firsts
        return sorted(firsts, key=lambda first: self.credits.get(first, 0.0))

    def left(self, firsts: Iterable[int]) -> None:
        """Pages make room for others: later uses count from their credit on."""
        self._floor = max([self._floor, *(self.credits.get(first, 0.0) for first in firsts)])

    def forget(self, firsts: Iterable[int]) -> None:
        """Pages are not indexed any more."""
        for first in firsts:
            self.credits.pop(first, None)

    def _prices(self, blocks: list[int]) -> dict[int, float]:
        """Of the snapshots behind a prompt's blocks, by the number of the block: blocks saved for each page."""
        prices, last = dict[int, float](), -1
        for i, block in enumerate(blocks):
            if self._blocks.snapshot(block):
                saved = i - last
                prices[i] = saved / (self._snapshot_pages + saved * len(self._blocks.behind(block)))
                last = i
        return prices
