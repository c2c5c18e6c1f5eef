"""Tokens as Dynamo's front end takes them: chunks with ids, text and log-probabilities.

The text is the track's, so the front end decodes nothing. Stop strings, and characters that span tokens, are then right
also where a worker has died between their tokens: the track of the next worker knows what was held back.
"""

from collections.abc import Mapping
from typing import Any

from twostroke.engine.output import Token
from twostroke.models.checkpoints.tokenizer import Tokenizer


def chunk(token: Token, tokenizer: Tokenizer, pointer: Mapping[str, str]) -> dict[str, Any]:
    """The chunk of one token; `link` is the answer's pointer (`migration.py`)."""
    made: dict[str, Any] = {
        "token_ids": [token.id],
        "tokens": [tokenizer.token_text(token.id)],
        "text": token.text,
        "index": token.choice,
        "worker_trace_link": dict(pointer),
    }
    if token.top_logprobs is not None:
        made["log_probs"] = [token.logprob]
        made["top_logprobs"] = [
            [
                {"rank": rank, "token_id": id, "token": tokenizer.token_text(id), "logprob": logprob}
                for rank, (id, logprob) in enumerate(token.top_logprobs, 1)
            ]
        ]
    if token.finish_reason is not None:
        made["finish_reason"] = token.finish_reason
        if token.stop is not None:
            made["stop_reason"] = token.stop
    return made


def final_chunk(reason: str) -> dict[str, Any]:
    """The last chunk of an answer whose last token was delivered before."""
    return {"token_ids": [], "index": 0, "finish_reason": reason}


def usage(prompt: int, generated: int, cached: int) -> dict[str, Any]:
    """What the last chunk says of an answer's length, in tokens. `cached`: those of the prompt that were found."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": min(prompt, cached)},
    }
