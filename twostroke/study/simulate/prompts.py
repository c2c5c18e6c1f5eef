"""Tokens of prompts whose pieces have names: the same name, the same tokens."""

from collections.abc import Iterable
from functools import lru_cache

import numpy as np

from twostroke.study.traffic.requests import PromptPiece


def prompt_tokens(pieces: Iterable[PromptPiece], vocab: int) -> np.ndarray:
    """[n] int64 ids below vocab - 1, which is the id of all answers. Read-only.

    An id is a hash of its piece's name and its place in it, so pieces of different names differ in every page.
    """
    return _tokens_of(tuple(pieces), vocab)


@lru_cache(maxsize=16)  # a router and a worker ask for the same, one soon after the other
def _tokens_of(pieces: tuple[PromptPiece, ...], vocab: int) -> np.ndarray:
    places = [np.uint64(one.name) << np.uint64(32) | np.arange(one.tokens, dtype=np.uint64) for one in pieces]
    tokens = (_mixed(np.concatenate(places)) % np.uint64(max(1, vocab - 1))).astype(np.int64)
    tokens.flags.writeable = False
    return tokens


def _mixed(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer (Steele et al. 2014), a mixing permutation of 64-bit integers."""
    x = (x + np.uint64(0x9E3779B97F4A7C15)) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
