"""What lies between users and an engine: a server's HTTP, which takes time on the way in and on the way out."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HttpOverhead:
    """The way of a request to the engine, and of its tokens to its user."""

    request_s: float = 0.0  # seconds until the engine has a request, and back from its first token
    prompt_s: float = 0.0  # the same for each token of its prompt, also for those that the prefix index has
    # by how much tokens came late on their way to users, one after the other as measured; empty for not
    late_s: Sequence[float] = ()

    def request_delay(self, prompt: int) -> float:
        """Seconds from the arrival of a request with so many prompt tokens until the engine has it."""
        return self.request_s + prompt * self.prompt_s

    def delivery_times(self, number: int, made: Sequence[float]) -> list[float]:
        """When the user of call `number` has each of its tokens, from when they were made.

        They are late as a row of measured tokens was, from a place on that the number draws. None overtakes another.
        """
        if not self.late_s:
            return list(made)
        start = random.Random(number).randrange(len(self.late_s))
        late = [self.late_s[(start + i) % len(self.late_s)] for i in range(len(made))]
        return np.maximum.accumulate(np.array(made) + late).tolist()
