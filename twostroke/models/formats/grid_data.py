"""The grids of IQ1, IQ2 and IQ3 (ggml-common.h of llama.cpp): an entry is the magnitudes of 8 or 4 elements."""

from functools import cache
from importlib.resources import files

import numpy as np


@cache
def grid(name: str) -> np.ndarray:
    """The grid of a format: [entries, elements] int8."""
    with (files("twostroke.models.formats") / "grids.npz").open("rb") as stream, np.load(stream) as grids:
        return grids[name]
