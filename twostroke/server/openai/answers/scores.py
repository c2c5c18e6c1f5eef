"""Log-probabilities of prompts, as vLLM writes them: `prompt_logprobs`."""

from typing import Any

from twostroke.engine.request import Request
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.server.answer import logprob


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
