"""How a request wants its tokens chosen."""

import math
import reprlib
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.sampling.constraint import ConstraintFactory


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, checked on construction (InvalidRequest names the field).

    Attributes:
        max_tokens: most tokens to generate; None for as many as the context allows.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens, and those as likely as the last of them; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p (Holtzman et al. 2020).
        min_p: keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024).
        repetition_penalty: divides (where positive) or multiplies logits of tokens in prompt and output
            (Keskar et al. 2019); 1 does nothing.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens in the output.
        logit_bias: added to the logits of these token ids.
        seed: the random stream is a function of seed, choice and token index alone; None draws a seed.
        stop: strings that end the text, which excludes them; they may straddle tokens.
        stop_token_ids: ids that end generation besides the model's own.
        min_tokens: nothing that comes with the first so many tokens ends generation: ending tokens are not sampled,
            and a stop string that is complete by then is text like any other.
        ignore_eos: the model's own end tokens do not end generation.
        logprobs: also return this many most likely alternatives of each token.
        n: how many choices to generate for a prompt; they share its pages.
        constraint: makes what restricts each choice's tokens (a grammar); its end ends the choice, min_tokens or not.
    """

    max_tokens: int | None = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1
    constraint: ConstraintFactory | None = None

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        self._require("max_tokens", self.max_tokens is None or _is_int(self.max_tokens, 1), "at least 1, or None")
        self._require("temperature", _is_real(self.temperature, 0), "0 or more")
        self._require("top_k", _is_int(self.top_k, 0), "0 (all) or more")
        self._require("top_p", _is_real(self.top_p, 0, 1) and self.top_p > 0, "above 0 and at most 1")
        self._require("min_p", _is_real(self.min_p, 0, 1), "from 0 to 1")
        self._require("repetition_penalty", _is_real(self.repetition_penalty, 1 / _LARGE), "above 0, and finite")
        self._require("presence_penalty", _is_real(self.presence_penalty), "a finite number")
        self._require("frequency_penalty", _is_real(self.frequency_penalty), "a finite number")
        fine = isinstance(self.logit_bias, Mapping) and all(
            _is_int(id, 0) and (_is_real(bias) or bias == -math.inf) for id, bias in self.logit_bias.items()
        )
        self._require("logit_bias", fine, "a mapping of token ids to numbers (which may be -inf)")
        self._require("seed", self.seed is None or _is_int(self.seed, -(1 << 63), 1 << 64), "a 64-bit integer, or None")
        fine = _is_collection(self.stop) and all(isinstance(stop, str) and stop for stop in self.stop)
        self._require("stop", fine, "strings that are not empty")
        fine = _is_collection(self.stop_token_ids) and all(_is_int(id, 0) for id in self.stop_token_ids)
        self._require("stop_token_ids", fine, "token ids")
        fine = _is_int(self.min_tokens, 0, math.inf if self.max_tokens is None else self.max_tokens)
        self._require("min_tokens", fine, "from 0 to max_tokens")
        self._require("ignore_eos", isinstance(self.ignore_eos, bool), "True or False")
        fine = self.logprobs is None or _is_int(self.logprobs, 0, 1000)
        self._require("logprobs", fine, "from 0 to 1000, or None")
        self._require("n", _is_int(self.n, 1, 1024), "from 1 to 1024")
        fine = self.constraint is None or callable(self.constraint)
        self._require("constraint", fine, "what makes a Constraint, or None")
        # What the caller passed may be changed later, or be of numpy's types.
        for name, kind in _KINDS.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, kind(value))

    def _require(self, name: str, fine: bool, wanted: str) -> None:
        if not fine:
            raise InvalidRequest(f"{name} must be {wanted}, not {_shown(getattr(self, name))}")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id in it is none of a model's."""
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if (id := max(ids, default=-1)) >= vocab_size:
                raise InvalidRequest(f"{name} must be ids below the vocabulary's size, {vocab_size}, not {id}")

    @property
    def simple(self) -> bool:
        """Whether a token is all that is asked for, and follows from the model's own logits and the temperature."""
        return self.logprobs is None and not self.shapes_logits and not self.filters

    @property
    def filters(self) -> bool:
        """Whether some of the tokens may not be drawn."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def shapes_logits(self) -> bool:
        """Whether anything but the model's own logits decides."""
        return bool(
            self.logit_bias
            or self.constraint is not None
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


# Beyond it, sums and products of float32 logits might overflow.
_LARGE = 1e30

_KINDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "n"), int),
    **dict.fromkeys(("temperature", "top_p", "min_p"), float),
    **dict.fromkeys(("repetition_penalty", "presence_penalty", "frequency_penalty"), float),
    **dict.fromkeys(("stop", "stop_token_ids"), tuple),
    "logit_bias": lambda biases: {int(id): float(bias) for id, bias in biases.items()},
}


def _is_int(value: object, low: float, high: float = math.inf) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and low <= int(value) <= high


def _is_real(value: Any, low: float = -_LARGE, high: float = _LARGE) -> bool:
    """A number in the range, so neither nan nor infinite."""
    if isinstance(value, bool) or not issubclass(type(value), Real):
        return False
    return bool(low <= value <= high)


def _is_collection(value: object) -> bool:
    return isinstance(value, list | tuple | Set)


def _shown(value: object) -> str:
    try:
        return reprlib.repr(value)
    except ValueError:  # thousands of digits
        return "so huge a number"
