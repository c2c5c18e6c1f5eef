"""The engine's source of time: the system's clock, or a virtual one in a simulation (`study/simulate`)."""

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds; never goes backwards
SYSTEM: Clock = time.perf_counter
