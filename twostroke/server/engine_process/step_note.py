"""Which requests the step under way computes, written where it outlives the process: only these can have ended it."""

import mmap
import os
from array import array
from collections.abc import Collection

from twostroke.system.anonymous_file import anonymous_file

MAX_NUMBERS = 4096  # requests; of a larger step, the first ones


class StepNote:
    """A page of shared memory: a count, and so many numbers of requests."""

    def __init__(self, file: int | None = None) -> None:
        """`file`: the descriptor of one that exists, which the other process has made."""
        self.file = anonymous_file("twostroke step") if file is None else file
        if file is None:
            os.ftruncate(self.file, 8 * (MAX_NUMBERS + 1))
        self._numbers = memoryview(mmap.mmap(self.file, 8 * (MAX_NUMBERS + 1))).cast("Q")

    def write(self, ids: Collection[int]) -> None:
        """Note who is in the step that begins; nobody, once it is over."""
        count = min(len(ids), MAX_NUMBERS)
        self._numbers[1 : count + 1] = array("Q", list(ids)[:count])
        self._numbers[0] = count

    def read(self) -> list[int]:
        """Who was in the last step that began, unless it is over."""
        return self._numbers[1 : self._numbers[0] + 1].tolist()
