"""Values on their way from prefill workers to decode workers, over a link that may lose them."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from twostroke.kv.cache import KVCache
from twostroke.study.simulate.fleet import Fleet
from twostroke.study.simulate.simulated_request import SimulatedRequest
from twostroke.study.simulate.virtual_time import EventQueue
from twostroke.study.simulate.worker import SimulatedWorker


@dataclass(eq=False)
class KvTransfer:
    """KV on its way from one worker to another."""

    call: SimulatedRequest
    source: SimulatedWorker
    target: SimulatedWorker
    kv: KVCache  # the sender's value, whose pages are its until the receiver has them
    # the receiver's value, of pages that nobody reads before all has come; None before it begins
    arriving: KVCache | None = None


class KvTransfers:
    """Transfers under way, and transfers that wait for room at their receivers."""

    def __init__(
        self,
        fleet: Fleet,
        events: EventQueue,
        happened: Counter[str],
        lost: Callable[[SimulatedRequest], None],
        dropped: Callable[[SimulatedWorker, SimulatedRequest], None],
    ) -> None:
        """`lost` is called when a value has not come for too long; `dropped` when a live receiver will not get one."""
        self._fleet, self._events, self._happened, self._lost, self._dropped = fleet, events, happened, lost, dropped
        self._luck = random.Random(f"luck {fleet.faults.seed}")
        self._inboxes: dict[SimulatedWorker, deque[KvTransfer]] = {}  # what has not begun
        self._transfers: dict[SimulatedRequest, KvTransfer] = {}
        self.moved_bytes = 0  # bytes of KV that arrived

    def join(self, worker: SimulatedWorker) -> None:
        """Add a worker that may receive."""
        self._inboxes[worker] = deque()

    def leave(self, worker: SimulatedWorker) -> list[SimulatedRequest]:
        """A worker dies. Returns the calls whose values it was sending or was to receive."""
        ended = [one for one in self._transfers.values() if worker in (one.source, one.target)]
        for transfer in ended:
            self._happened["death of a receiver" if worker is transfer.target else "death of a sender"] += 1
            self._forget(transfer)
        del self._inboxes[worker]
        return [transfer.call for transfer in ended]

    def held(self) -> list[KVCache]:
        """Values that transfers hold, on both sides."""
        return [kv for one in self._transfers.values() for kv in (one.kv, one.arriving) if kv is not None]

    def send(self, source: SimulatedWorker, target: SimulatedWorker, call: SimulatedRequest, kv: KVCache) -> None:
        """Send a prompt's KV to a worker, as soon as that has room."""
        self._transfers[call] = transfer = KvTransfer(call, source, target, kv)
        self._inboxes[target].append(transfer)
        self.pump(target)

    def pump(self, target: SimulatedWorker) -> None:
        """Begin the transfers that a worker has room for, in their order."""
        inbox = self._inboxes[target]
        while inbox and target.has_room(inbox[0].kv):
            transfer = inbox.popleft()
            transfer.arriving = transfer.kv.copy_to(target.pool)
            target.expected += 1
            self._begin(transfer)

    def _begin(self, transfer: KvTransfer) -> None:
        link, faults, now = self._fleet.link, self._fleet.faults, self._events.now
        assert link is not None
        size = self._fleet.setup.model.moved_bytes(len(transfer.kv))
        free_at = max(now, transfer.source.sends_until, transfer.target.receives_until) + size / link.rate
        transfer.source.sends_until = transfer.target.receives_until = free_at
        if faults.lost and now <= faults.until_s and self._luck.random() < faults.lost:
            self._happened["lost transfer"] += 1
            self._events.at(now + faults.patience_s, partial(self._lose, transfer))
        else:
            self._events.at(free_at + link.latency_s, partial(self._deliver, transfer, size))

    def _deliver(self, transfer: KvTransfer, size: int) -> None:
        """Complete a transfer: the receiver's pages may be read, and the sender's are free."""
        kv, target = transfer.arriving, transfer.target
        if kv is None:  # one of the workers died
            return
        self._forget(transfer, delivered=True)
        self.moved_bytes += size
        target.decode(transfer.call, [kv])

    def _lose(self, transfer: KvTransfer) -> None:
        """Give up a transfer that has not arrived in time."""
        if transfer.arriving is not None:
            self._forget(transfer)
            self._lost(transfer.call)

    def _forget(self, transfer: KvTransfer, delivered: bool = False) -> None:
        """Release the pages of a transfer on both sides."""
        target, call, began = transfer.target, transfer.call, transfer.arriving is not None
        del self._transfers[call]
        transfer.arriving = None
        del transfer.kv
        if began:
            target.expected -= 1
        else:
            self._inboxes[target].remove(transfer)
        if not delivered and target.alive:
            self._dropped(target, call)
