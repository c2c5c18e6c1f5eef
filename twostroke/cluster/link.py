"""How many of a retry's tokens belong to the answer.

If a worker dies, Dynamo's front end sends the request to another one, with the tokens generated so far behind the
prompt. It does not say where the prompt ends. But it does hand on one thing that the dead worker had sent with its
tokens: a pointer to that worker's span, for tracing. So a worker sends the prompt's length there, with a digest of the
prompt, by which the next worker knows that the pointer is one of these, and that it is this prompt's.

A trace viewer finds no span behind such a pointer.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from twostroke.errors import InvalidRequest


def link(prompt: Sequence[int]) -> dict[str, str]:
    """The pointer that is sent with the tokens of an answer to this prompt."""
    return {"trace_id": _digest(prompt), "span_id": f"{len(prompt):016x}"}


def prompt_length(tokens: Sequence[int], received: Mapping[str, Any] | None) -> int:
    """How many of a request's tokens are the prompt; the others are generated. All of them if there is no pointer.

    Raises InvalidRequest for a pointer of another kind of worker: the place of the next token is not known then.
    """
    if received is None:
        return len(tokens)
    try:
        length, digest = int(received["span_id"], 16), received["trace_id"]
    except (KeyError, TypeError, ValueError):
        length, digest = 0, ""
    if not 0 < length <= len(tokens) or _digest(tokens[:length]) != digest:
        raise InvalidRequest("this answer was begun by a worker that is not Twostroke's, so it cannot be continued")
    return length


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.blake2b(
        np.array(prompt, np.uint32).tobytes(), digest_size=16, person=b"twostroke-prompt"
    ).hexdigest()
