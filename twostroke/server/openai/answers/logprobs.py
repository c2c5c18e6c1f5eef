"""Log-probabilities as chat completions and responses write them, and of prompts as vLLM writes them."""

from typing import Any

from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.answer import logprob


def entry(tokenizer: Tokenizer, token: Token) -> dict[str, Any]:
    """A token with its log-probability, and the likeliest tokens in its place."""
    top = [_probability(tokenizer, id, value) for id, value in token.top_logprobs or ()]
    return {**_probability(tokenizer, token.id, token.logprob), "top_logprobs": top}


def _probability(tokenizer: Tokenizer, id: int, value: float | None) -> dict[str, Any]:
    data = list(tokenizer.token_bytes(id, skip_special=False))
    return {"token": tokenizer.token_text(id), "logprob": logprob(value), "bytes": data}


def prompt_logprobs(request: Request, tokenizer: Tokenizer, count: int | None) -> dict[str, Any]:
    """The field, where it was asked for: for each token but the first, its own entry and those of the likeliest."""
    if count is None:
        return {}
    entries: list[dict[str, Any] | None] = []
    for score in request.prompt_scores or ():
        if score is None:
            entries.append(None)
            continue
        ranked = [(score.id, score.logprob, score.rank)]
        ranked += [(id, value, rank) for rank, (id, value) in enumerate(score.top[:count], 1) if id != score.id]
        entries.append(
            {
                str(id): {"logprob": logprob(value), "rank": rank, "decoded_token": tokenizer.token_text(id)}
                for id, value, rank in ranked
            }
        )
    return {"prompt_logprobs": entries}
