"""Where an answer began, told from a worker that dies to the one that takes over.

Dynamo's front end sends a request whose worker has died to another worker, with the tokens generated so far behind the
prompt, and the most tokens of the answer lowered by their number. It does not say where the prompt ends. But it does
hand on one thing that the dead worker had sent with its tokens: a pointer to that worker's span, for tracing. So a
worker sends what else there is to know: the prompt's length, a digest of the prompt, by which the next worker knows
that the pointer is one of these and that it is this prompt's, the request's limits as they were stated, and the
identity of its models, since another's tokens would be others.

    trace_id    digest of the prompt (16 hex digits), max_tokens (8), min_tokens (8)
    span_id     identity (8), version - 1 (2), length of the prompt (6)

The places of digest, version and length are the same in every version. So a worker knows a pointer of another version,
and leaves the answer to a worker that understands it.

A trace viewer finds no span behind such a pointer.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.errors import InvalidRequest, TwostrokeError

VERSION = 1  # of the pointer
LENGTH_BITS = 24
NO_LIMIT = 0xFFFFFFFF
UNKNOWN = "0" * 8  # identity of a worker of an older version
CANNOT = "this answer was begun by a worker that is not Twostroke's, or was cut short, so it cannot be continued"


class PointerVersionMismatch(TwostrokeError):
    """The answer was begun by a worker whose pointer has another version."""


@dataclass(frozen=True)
class MigrationState:
    """What a worker that takes over an answer has to know."""

    length: int  # of its prompt, in tokens
    # max_tokens, min_tokens: limits of each choice, counted from its first token
    max_tokens: int | None = None
    min_tokens: int = 0
    identity: str = UNKNOWN  # 8 hex digits for the models that have made the answer (`model_card.identity`)

    def pointer(self, prompt: Sequence[int]) -> dict[str, str]:
        """The pointer that is sent with the tokens of an answer to this prompt."""
        most = NO_LIMIT if self.max_tokens is None else min(self.max_tokens, NO_LIMIT - 1)
        return {
            "trace_id": f"{_digest(prompt)}{most:08x}{min(self.min_tokens, NO_LIMIT):08x}",
            "span_id": f"{self.identity}{(VERSION - 1 << LENGTH_BITS) + self.length:08x}",
        }


BROKEN = {"trace_id": f"{1:032x}", "span_id": f"{NO_LIMIT:016x}"}  # the pointer of an answer that cannot be continued


def read_pointer(tokens: Sequence[int], received: Mapping[str, Any] | None) -> MigrationState | None:
    """What the worker before has sent, of a request whose first tokens are the prompt. None: it sent nothing.

    Raises:
        InvalidRequest: the pointer is of another kind of worker: the place of the next token is not known then.
        PointerVersionMismatch: it is Twostroke's, and of another version.
    """
    if received is None:
        return None
    try:
        trace, span = str(received["trace_id"]), str(received["span_id"])
        identity, (version, length) = span[:8], divmod(int(span[8:], 16), 1 << LENGTH_BITS)
        digest, most, least = trace[:16], int(trace[16:24], 16), int(trace[24:], 16)
    except (KeyError, TypeError, ValueError):
        raise InvalidRequest(CANNOT) from None
    if not 0 < length <= len(tokens) or _digest(tokens[:length]) != digest:
        raise InvalidRequest(CANNOT)
    if version + 1 != VERSION:
        raise PointerVersionMismatch(
            f"an answer is not continued here: its pointer has version {version + 1}, and this worker {VERSION}"
        )
    return MigrationState(length, None if most == NO_LIMIT else most, least, identity)


def _digest(prompt: Sequence[int]) -> str:
    return hashlib.blake2b(np.array(prompt, np.uint32).tobytes(), digest_size=8, person=b"twostroke-prompt").hexdigest()
