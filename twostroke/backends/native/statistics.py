"""Statistics of logits in the native backend: sampling/statistics.py on the threads of a team."""

import struct
from collections.abc import Sequence

import numpy as np

from twostroke.backends.native.library import ThreadTeam
from twostroke.backends.native.weights import floats
from twostroke.sampling.draw import Noise
from twostroke.sampling.statistics import RowStatistics, combine, new_summaries
from twostroke.system.scratch import ScratchMemory, address

_NOISE = struct.Struct("=fIQ")


class NativeStatistics:
    """Implements `sampling.statistics.Statistics`. Calls on one team are serialized."""

    def __init__(self, team: ThreadTeam) -> None:
        self.team, self.library, self.scratch = team, team.library, ScratchMemory()

    def summarize(self, logits: np.ndarray) -> RowStatistics:
        logits = floats(logits)
        rows, count = logits.shape
        out = new_summaries(rows)
        self.library.twostroke_summarize(self.team.handle, address(logits), rows, count, address(out))
        return combine(out)

    def draw(self, logits: np.ndarray, noises: Sequence[Noise]) -> list[int]:
        logits = floats(logits)
        rows, count = logits.shape
        ids = np.empty(rows, np.int32)
        self.library.twostroke_draw(self.team.handle, address(logits), rows, count, packed_noises(noises), address(ids))
        return ids.tolist()

    def weigh(self, logits: np.ndarray, tops: Sequence[float], gains: Sequence[float]) -> list[float]:
        logits = floats(logits)
        rows, count = logits.shape
        arrays = np.array(tops, np.float32), np.array(gains, np.float32), np.empty(rows)
        places = (address(array) for array in arrays)
        self.library.twostroke_weigh(self.team.handle, address(logits), rows, count, *places)
        return arrays[-1].tolist()

    def likeliest(self, logits: np.ndarray, counts: Sequence[int], floors: Sequence[float]) -> list[np.ndarray]:
        logits = floats(logits)
        rows, count = logits.shape
        ids, found = self.scratch.array(rows, count).view(np.int32), np.empty(rows, np.int32)
        arrays = logits, np.array(counts, np.int32), np.array(floors, np.float32), ids, found
        places = [address(array) for array in arrays]
        self.library.twostroke_likeliest(self.team.handle, places[0], rows, count, *places[1:])
        return [row[:some].astype(np.int64) for row, some in zip(ids, found.tolist(), strict=True)]


def packed_noises(noises: Sequence[Noise]) -> bytes:
    """Noises in the layout of native/noise.h."""
    return b"".join([_NOISE.pack(noise.gain, noise.key is not None, noise.key or 0) for noise in noises])
