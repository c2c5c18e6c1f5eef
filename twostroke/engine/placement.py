"""Placement finds slots for the tokens of a step, admits choices, and preempts them when pages run out.

Pages are taken in this order: free pages; unused prefix pages (least recently used first); prompts kept for choices
that have not started; the pages of the youngest choice, which is preempted and starts again later. The oldest choice
can take all others' pages, so at least one always makes progress and no request is dropped.

A preempted choice has a *reservation*: it starts again when there is room for the pages that it held, for those that
it asked for, and for what older choices have reserved and do not hold yet. So none starts only to be preempted again.
One that needs more than the pool has runs alone, where it ends.

A choice that runs alone and still finds no page has a *shortage*: others may hold pages for a moment. A prefill is
parked meanwhile, so that requests for which there is room go on. What has found none in `HOLD_S` has to end.
`choice_state.py` has the states and their transitions.

An answer for which the pool is too small even alone ends there, with "length". A caller learns from a token whether it
is the last, so while a page may be missing for what follows a token, the token is held back.
"""

import logging
from collections.abc import Callable, Iterable, Sequence

from twostroke.engine.choice_state import ACTIVE, PARKED, PREEMPTED
from twostroke.engine.clock import SYSTEM, Clock
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.lane import Lane
from twostroke.engine.lookup_lane import LookupLane
from twostroke.engine.page_budget import PageBudget, pages_held
from twostroke.engine.pending import PENDING
from twostroke.engine.prefill_lane import PrefillLane
from twostroke.engine.queues import Queues
from twostroke.engine.request import Choice
from twostroke.engine.scheduler import MIN_CHUNK, Plan
from twostroke.engine.shortages import RETRY_S, Shortages
from twostroke.engine.step import Chunk
from twostroke.errors import OutOfPages
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

MARGIN = 64  # free pages that a program's next strokes may take besides four times what its last one held


