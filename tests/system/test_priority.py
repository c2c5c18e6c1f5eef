"""A process that yields the processors, beside those of its session and of others."""

import os
import subprocess
import sys

import pytest

from twostroke.system.priority import AUTOGROUP

CODE = """
import os
from twostroke.system.priority import AUTOGROUP, yield_cpu
yield_cpu(7)
print(os.nice(0), AUTOGROUP.read_text().split()[-1] if AUTOGROUP.exists() else "none")
"""


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this system does not group processes by session")
def test_a_process_yields_within_its_session_and_with_it() -> None:
    """Of several that begin at once, all do: the system refuses wishes that come close together."""
    nicest = 19  # a process that is asked to be nicer stays there
    commands = [
        subprocess.Popen([sys.executable, "-c", CODE], stdout=subprocess.PIPE, text=True, start_new_session=True)
        for _ in range(3)
    ]
    assert [one.communicate()[0].split() for one in commands] == [[str(min(os.nice(0) + 7, nicest)), "7"]] * 3
