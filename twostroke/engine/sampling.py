"""How a request wants its tokens chosen."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from twostroke.errors import InvalidRequest


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request, checked on construction (InvalidRequest names the field).

    Attributes:
        max_tokens: most tokens to generate; None for as many as the context allows.
        temperature: 0 takes the most likely token; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose probability reaches p (Holtzman et al. 2020).
        min_p: keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024).
        repetition_penalty: divides (where positive) or multiplies logits of tokens in prompt and output
            (Keskar et al. 2019); 1 does nothing.
        presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens in the output.
        logit_bias: added to the logits of these token ids.
        seed: the random stream is a function of seed, choice and token index alone; None draws a seed.
        stop: strings that end the text, which excludes them; they may straddle tokens.
        stop_token_ids: ids that end generation besides the model's own.
        min_tokens: before so many tokens nothing ends generation, and ending tokens are not sampled.
        ignore_eos: the model's own end tokens do not end generation.
        logprobs: also return this many most likely alternatives of each token.
        n: how many choices to generate for a prompt; they share its pages.
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

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        checks = {
            "max_tokens": (self.max_tokens is None or self.max_tokens >= 1, "at least 1, or None"),
            "temperature": (math.isfinite(self.temperature) and self.temperature >= 0, "0 or more"),
            "top_k": (self.top_k >= 0, "0 (all) or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "from 0 to 1"),
            "repetition_penalty": (math.isfinite(self.repetition_penalty) and self.repetition_penalty > 0, "above 0"),
            "presence_penalty": (math.isfinite(self.presence_penalty), "a finite number"),
            "frequency_penalty": (math.isfinite(self.frequency_penalty), "a finite number"),
            "logit_bias": (not any(math.isnan(bias) for bias in self.logit_bias.values()), "numbers"),
            "stop": (all(isinstance(s, str) and s for s in self.stop), "strings that are not empty"),
            "min_tokens": (0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "from 0 to max_tokens"),
            "logprobs": (self.logprobs is None or 0 <= self.logprobs <= 1000, "from 0 to 1000, or None"),
            "n": (1 <= self.n <= 1024, "from 1 to 1024"),
        }
        for name, (fine, wanted) in checks.items():
            if not fine:
                raise InvalidRequest(f"{name} must be {wanted}, not {getattr(self, name)!r}")

    @property
    def shapes_logits(self) -> bool:
        """Whether anything but the model's own logits decides."""
        return bool(
            self.logit_bias
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )
