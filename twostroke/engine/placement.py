"""Allocates pages for a step, and takes pages back when they run out.

Pages are taken in this order: free pages; unused prefix pages (least recently used first); prompts kept for choices
that have not started; the pages of the youngest choice, which is preempted and starts again later. The oldest choice
can take all others' pages, so at least one always makes progress and no request is dropped.

A choice that runs alone and still finds no page may wait for others: another thread may hold pages for a moment. It
stands back meanwhile, so that requests for which there is room go on. What has found none in `HOLD_S` has to end.

An answer for which the pool is too small even alone ends there, with "length". A caller learns from a token whether it
is the last, so while a page may be missing for what follows a token, the token is held back.
"""

import logging
from collections.abc import Callable, Iterable

from twostroke.backends.interface import PAGE
from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.lane import Lane, PrefillLane
from twostroke.engine.load_queue import LoadQueue
from twostroke.engine.model import Model
from twostroke.engine.queues import Queues
from twostroke.engine.request import PENDING, Choice
from twostroke.engine.runner import Chunk
from twostroke.errors import OutOfPages
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

MARGIN = 64  # free pages that a program's next strokes may take besides four times what its last one held
HOLD_S = 2.0  # seconds in which pages that others hold are expected back
RETRY_S = 0.01  # seconds until a choice that waits for them looks again


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
        loads: LoadQueue,
        clock: Clock = SYSTEM,
    ) -> None:
        """`keep` indexes what a choice has computed."""
        self._models, self._queues = list(models), queues
        self._keep, self._loads, self._clock = keep, loads, clock
        self._blocked = False  # whether a prefill waits for room
        self._scarce = False  # whether the next step enters no token that is not known
        self._look_until = 0.0  # until when a choice may wait for pages that others hold
        self.preemptions = 0
        for model in self._models:
            model.pool.reclaim = lambda count, pool=model.pool: self._evict(pool, count)

    def close(self) -> None:
        """Drop the prefix indexes, and let go of the pools: values may outlive the engine."""
        for model in self._models:
            if model.index is not None:
                model.index.clear()
            model.pool.reclaim = None

    def next_to_admit(self) -> Choice | None:
        """The choice to start now; None if there is none, or no room for it.

        A preempted choice starts again when the pages that it held fit. One that waits for others lets younger pass.
        """
        now, returning = self._clock(), self._returning
        for choice in self._queues.waiting:
            if choice.short_until and returning:  # it starts when they are there, not to find that they are not
                self._expect(choice, now)
            waits = now < choice.short_until
            if now >= choice.retry_at and (self._fits(choice) or not (waits or self._queues.active)):
                return choice
            if not waits:
                break
        return None

    def retry_after(self) -> float | None:
        """Seconds until pages that others hold may have come back; None if nobody waits for any."""
        return RETRY_S if self._clock() < self._look_until else None

    def cached_pages(self, pool: PagePool) -> int:
        """Number of the pool's pages that prefix indexes hold."""
        return sum(m.index.num_in_pool for m in self._models if m.index is not None and m.pool is pool)

    @property
    def evicted_pages(self) -> int:
        """Number of times that a page of a prefix index had to give up its frame."""
        return sum(model.index.evicted_pages for model in self._models if model.index is not None)

    def _fits(self, choice: Choice) -> bool:
        """Whether the pages that a choice held when it was preempted fit again, in each of its pools.

        Older choices that started again may not hold yet what they need. Without room for that too, this one would take
        the pages, and be preempted for them as before.
        """
        return all(self._could_hold(pool, pages + self._owed(pool, choice)) for pool, pages in choice.needs.items())

    def _owed(self, pool: PagePool, choice: Choice) -> int:
        """Number of pages that active choices older than this one need, since they were preempted, and do not hold."""
        older = [one for one in self._queues.active if one.order < choice.order and pool in one.needs]
        return sum(max(0, one.needs[pool] - _pages_held(one).get(pool, 0)) for one in older)

    def next_has_room(self, lane: DecodeLane) -> bool:
        """Whether what follows the lane's last token surely finds pages, at the latest when others are preempted."""
        pool = lane.model.pool
        if lane.result is None:
            return bool(pool.num_free) or not lane.todo or lane.writer.has_slot or self._could_hold(pool, 1)
        # A program decides what follows: strokes that continue the same value, or others of the same length.
        return pool.num_free + self.cached_pages(pool) >= 4 * len(lane.writer.table) + MARGIN

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
        blocked, (scarce, self._scarce) = False, (self._scarce, False)
        for lane, count in planned:
            if lane not in lane.choice.lanes:  # preempted by an earlier lane
                continue
            # A page that is copied in vain, since the token is the last, would not come back.
            if lane.has_placeholder and (scarce or not (lane.started or lane.writer.has_slot)):
                continue
            if not lane.started and not lane.decoding:
                # A prefill starts when all of it fits. While one waits, no later prefill starts: small prompts
                # that overtake a large one would starve it.
                blocked = blocked or not self._may_start(lane)
                if blocked:
                    continue
            while lane in lane.choice.lanes and lane.todo:  # until the lane is preempted
                count = min(count, len(lane.todo))
                left = len(lane.todo)
                rows = lane.logit_rows(count), lane.queries.wanted(count, left), lane.states.wanted(count, left)
                try:
                    self._refuse_if_hopeless(lane)
                    tokens, places = lane.enter(count)
                except OutOfPages as error:
                    if lane.has_placeholder:  # nobody gives up a page for a token that may be the last
                        break
                    if self._unshare() or self._preempt_youngest(lane, error):
                        continue
                    if isinstance(lane, DecodeLane) and lane.drop_guesses():
                        continue
                    if any(entry.tokens[-1] < 0 for entry in entries):  # whose pages may come back: try again then
                        self._scarce = True
                        break
                    if self._waits(lane.choice, error):
                        if isinstance(lane, PrefillLane):  # a decode needs so little that nobody could go on instead
                            self._stand_back(lane.choice, max(error.pages, lane.min_pages))
                        break
                    failed.append((lane, error.with_traceback(None)))  # frames of a traceback would keep pages
                    break
                entries.append(Chunk(lane, tokens, places, *rows))
                break
        self._blocked = blocked
        return [entry for entry in entries if entry.lane in entry.lane.choice.lanes], failed

    def preempt_for(self, choice: Choice, error: OutOfPages) -> bool:
        """Preempt a choice whose program ran out of pages, and the youngest choice.

        Returns False if it runs alone and has nothing to wait for.

        The number of pages that the program needs is not known. It is therefore doubled each time before the choice is
        admitted again; otherwise others could take the freed pages first, again and again. Beyond the size of the pool
        it runs alone.
        """
        active = self._queues.active
        if active == [choice]:
            if waits := self._waits(choice, error):
                self._stand_back(choice, error.pages)
            return waits
        room = {model.pool: 2 * choice.needs.get(model.pool, 1) for model in self._models}
        for one in dict.fromkeys((active[-1], choice)):  # in order: a set's order differs between runs
            self._preempt(one)
        choice.needs = {pool: max(choice.needs.get(pool, 0), pages) for pool, pages in room.items()}
        if self._returning:  # else it would start as soon as nobody runs, and ask again for what is not there
            self._expect(choice, self._clock())
        return True

    def _waits(self, choice: Choice, error: OutOfPages) -> bool:
        """Whether a choice that runs alone and found no pages waits for those that others hold."""
        now = self._clock()
        if self._returning:
            self._expect(choice, now)
        elif not error.pages or not self._may_find(choice, error.pages):
            return False
        choice.short_until = choice.short_until or now + HOLD_S
        self._look_until = max(self._look_until, choice.short_until)
        return now < choice.short_until

    @property
    def _returning(self) -> bool:
        """Whether there are pages that nobody wants, and that come back when nothing is under way to them."""
        return bool(self._loads.frames_returning) or any(model.pool.num_returning for model in self._models)

    def _expect(self, choice: Choice, now: float) -> None:
        """Let a choice wait for pages that come back, however long that takes."""
        choice.short_until = max(choice.short_until, now + RETRY_S)
        self._look_until = max(self._look_until, choice.short_until)

    def _may_find(self, choice: Choice, count: int) -> bool:
        """Whether pages are there by now, or are held by others: by values of a program, or of other threads."""
        own, in_use = _pages_held(choice), self._in_use()
        held = any(pages >= own.get(pool, 1) for pool, pages in in_use.items())
        return held or all(self._could_hold(pool, count) for pool in in_use)

    def _stand_back(self, choice: Choice, missing: int) -> None:
        """Preempt a choice until it finds the missing pages, or has waited long enough."""
        before = self._in_use()
        self._preempt(choice)
        others, now = self._in_use(), self._clock()
        own = {pool: max(0, before[pool] - others[pool]) for pool in before}  # also by values of its program
        choice.needs = {pool: min(pages + missing, pool.num_pages) for pool, pages in own.items()}
        choice.retry_at = now + RETRY_S
        if not any(others.values()):  # what it does not find now, it never will
            choice.short_until = choice.retry_at = now

    def _in_use(self) -> dict[PagePool, int]:
        """Number of each pool's pages that others than prefix indexes hold."""
        return {pool: pool.num_used - self._unused(pool) for pool in {model.pool for model in self._models}}

    def _refuse_if_hopeless(self, lane: Lane) -> None:
        """Raise OutOfPages for a prefill that runs alone and does not fit, before any of it is computed."""
        if not isinstance(lane, PrefillLane) or lane.started or len(self._queues.active) > 1:
            return
        pool = lane.model.pool
        if not self._could_hold(pool, lane.min_pages):
            raise OutOfPages(
                f"the prompt needs {lane.min_pages} more KV pages and {pool.num_free} of {pool.num_pages} are free: "
                f"drop values that are no longer used, or give the pool more memory (kv_bytes)",
                lane.min_pages,
            )

    def _preempt_youngest(self, lane: Lane, error: OutOfPages) -> bool:
        """Preempt the youngest choice, for a lane that found no pages. Returns False if one runs alone.

        If that is the lane's own, or if pages are expected back, it starts again when there is room for these pages
        too. Else it would start at once, where it or an older choice holds little and only waits for its value.
        """
        active, pool = self._queues.active, lane.model.pool
        if len(active) == 1:
            return False
        self._preempt(youngest := active[-1])
        if youngest is lane.choice or self._returning:
            youngest.needs[pool] = min(youngest.needs.get(pool, 0) + error.pages, pool.num_pages)
        return True

    def _may_start(self, lane: Lane) -> bool:
        pages = -(-len(lane.todo) // lane.model.pool.page_size) + 1
        return lane.choice is self._queues.running[0] or self._could_hold(lane.model.pool, pages)

    def _could_hold(self, pool: PagePool, pages: int) -> bool:
        """Whether so many pages are free, or will be once unused prefix pages are evicted.

        Pages are evicted when they are needed, a few in each step, since what goes to the host is copied.
        """
        missing = pages - pool.num_free
        if missing <= 0:
            return True
        indexes = [m.index for m in self._models if m.index is not None and m.pool is pool]
        if len(indexes) == 1:
            return indexes[0].can_evict(missing)
        return missing <= self._unused(pool)

    def _unused(self, pool: PagePool) -> int:
        """Number of the pool's pages that only prefix indexes hold."""
        return sum(m.index.num_evictable for m in self._models if m.index is not None and m.pool is pool)

    def _unshare(self) -> bool:
        """Drop prefills kept for choices that have not used them yet; those choices compute them again."""
        dropped = False
        for request in {choice.request for choice in [*self._queues.active, *self._queues.waiting]}:
            for key in [key for key, shared in request.shared_prefills.items() if shared.value is not PENDING]:
                del request.shared_prefills[key]
                dropped = True
        return dropped

    def _preempt(self, choice: Choice) -> None:
        log.info("preempting choice %d of request %d", choice.index, choice.request.arrival_order)
        self.preemptions += 1
        request = choice.request
        request.preemptions += 1
        choice.needs = self._room_to_start(choice)
        request.shared_prefills.clear()
        # Choices that wait for a prefill of this choice start again as well.
        waiters = [waiter for lane in choice.lanes for waiter in lane.waiters()]
        for other in request.choices:
            for lane in other.lanes:
                lane.remove_waiter(choice)
        for one in dict.fromkeys((choice, *waiters)):
            self._keep(one)
            one.release()
            self._queues.wait(one)

    def _room_to_start(self, choice: Choice) -> dict[PagePool, int]:
        """Pages that a choice needs to start again: those that it held, and room for what it waited for.

        The length of that is not known; it is taken for that of the prompt. Without room, it would ask for it at once,
        take the pages for which it was preempted, and be preempted again.
        """
        pages = _pages_held(choice)
        if choice.futures:
            for pool in {model.pool for model in self._models}:
                prompt = -(-choice.request.prompt_tokens // pool.page_size) + 1
                pages[pool] = min(max(pages.get(pool, 0), prompt), pool.num_pages)
        return pages

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
