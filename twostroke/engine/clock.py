"""Where the engine reads time.

An engine has one clock. It is the system's, unless a simulation puts a virtual one in its place (`simulation`).
"""

import time
from collections.abc import Callable

Clock = Callable[[], float]  # seconds; never goes backwards
SYSTEM: Clock = time.perf_counter
