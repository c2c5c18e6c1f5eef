"""How quickly a tier gives pages: measured latency and bandwidth."""

import threading

NEW = 0.3  # weight of a new measurement
HOPE = 1.2  # with each refusal it seems so many times quicker, so what was slow once is tried again
MAX_STUCK = 2


class TransferSpeed:
    """A moving average of what reads took, and of what is being read now."""

    def __init__(self, latency_s: float = 1e-3, bytes_per_s: float = 500e6) -> None:
        # latency_s: seconds until an answer begins; bytes_per_s: how quickly pages come after that
        self.latency_s, self.bytes_per_s = self._least_latency_s, self._most_bytes_per_s = latency_s, bytes_per_s
        # stuck: number of threads that were given up and have not returned from the tier
        self.stuck = self._pending = 0
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """Whether it is not asked, since it hangs."""
        return self.stuck >= MAX_STUCK

    def add_stuck(self, count: int) -> None:
        """Count a thread as stuck; a negative count says that it has returned."""
        with self._lock:
            self.stuck += count

    def seconds(self, size: int) -> float:
        """Predicted seconds to read `size` bytes now, behind the reads that are under way."""
        return self.latency_s + (self._pending + size) / self.bytes_per_s if size else 0.0

    def reserve(self, size: int) -> None:
        """Count bytes as under way; a negative size takes them back."""
        with self._lock:
            self._pending = max(0, self._pending + size)

    def answered(self, seconds: float) -> None:
        """Note how long a question without pages took."""
        with self._lock:
            self.latency_s += NEW * (seconds - self.latency_s)
            self._least_latency_s = min(self._least_latency_s, seconds)

    def read(self, size: int, seconds: float) -> None:
        """Note a read of `size` bytes."""
        if size:
            with self._lock:
                taken = size / max(seconds - self.latency_s, seconds / 4, 1e-6)
                self.bytes_per_s = 1 / ((1 - NEW) / self.bytes_per_s + NEW / taken)  # a mean of seconds for a byte
                self._most_bytes_per_s = max(self._most_bytes_per_s, taken)

    def not_worthwhile(self) -> None:
        """Note that nothing was read, since computing was predicted to be quicker. It was quicker than this at best."""
        with self._lock:
            self.latency_s = max(self.latency_s / HOPE, min(self.latency_s, self._least_latency_s))
            self.bytes_per_s = min(self.bytes_per_s * HOPE, max(self.bytes_per_s, self._most_bytes_per_s))
