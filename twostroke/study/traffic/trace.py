"""Traces of real traffic in Mooncake's format (Qin et al. 2024, arXiv:2407.00079): requests as lines of JSON.

Each line has `timestamp` (milliseconds), `input_length`, `output_length`, and `hash_ids`: a number for each block of
512 tokens of the prompt, the last one shorter. Two prompts with the same first numbers have the same first blocks.
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.study.traffic.arrivals import Replay
from twostroke.study.traffic.requests import PromptPiece, Traffic, TrafficRequest

BLOCK = 512  # tokens of a hash id
MAX_TOKENS = 1 << 30  # tokens of one request


def read_trace(path: Path, requests: int | None = None, seed: int = 0) -> Traffic:
    """The first `requests` of a trace, ordered by time; the first comes at 0.

    A prompt whose ids end early, or that has none, goes on with tokens of its own.

    Raises:
        InvalidRequest: the file cannot be read, has no request, or a line is none; the message has its number.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: this trace cannot be read: {error}") from None
    numbered = [(number, line) for number, line in enumerate(lines, 1) if line.strip()]
    found = [_arrival(line, f"{path}, line {number}") for number, line in numbered]
    found = sorted(found, key=lambda one: one.at)[:requests]
    if not found:
        raise InvalidRequest(f"{path}: this trace has no request")
    start = found[0].at
    # Names of tokens that no hash id describes: above all of these.
    fresh = count(1 + max((piece.name for one in found for piece in one.pieces), default=0))
    arrivals = [
        TrafficRequest(
            one.at - start,
            tuple(piece if piece.name >= 0 else PromptPiece(next(fresh), piece.tokens) for piece in one.pieces),
            one.output_tokens,
        )
        for one in found
    ]
    return Traffic(arrivals, Replay(tuple(one.at for one in arrivals)), seed)


def _arrival(line: str, where: str) -> TrafficRequest:
    """One line; tokens without a hash id are a piece of the name -1."""
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"{where}: a request is a JSON object with timestamp, input_length and output_length")
    at = fields.get("timestamp")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < float("inf"):
        raise InvalidRequest(f"{where}: timestamp must be milliseconds, 0 or more, not {at!r:.40}")
    prompt, output = (_length(fields, name, where) for name in ("input_length", "output_length"))
    ids = fields.get("hash_ids", [])
    if not isinstance(ids, list) or not all(type(one) is int and one >= 0 for one in ids):
        raise InvalidRequest(f"{where}: hash_ids must be a list of numbers, 0 or more")
    if len(ids) > -(-prompt // BLOCK):
        raise InvalidRequest(f"{where}: {len(ids)} hash_ids are more than {prompt} tokens have blocks of {BLOCK}")
    pieces = [PromptPiece(name, min(BLOCK, prompt - BLOCK * i)) for i, name in enumerate(ids)]
    rest = prompt - sum(piece.tokens for piece in pieces)
    return TrafficRequest(at / 1e3, (*pieces, *([PromptPiece(-1, rest)] if rest else [])), output)


def _length(fields: dict[str, Any], name: str, where: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise InvalidRequest(f"{where}: {name} must be a number of tokens, at least 1, not {value!r:.40}")
    return value
