"""Allocates pages for a step, and takes pages back when they run out.

Pages are taken in this order: free pages; unused prefix pages (least recently used first); prompts kept for choices
that have not started; the pages of the youngest choice, which is preempted and starts again later. The oldest choice
can take all others' pages, so at least one always makes progress and no request is dropped.

An answer for which the pool is too small even alone ends there, with "length". A caller learns from a token whether it
is the last, so while a page may be missing for what follows a token, the token is held back.
"""

import logging
from collections.abc import Callable, Iterable

from twostroke.backends.interface import PAGE
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.lane import Lane, PrefillLane
from twostroke.engine.loads import Loads
from twostroke.engine.model import Model
from twostroke.engine.queues import Queues
from twostroke.engine.request import WAITING_FOR, Choice
from twostroke.engine.runner import Chunk
from twostroke.errors import OutOfPages
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

MARGIN = 64  # free pages that a program's next strokes may take besides four times what its last one held


class Placement:
    """Allocates slots for the tokens of a step.

    Attributes:
        preemptions: number of times that a choice was preempted.
    """

    def __init__(
        self,
        models: Iterable[Model],
        queues: Queues,
        keep: Callable[[Choice], None],
        loads: Loads,
    ) -> None:
        """`keep` indexes what a choice has computed."""
        self._models, self._queues = list(models), queues
        self._keep, self._loads = keep, loads
        self._blocked = False  # whether a prefill waits for room
        self.preemptions = 0
        for model in self._models:
            model.pool.reclaim = lambda count, pool=model.pool: self._evict(pool, count)

    def close(self) -> None:
        """Let go of the pools: values may outlive the engine."""
        for model in self._models:
            model.pool.reclaim = None

    def fits(self, choice: Choice) -> bool:
        """Whether the pages that a choice held when it was preempted fit again, in each of its pools."""
        return all(self._could_hold(pool, pages) for pool, pages in choice.needs.items())

    def certain(self, lane: DecodeLane) -> bool:
        """Whether what follows the lane's last token surely finds pages, at the latest when others are preempted."""
        pool = lane.model.pool
        if lane.result is None:
            return bool(pool.num_free) or not lane.todo or lane.writer.has_slot or self._could_hold(pool, 1)
        # A program decides what follows: strokes that continue the same value, or others of the same length.
        cached = sum(
            model.index.num_in_pool for model in self._models if model.index is not None and model.pool is pool
        )
        return pool.num_free + cached >= 4 * len(lane.writer.table) + MARGIN

    def may_load(self, lane: Lane) -> bool:
        """Whether the pages that a lane waits for and the rest of its tokens fit, and no earlier prefill waits."""
        if lane.choice is self._queues.active[0]:
            return True
        pool, missing = lane.model.pool, lane.missing
        absent = 0 if missing is None else len(missing.known.table)
        return not self._blocked and self._could_hold(pool, absent + -(-len(lane.todo) // pool.page_size) + 1)

    def place(self, planned: list[tuple[Lane, int]]) -> tuple[list[Chunk], list[tuple[Lane, OutOfPages]]]:
        """Enter the planned tokens. Returns the chunks to compute, and the lanes that ran out of pages alone."""
        entries: list[Chunk] = []
        failed: list[tuple[Lane, OutOfPages]] = []
        blocked = False
        for lane, count in planned:
            if not lane.started and not lane.decoding:
                # A prefill starts when all of it fits. While one waits, no later prefill starts: small prompts
                # that overtake a large one would starve it.
                blocked = blocked or not self._may_start(lane)
                if blocked:
                    continue
            while lane in lane.choice.lanes and lane.todo:  # until the lane is preempted, here or by an earlier lane
                count = min(count, len(lane.todo))
                rows = lane.logit_rows(count), lane.queries.wanted(count, len(lane.todo))
                try:
                    self._refuse_if_hopeless(lane)
                    tokens, places = lane.enter(count)
                except OutOfPages as error:
                    if self._unshare() or self._preempt_youngest():
                        continue
                    if isinstance(lane, DecodeLane) and lane.drop_guesses():
                        continue
                    if self._loads.returning:  # the next step tries again
                        break
                    failed.append((lane, error.with_traceback(None)))  # frames of a traceback would keep pages
                    break
                entries.append(Chunk(lane, tokens, places, *rows))
                break
        self._blocked = blocked
        return [entry for entry in entries if entry.lane in entry.lane.choice.lanes], failed

    def make_way(self, choice: Choice) -> bool:
        """Preempt a choice whose program ran out of pages, and the youngest choice. Returns False if it runs alone.

        The number of pages that the program needs is not known. It is therefore doubled each time before the choice is
        admitted again; otherwise others could take the freed pages first, again and again.
        """
        active = self._queues.active
        if active == [choice]:
            return self._loads.returning and self._again(choice)
        room = {model.pool: 2 * choice.needs.get(model.pool, 1) for model in self._models}
        for one in {active[-1], choice}:
            self._preempt(one)
        choice.needs = {pool: max(choice.needs.get(pool, 0), pages) for pool, pages in room.items()}
        return True

    def _again(self, choice: Choice) -> bool:
        self._preempt(choice)
        return True

    def _refuse_if_hopeless(self, lane: Lane) -> None:
        """Raise OutOfPages for a prefill that runs alone and does not fit, before any of it is computed."""
        if not isinstance(lane, PrefillLane) or lane.started or len(self._queues.active) > 1:
            return
        pool = lane.model.pool
        if not self._could_hold(pool, lane.least_pages) and not self._loads.returning:
            raise OutOfPages(
                f"the prompt needs {lane.least_pages} more KV pages and {pool.num_free} of {pool.num_pages} are free: "
                f"drop values that are no longer used, or give the pool more memory (kv_bytes)"
            )

    def _preempt_youngest(self) -> bool:
        """Preempt the youngest choice, which may be the one that needs pages. Returns False if one runs alone."""
        active = self._queues.active
        if len(active) == 1:
            return False
        self._preempt(active[-1])
        return True

    def _may_start(self, lane: Lane) -> bool:
        pages = -(-len(lane.todo) // lane.model.pool.page_size) + 1
        return lane.choice is self._queues.running[0] or self._could_hold(lane.model.pool, pages)

    def _could_hold(self, pool: PagePool, pages: int) -> bool:
        """Whether so many pages are free, or will be once unused prefix pages are evicted.

        Pages are evicted when they are needed, a few in each step, since what goes to the host is copied.
        """
        free = pool.num_free
        if pages > free:
            free += sum(m.index.num_unused for m in self._models if m.index is not None and m.pool is pool)
        return pages <= free

    def _unshare(self) -> bool:
        """Drop prefills kept for choices that have not used them yet; those choices compute them again."""
        dropped = False
        for request in {choice.request for choice in [*self._queues.active, *self._queues.waiting]}:
            for key in [key for key, shared in request.shared.items() if shared.value is not WAITING_FOR]:
                del request.shared[key]
                dropped = True
        return dropped

    def _preempt(self, choice: Choice) -> None:
        log.info("preempting choice %d of request %d", choice.index, choice.request.arrival_order)
        self.preemptions += 1
        request = choice.request
        request.preemptions += 1
        choice.needs = _pages_held(choice)
        request.shared.clear()
        # Choices that wait for a prefill of this choice start again as well.
        waiters = {waiter for lane in choice.lanes for waiter in lane.waiters()}
        for other in request.choices:
            for lane in other.lanes:
                lane.forget(choice)
        for one in {choice, *waiters}:
            self._keep(one)
            one.release()
            self._queues.wait(one)

    def _evict(self, pool: PagePool, count: int) -> None:
        for model in self._models:
            if model.index is not None and model.pool is pool and count > 0:
                count -= model.index.evict(count)


def _pages_held(choice: Choice) -> dict[PagePool, int]:
    """Number of pages that the lanes of a choice hold in each pool, plus one to continue."""
    pages: dict[PagePool, set[int]] = {}
    for lane in choice.lanes:
        pages.setdefault(lane.model.pool, set()).update(lane.writer.table[:, PAGE].tolist())
    return {pool: len(held) + 1 for pool, held in pages.items()}
