"""Tokens that a choice may not have: all but some ids, and the last tokens of words that it must not write."""

from collections.abc import Callable, Sequence

import numpy as np

from twostroke.errors import InvalidRequest
from twostroke.sampling.params import SamplingParams


class Exclusions:
    """What `allowed_token_ids` and `bad_words` exclude at each place of one choice."""

    def __init__(self, params: SamplingParams, encode: Callable[[str], list[int]]) -> None:
        """`encode` turns a word into ids, without BOS."""
        self._allowed = np.array(params.allowed_token_ids, np.int64)
        words = [ids for word in params.bad_words for ids in _spellings(word, encode)]
        self._never = np.array([ids[0] for ids in words if len(ids) == 1], np.int64)
        self._longer = [ids for ids in words if len(ids) > 1]

    def mask(self, ids: Sequence[int], vocab_size: int, grammar: np.ndarray | None) -> np.ndarray:
        """Bool [n] of what may follow `ids`; ids >= n may not. Raises InvalidRequest if nothing may.

        `grammar`: what else limits it.
        """
        allowed = np.full(vocab_size, not len(self._allowed))
        allowed[self._allowed[self._allowed < vocab_size]] = True
        allowed[self._never[self._never < vocab_size]] = False
        for *before, last in self._longer:
            if last < vocab_size and list(ids[max(0, len(ids) - len(before)) :]) == before:
                allowed[last] = False
        if grammar is not None:
            count = min(len(allowed), len(grammar))
            allowed = allowed[:count] & grammar[:count]
        if not allowed.any():
            raise InvalidRequest("allowed_token_ids, bad_words and the grammar leave no token: change one of them")
        return allowed


def _spellings(word: str, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """The ids of a word as it is, and with a space before it if it then has as many, as vLLM has it."""
    plain, spaced = encode(word.lstrip()), encode(f" {word.lstrip()}")
    return [ids for ids in (plain, spaced if len(spaced) == len(plain) and spaced[0] != plain[0] else []) if ids]
