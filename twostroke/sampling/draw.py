"""The draw of one token from a row of logits: its noise, what else it depends on, and the sampled token.

Sampling is by the Gumbel-max trick: a draw is an arg-max (Gumbel 1954; Maddison et al. 2014, "A* Sampling",
section 2).

If independent Gumbel noise is added to numbers x, the largest sum is at id i with probability softmax(x)[i]. So a draw
is the arg-max of logits / temperature + noise, and a search that finds an arg-max without all logits also finds a draw
without them. The noise depends only on a key and the id, and the key only on a seed and the token's index: the same
logits draw the same token, whatever else is computed. Similar logits mostly draw the same token, on which speculation
with matched guesses depends.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from twostroke.sampling.params import SamplingParams

COLDEST = 1e-7  # lower temperatures above 0 act like this one: logits of 1e30 divided by it still fit float32


@dataclass(frozen=True)
class Noise:
    """The noise of one row of logits."""

    gain: float = 1.0  # factor of the logits, 1 / temperature; 1 without noise
    key: int | None = None  # 64-bit key; None for no noise, which gives the most likely token

    @classmethod
    def of(cls, temperature: float, seed: bytes, index: int) -> "Noise":
        """The noise of the token with this index; `NO_NOISE` at temperature 0."""
        if temperature == 0:
            return NO_NOISE
        digest = hashlib.blake2b(index.to_bytes(8, "little"), key=seed, digest_size=8).digest()
        return cls(1 / max(temperature, COLDEST), int.from_bytes(digest, "little"))


NO_NOISE = Noise()


def gumbel(key: int, ids: np.ndarray) -> np.ndarray:
    """The noise of ids [n] int64: [n] float64. native/noise.h computes the same in single precision."""
    bits = mix_bits(mix_bits(ids.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)) ^ np.uint32(key >> 32))
    return -np.log(-np.log1p((bits + 0.5) * -(2.0**-32)))


def mix_bits(x: np.ndarray) -> np.ndarray:
    """A mixing permutation of 32-bit integers (constants: hash-prospector, found by TheIronBorn)."""
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x21F0AAAD)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x735A2D97)
    return x ^ (x >> np.uint32(15))


@dataclass(slots=True)  # not frozen: one is made for every token, and a frozen one takes four times as long
class Draw:
    """Everything that the draw from one row depends on, besides its logits."""

    params: SamplingParams  # the request's sampling parameters
    noise: Noise  # the row's Gumbel noise
    index: int  # index of the token in the choice
    # prompt, output: token ids so far, for penalties
    prompt: np.ndarray
    output: Sequence[int]
    banned: Sequence[int] = ()  # ids that must not be sampled before min_tokens (ending tokens)
    allowed: np.ndarray | None = None  # bool [n] mask of the allowed ids; ids >= n are not allowed. None allows all.
    stats: bool = False  # whether `Sampled` carries log-probability, entropy and top probability
    keep_logits: bool = False  # whether `Sampled` carries the row's logits

    @property
    def simple(self) -> bool:
        """Whether only a token is requested, and it depends only on the row's logits and the noise."""
        return self.params.simple and not self.stats and not self.keep_logits

    @property
    def reports(self) -> bool:
        """Whether the model's log-probabilities are requested."""
        return self.stats or self.params.logprobs is not None


@dataclass(frozen=True)
class Sampled:
    """A sampled token. Log-probabilities are the model's, in nats, before temperature and penalties."""

    id: int  # the token's id; NO_TOKEN (`sampling.statistics`) if the model computed NaN or infinity
    logprob: float | None = None  # log-probability of the token; None unless `logprobs` or `stats` was requested
    entropy: float | None = None  # entropy of the model's distribution, in bits; None without `stats`
    top_probability: float | None = None  # probability of its most likely token; None without `stats`
    # the most likely ids with their log-probabilities; None without `logprobs`
    top: tuple[tuple[int, float], ...] | None = None
    logits: np.ndarray | None = None  # a copy of the row, [vocab] float32; None without `keep_logits`
