"""Sampling parameters of a request. The command line and the server take each parameter from here.

This module does not import numpy, so that commands print their help quickly.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from twostroke.errors import InvalidRequest
from twostroke.fields import LARGE, Checked, Rule, declare, flag, integer, number

if TYPE_CHECKING:
    from twostroke.sampling.answer_reader import AnswerReaderFactory
    from twostroke.sampling.constraint import ConstraintFactory

_TOKEN_ID = Rule(int, least=0)
_BIAS = Rule(float, most=LARGE, test=lambda bias: bias >= -LARGE or bias == -math.inf)


@dataclass(frozen=True)
class SamplingParams(Checked):
    """Parameters of one request, checked on construction (InvalidRequest names the field).

    `constraint` makes a `Constraint` (a grammar) for each choice. Its end ends the choice, even before `min_tokens`.
    `reader` makes an `AnswerReader` for each choice, which tells where in its text stop strings do not apply.
    """

    max_tokens: int | None = integer(
        256,
        least=0,
        optional=True,
        help="Maximum number of tokens to generate; none for all that the context allows; 0 to score the prompt alone.",
    )
    temperature: float = number(
        0.0, least=0, help="0 takes the most likely token; otherwise logits are divided by it before one is drawn."
    )
    top_k: int = integer(0, least=0, help="Keep the k most likely tokens, and ties with the last of them; 0 keeps all.")
    top_p: float = number(
        1.0,
        above=0,
        most=1,
        help="Keep the smallest set of most likely tokens whose probability reaches p (Holtzman et al. 2020).",
    )
    min_p: float = number(
        0.0,
        least=0,
        most=1,
        help="Keep tokens at least min_p times as likely as the most likely one (Nguyen et al. 2024).",
    )
    repetition_penalty: float = declare(
        1.0,
        Rule(
            float,
            "Divides positive and multiplies negative logits of tokens in prompt and output (Keskar et al. 2019); "
            "1 does nothing.",
            least=1 / LARGE,
            most=LARGE,
            words="above 0, and finite",
        ),
    )
    presence_penalty: float = number(0.0, help="Subtracted once from the logit of each token in the output.")
    frequency_penalty: float = number(0.0, help="Subtracted from a token's logit for each time it is in the output.")
    logit_bias: Mapping[int, float] = declare(
        {},
        Rule(
            dict,
            "Added to the logits of these token ids.",
            keys=_TOKEN_ID,
            each=_BIAS,
            words="a mapping of token ids to numbers (which may be -inf)",
        ),
    )
    seed: int | None = declare(
        None,
        Rule(
            int,
            "Random numbers depend only on seed, choice and token index; without a seed, one is drawn.",
            least=-(1 << 63),
            most=(1 << 64) - 1,
            optional=True,
            words="a 64-bit integer",
        ),
    )
    stop: tuple[str, ...] = declare(
        (),
        Rule(
            tuple,
            "Strings that end the text and are not part of it; they may span several tokens.",
            each=Rule(str, least=1),
            words="strings that are not empty",
        ),
    )
    stop_token_ids: tuple[int, ...] = declare(
        (), Rule(tuple, "Ids that end generation, besides the model's own.", each=_TOKEN_ID, words="token ids")
    )
    include_stop_str_in_output: bool = flag(False, help="The stop string that ends the text is a part of it.")
    skip_special_tokens: bool = flag(True, help="Special tokens have no text.")
    allowed_token_ids: tuple[int, ...] = declare(
        (), Rule(tuple, "The only ids that may be sampled; none for all.", each=_TOKEN_ID, words="token ids")
    )
    bad_words: tuple[str, ...] = declare(
        (),
        Rule(
            tuple,
            "Words that are not written: the last token of one is not sampled behind its others.",
            each=Rule(str, least=1),
            words="strings that are not empty",
        ),
    )
    min_tokens: int = integer(
        0,
        least=0,
        help="Do not end before this many tokens: ending tokens are not sampled, and a stop string that is complete "
        "before is plain text.",
    )
    ignore_eos: bool = flag(False, help="The model's own end tokens do not end generation.")
    logprobs: int | None = integer(
        None, least=0, most=1000, help="Also give each token's log-probability, and this many most likely alternatives."
    )
    prompt_logprobs: int | None = integer(
        None,
        least=0,
        most=1000,
        help="Also give the log-probability of each token of the prompt, and this many most likely alternatives.",
    )
    n: int = integer(1, least=1, most=1024, help="How many choices to generate for a prompt; they share its pages.")
    constraint: "ConstraintFactory | None" = declare(
        None, Rule(object, optional=True, test=callable, words="what makes a Constraint")
    )
    reader: "AnswerReaderFactory | None" = declare(
        None, Rule(object, optional=True, test=callable, words="what makes an AnswerReader")
    )

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        super().__post_init__()
        self.require(
            "min_tokens", self.max_tokens is None or self.min_tokens <= self.max_tokens, "from 0 to max_tokens"
        )

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise InvalidRequest if a token id is outside the vocabulary."""
        for name in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if (id := max(ids, default=-1)) >= vocab_size:
                raise InvalidRequest(f"{name} must be ids below the vocabulary's size, {vocab_size}, not {id}")

    @cached_property  # asked for at every token
    def simple(self) -> bool:
        """Whether only a token is requested, and it depends only on the model's logits and the temperature."""
        return self.logprobs is None and not self.shapes_logits and not self.filters

    @cached_property  # asked for at every token
    def changed(self) -> frozenset[str]:
        """The names of the fields that differ from their defaults."""
        plain, names = type(self)(), [field.name for field in dataclasses.fields(self)]
        return frozenset(name for name in names if getattr(self, name) != getattr(plain, name))

    @cached_property
    def filters(self) -> bool:
        """Whether top_k, top_p or min_p exclude some tokens."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @cached_property
    def excludes(self) -> bool:
        """Whether some tokens may not be sampled (`sampling.exclusions`)."""
        return bool(self.allowed_token_ids or self.bad_words)

    @cached_property
    def shapes_logits(self) -> bool:
        """Whether biases, penalties, bans or a constraint change the model's logits."""
        return bool(
            self.logit_bias
            or self.constraint is not None
            or self.excludes
            or self.min_tokens
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
        )


def sampling_params(params: SamplingParams | None, fields: Mapping[str, Any]) -> SamplingParams:
    """`params`, or `SamplingParams` made of `fields`. Raises InvalidRequest for both, or for an unknown field."""
    if params is not None:
        if fields:
            raise InvalidRequest(f"give SamplingParams or its fields, not both ({', '.join(fields)})")
        return params
    try:
        return SamplingParams(**fields)
    except TypeError as error:
        raise InvalidRequest(str(error).removeprefix("SamplingParams.__init__() ")) from None
