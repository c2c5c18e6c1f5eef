"""Public traces of real traffic: who publishes them is told from the file.

Mooncake (Qin et al. 2024, arXiv:2407.00079), lines of JSON: `timestamp` (milliseconds), `input_length`,
`output_length`, and `hash_ids`: a number for each block of 512 tokens of the prompt, the last one shorter. Two prompts
with the same first numbers have the same first blocks.

Azure's LLM inference traces of 2023 and 2024 (Patel et al. 2024, Stojkovic et al. 2024;
github.com/Azure/AzurePublicDataset), CSV: `TIMESTAMP`, `ContextTokens`, `GeneratedTokens`.

BurstGPT (Wang et al. 2024, arXiv:2401.17644; github.com/HPMLL/BurstGPT), CSV: `Timestamp` (seconds), `Request tokens`,
`Response tokens` (0 for requests that failed, which are left out), and others.
"""

import csv
import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from typing import Any

from twostroke.errors import InvalidRequest
from twostroke.study.traffic.requests import PromptPiece, Traffic, TrafficRequest

BLOCK = 512  # tokens of a hash id
MAX_TOKENS = 1 << 30  # tokens of one request
OWN = -1  # name of tokens that no hash id describes, until they get one

Row = dict[str, Any]


def read_trace(path: Path, requests: int | None = None, seed: int = 0) -> Traffic:
    """The first `requests` of a trace, ordered by time; the first comes at 0.

    A prompt whose ids end early, or that has none, goes on with tokens of its own.

    Raises:
        InvalidRequest: the file cannot be read, has no request, or a line is none; the message has its number.
    """
    try:
        with path.open(newline="") as file:
            first = file.readline()
            file.seek(0)
            found = list(_requests(file, first, path, requests))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path}: this trace cannot be read: {error}") from None
    if not found:
        raise InvalidRequest(f"{path}: this trace has no request")
    found = sorted(found, key=lambda one: one.at)[:requests]
    start = found[0].at
    # Names of tokens that no hash id describes: above all of these.
    fresh = count(1 + max((piece.name for one in found for piece in one.pieces), default=0))
    arrivals = [
        TrafficRequest(
            one.at - start,
            tuple(piece if piece.name != OWN else PromptPiece(next(fresh), piece.tokens) for piece in one.pieces),
            one.output_tokens,
        )
        for one in found
    ]
    return Traffic.replayed(arrivals, seed)


def _requests(file: Any, first: str, path: Path, requests: int | None) -> Iterator[TrafficRequest]:
    """Each line's request. Tables are in order of time and long: no more lines are read than are wanted."""
    columns = [name.strip() for name in first.split(",")]
    for known, read in TABLES.items():
        if set(known) <= set(columns):
            rows = csv.DictReader(file, fieldnames=columns)
            next(rows)
            made = (read(row, f"{path}, line {number}") for number, row in enumerate(rows, 2))
            yield from islice((one for one in made if one is not None), requests)
            return
    for number, line in enumerate(file, 1):
        if line.strip():
            yield _mooncake(line, f"{path}, line {number}")


def _mooncake(line: str, where: str) -> TrafficRequest:
    try:
        fields = json.loads(line)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest(
            f"{where}: a request is a JSON object with timestamp, input_length and output_length, or a line of a table "
            f"with the columns of Azure's or BurstGPT's traces"
        )
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
    return TrafficRequest(at / 1e3, (*pieces, *([PromptPiece(OWN, rest)] if rest else [])), output)


def _azure(row: Row, where: str) -> TrafficRequest:
    text = row["TIMESTAMP"]
    try:
        at = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        raise InvalidRequest(f"{where}: TIMESTAMP must be a date and a time, not {text!r:.40}") from None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    prompt, output = (_length(_number(row), name, where) for name in ("ContextTokens", "GeneratedTokens"))
    return TrafficRequest(at.timestamp(), (PromptPiece(OWN, prompt),), output)


def _burstgpt(row: Row, where: str) -> TrafficRequest | None:
    try:
        at = float(row["Timestamp"])
    except (TypeError, ValueError):
        at = -1.0
    if not 0 <= at < float("inf"):
        raise InvalidRequest(f"{where}: Timestamp must be seconds, 0 or more, not {row['Timestamp']!r:.40}")
    if str(row["Response tokens"]).strip() == "0":
        return None
    prompt, output = (_length(_number(row), name, where) for name in ("Request tokens", "Response tokens"))
    return TrafficRequest(at, (PromptPiece(OWN, prompt),), output)


# By the columns that tell whose table it is.
TABLES: dict[tuple[str, ...], Callable[[Row, str], TrafficRequest | None]] = {
    ("TIMESTAMP", "ContextTokens", "GeneratedTokens"): _azure,
    ("Timestamp", "Request tokens", "Response tokens"): _burstgpt,
}


def _number(row: Row) -> Row:
    """A table's row with its whole numbers as such."""
    return {name: int(text) if str(text).strip().isdecimal() else text for name, text in row.items()}


def _length(fields: Row, name: str, where: str) -> int:
    value = fields.get(name)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise InvalidRequest(f"{where}: {name} must be a number of tokens, at least 1, not {value!r:.40}")
    return value
