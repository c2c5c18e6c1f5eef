"""How much of the processors a process gets beside others."""

import os
import time
from pathlib import Path

AUTOGROUP = Path("/proc/self/autogroup")


def yield_cpu(niceness: int) -> None:
    """Let other processes go first.

    Linux groups processes by session and shares the processors among the groups (sched(7), autogroup). Niceness only
    counts within one, so the group of a process that has a session of its own is told too.
    """
    os.nice(niceness)
    for _ in range(10):
        try:
            AUTOGROUP.write_text(str(niceness))
        except BlockingIOError:  # the system takes one such wish every tenth of a second
            time.sleep(0.1)
        except OSError:  # there are no such groups
            return
        else:
            return
