"""Log-probabilities as chat completions and responses write them."""

from typing import Any

from twostroke.engine.output import Token
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.answer import logprob


def entry(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    """A token with its log-probability, and the likeliest tokens in its place."""
    top = [_probability(tokenizer, id, value) for id, value in token.top_logprobs or ()]
    return {**_probability(tokenizer, token.id, token.logprob), "top_logprobs": top}


def _probability(tokenizer: Tokenizer, id: int, value: float | None) -> dict[str, Any]:
    data = list(tokenizer.token_bytes(id, skip_special=False))
    return {"token": tokenizer.token_text(id), "logprob": logprob(value), "bytes": data}
