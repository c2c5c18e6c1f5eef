"""How much ordinary memory prefix indexes may take."""

import threading

from twostroke.kv.tiers.counters import TierCounters


class HostBudget:
    """Bytes of ordinary memory that prefix indexes may take, all together."""

    def __init__(self, max_bytes: int = 0, traffic: TierCounters | None = None) -> None:
        self.max_bytes, self.used_bytes = max_bytes, 0
        self.traffic = traffic or TierCounters()
        self._lock = threading.Lock()

    def take(self, size: int) -> bool:
        """Take bytes, or return False if they are not left. A negative size gives bytes back."""
        with self._lock:
            if size > 0 and self.used_bytes + size > self.max_bytes:
                return False
            self.used_bytes += size
            return True