class Placement:
    """Allocates slots for the tokens of a step."""

    def __init__(
        self,
        budget: PageBudget,
        queues: Queues,
        index_computed: Callable[[Choice, Iterable[Lane], bool], None],
        clock: Clock = SYSTEM,
    ) -> None:
        """`index_computed`: see `ProgramRunner`."""
        self._budget, self._queues, self._index_computed, self._clock = budget, queues, index_computed, clock
        self.shortages = Shortages(budget, queues, clock)  # which choices wait for pages that others hold
        self._prefill_blocked = False  # whether a prefill of the last step waited for room
        self._without_placeholders = False  # whether the next step enters no token that is not known
        self.preemptions = 0  # number of times that a choice was preempted

    # Admission --------------------------------------------------------------------------------------------------

    def next_to_admit(self) -> Choice | None:
        """The choice to start now; None if there is none, or no room for it.

        A preempted choice starts again when its reservation fits, or when nothing else runs. A parked one does not
        start before it looks for pages again, and lets younger choices pass while it waits.
        """
        if not self._queues.waiting:
            return None
        now, returning = self._clock(), self._budget.pages_returning
        for choice in self._queues.waiting:
            shortage = choice.shortage
            if shortage is not None and returning:  # it starts when they are there, not to find that they are not
                self.shortages.extend(choice, now)
            waits = shortage is not None and now < shortage.until
            due = shortage is None or now >= shortage.retry_at
            if due and (self._reservation_fits(choice) or not (waits or self._queues.active)):
                return choice
            if not waits:
                break
        return None

    def _reservation_fits(self, choice: Choice) -> bool:
        """Whether what a preempted choice has reserved fits, in each of its pools.

        Older choices that started again may not hold yet what they reserved. Without room for that too, this one would
        take the pages, and be preempted for them as before.
        """
        return all(
            self._budget.could_hold(pool, pages + self._reserved_by_older(pool, choice))
            for pool, pages in choice.reserved.items()
        )

    def _reserved_by_older(self, pool: PagePool, choice: Choice) -> int:
        """Number of pages that active choices older than this one have reserved and do not hold."""
        older = [one for one in self._queues.active if one.order < choice.order and pool in one.reserved]
        return sum(max(0, one.reserved[pool] - pages_held(one).get(pool, 0)) for one in older)

    def may_load(self, choice: Choice, lane: Lane) -> bool:
        """Whether the pages that a lane waits for and the rest of its tokens fit, and no earlier prefill waits."""
        if choice is self._queues.active[0]:
            return True
        pool, missing = lane.model.pool, lane.missing
        absent = 0 if missing is None else len(missing.known.entry_table.pages)
        pages = absent + self._budget.pages_for(pool, len(lane.todo))
        return not self._prefill_blocked and self._budget.could_hold(pool, pages)

    # Slots of a step --------------------------------------------------------------------------------------------

    def place(self, planned: Plan) -> tuple[list[Chunk], list[tuple[Choice, Lane, OutOfPages]]]:
        """Enter the planned tokens. Returns the chunks to compute, and the lanes that ran out of pages alone."""
        chunks: list[Chunk] = []
        failed: list[tuple[Choice, Lane, OutOfPages]] = []
        blocked, (scarce, self._without_placeholders) = False, (self._without_placeholders, False)
        for choice, lane, count in planned:
            if lane not in choice.lanes:  # preempted by an earlier lane
                continue
            # A page that is copied in vain, since the token is the last, would not come back.
            if lane.has_placeholder and (scarce or not (lane.started or lane.writer.has_slot)):
                continue
            if not lane.started and not lane.decoding:
                # A prefill starts when all of it fits. While one waits, no later prefill starts: small prompts
                # that overtake a large one would starve it.
                blocked = blocked or not self._may_start(choice, lane)
                if blocked:
                    continue
            try:
                if (chunk := self._enter(choice, lane, count, chunks)) is not None:
                    chunks.append(chunk)
            except OutOfPages as error:
                failed.append((choice, lane, error.with_traceback(None)))
        self._prefill_blocked = blocked
        return [chunk for chunk in chunks if chunk.lane in chunk.choice.lanes], failed

    def _enter(self, choice: Choice, lane: Lane, count: int, chunks: Sequence[Chunk]) -> Chunk | None:
        """Enter a lane's next tokens, at most `count`, at the cost of younger choices; `chunks` are entered already.

        Returns None if the lane enters none in this step. Raises OutOfPages if it never will.
        """
        while lane in choice.lanes and lane.todo:  # until the lane is preempted
            count = min(count, len(lane.todo))
            rows = lane.logit_rows(count), *lane.kept_rows(count)
            try:
                if not lane.started and isinstance(lane, PrefillLane):
                    self._refuse_if_hopeless(lane)
                if lane.started and lane.writer.leaves_pages and isinstance(lane, PrefillLane):
                    self._index_computed(choice, [lane], False)
                return Chunk(choice, lane, *lane.enter(count), *rows)
            except OutOfPages as error:
                error.__traceback__ = None  # its frames hold values, whose pages would not come back
                if lane.has_placeholder:  # nobody gives up a page for a token that may be the last
                    return None
                if isinstance(lane, LookupLane) and lane.drop_guesses():  # nor for a guess that costs nothing
                    continue
                if count > MIN_CHUNK and lane.model.pool.geometry.windowed:
                    count //= 2  # the fewer at once, the fewer pages windowed layers need
                    continue
                if self._drop_shared_prefills() or self._preempt_youngest(choice, lane, error):
                    continue
                if isinstance(lane, DecodeLane) and lane.drop_guesses():
                    continue
                if isinstance(lane, DecodeLane) and count > 1:  # of known tokens only the last may lack a page
                    count = max(1, count - lane.model.pool.page_size)
                    continue
                if any(chunk.tokens[-1] < 0 for chunk in chunks):  # whose pages may come back: try again then
                    self._without_placeholders = True
                    return None
                if not self.shortages.waits(choice, error):
                    raise
                if isinstance(lane, PrefillLane):  # a decode needs so little that nobody could go on instead
                    self._park(choice, max(error.pages, lane.min_pages))
                return None
        return None

    def _may_start(self, choice: Choice, lane: Lane) -> bool:
        pool = lane.model.pool
        pages = self._budget.pages_for(pool, len(lane.todo))
        return choice is self._queues.running[0] or self._budget.could_hold(pool, pages)

    def _refuse_if_hopeless(self, lane: PrefillLane) -> None:
        """Raise OutOfPages for a prefill that runs alone and does not fit, before any of it is computed."""
        pool = lane.model.pool
        if len(self._queues.active) > 1 or self._budget.could_hold(pool, lane.min_pages):
            return
        if not pool.collect_garbage() or not self._budget.could_hold(pool, lane.min_pages):
            raise OutOfPages(
                f"the prompt needs {lane.min_pages} more KV pages and {pool.num_free} of {pool.num_pages} are free: "
                f"drop values that are no longer used, or give the pool more memory (kv_bytes)",
                lane.min_pages,
            )

    def next_has_room(self, lane: DecodeLane) -> bool:
        """Whether what follows the lane's last token surely finds pages, at the latest when others are preempted."""
        pool = lane.model.pool
        if lane.result is None:
            one = pool.pages_to_go_on
            room = pool.num_free >= one or not lane.todo or lane.writer.has_slot
            return room or self._budget.could_hold(pool, one)
        # A program decides what follows: strokes that continue the same value, or others of the same length.
        return pool.num_free + self._budget.cached_pages(pool) >= 4 * len(lane.writer.pages) + MARGIN

    # Preemption -------------------------------------------------------------------------------------------------

    def preempt_for(self, choice: Choice, error: OutOfPages) -> bool:
        """Preempt a choice whose program ran out of pages, and the youngest choice.

        Returns False if it runs alone and has nothing to wait for.

        The number of pages that the program needs is not known. It is therefore doubled each time before the choice is
        admitted again; otherwise others could take the freed pages first, again and again. Beyond the size of the pool
        it runs alone.
        """
        active = self._queues.active
        if active == [choice]:
            if waits := self.shortages.waits(choice, error):
                self._park(choice, error.pages)
            return waits
        doubled = {pool: 2 * choice.reserved.get(pool, 1) for pool in self._budget.pools}
        for one in (active[-1], choice):
            if one.state in ACTIVE:
                self.preempt(one)
        choice.reserved = {pool: max(choice.reserved.get(pool, 0), pages) for pool, pages in doubled.items()}
        if self._budget.pages_returning:  # else it would start as soon as nobody runs, and ask for what is not there
            self.shortages.extend(choice, self._clock())
        return True

    def _preempt_youngest(self, choice: Choice, lane: Lane, error: OutOfPages) -> bool:
        """Preempt the youngest choice, for a lane that found no pages. Returns False if one runs alone.

        If that is the lane's own, or if pages are expected back, it starts again when there is room for these pages
        too. Else it would start at once, where it or an older choice holds little and only waits for its value.
        """
        active, pool = self._queues.active, lane.model.pool
        if len(active) == 1:
            return False
        self.preempt(youngest := active[-1])
        if youngest is choice or self._budget.pages_returning:
            youngest.reserved[pool] = youngest.reserved.get(pool, 0) + error.pages
        return True

    def preempt(self, choice: Choice) -> None:
        """Take all pages of a choice that has started: it starts again when there is room for them."""
        log.info("preempting choice %d of request %d", choice.index, choice.request.arrival_order)
        self.preemptions += 1
        request = choice.request
        request.preemptions += 1
        reserved, before = self._room_to_start(choice), self._budget.in_use()
        request.shared_prefills.clear()
        # Choices that wait for a prefill of this choice start again as well.
        waiters = [waiter for shared in choice.sharing.values() for waiter, _ in shared.waiting]
        for other in request.choices:
            for shared in other.sharing.values():
                shared.waiting = [waiter for waiter in shared.waiting if waiter[0] is not choice]
        for one in dict.fromkeys((choice, *waiters)):
            self._index_computed(one, one.lanes, True)
            one.release()
            self._queues.move(one, PREEMPTED if one.shortage is None else PARKED)
        freed = {pool: before[pool] - pages for pool, pages in self._budget.in_use().items()}  # by its values too
        choice.reserved = reserved | {pool: n for pool, n in freed.items() if n > reserved.get(pool, 0)}

    def _room_to_start(self, choice: Choice) -> dict[PagePool, int]:
        """Pages that a choice needs to start again: those that it held, and room for what it waited for.

        The length of that is not known; it is taken for that of the prompt. Without room, it would ask for it at once,
        take the pages for which it was preempted, and be preempted again.
        """
        pages = pages_held(choice)
        if choice.futures:
            for pool in self._budget.pools:
                prompt = self._budget.pages_for(pool, choice.request.prompt_tokens)
                pages[pool] = min(max(pages.get(pool, 0), prompt), pool.num_pages)
        return pages

    def _drop_shared_prefills(self) -> bool:
        """Drop prefills kept for choices that have not used them yet; those choices compute them again."""
        dropped = False
        for request in {choice.request for choice in [*self._queues.active, *self._queues.waiting]}:
            shared_prefills = request.shared_prefills
            for key in [key for key, shared in shared_prefills.items() if shared.value is not PENDING]:
                del shared_prefills[key]
                dropped = True
        return dropped

    def _park(self, choice: Choice, missing: int) -> None:
        """Preempt a choice until it finds the missing pages, or has waited long enough."""
        before, shortage = self._budget.in_use(), choice.shortage
        assert shortage is not None
        self.preempt(choice)
        others, now = self._budget.in_use(), self._clock()
        own = {pool: max(0, before[pool] - others[pool]) for pool in before}  # also by values of its program
        choice.reserved = {pool: min(pages + missing, pool.num_pages) for pool, pages in own.items()}
        shortage.retry_at = now + RETRY_S
        if not any(others.values()):  # what it does not find now, it never will
            shortage.until = shortage.retry_at = now
