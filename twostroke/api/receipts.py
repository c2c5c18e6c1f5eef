"""Receipts of answers: what was asked of which weights and came out, so that anyone with the same weights can check it.

An answer's bits do not depend on the schedule: alone or among others, in a decode or in a prefill, a row has the same
logits, and a draw depends on seed and index alone. So a receipt needs no trust in the server that made it
(`api.receipt_check`).

The seal says who made a receipt: only those who have the key can make one.
"""

import dataclasses
import hashlib
import json
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twostroke.api.llm import LLM
from twostroke.api.reasoning.constraint import ReasoningConstraintFactory
from twostroke.api.reasoning.reasoning import ReasoningReaderFactory, described
from twostroke.engine.output import Token
from twostroke.engine.request import Request
from twostroke.errors import InvalidRequest
from twostroke.sampling.constraint import ConstraintFactory, DescribedConstraint
from twostroke.sampling.params import SamplingParams
from twostroke.system.atomic_files import atomic_replace
from twostroke.system.user_key import seal

FORMAT = "twostroke-receipt-1"
PURPOSE = b"twostroke-recpt"  # of its seal
STRETCH = 32  # tokens whose log-probabilities have a digest together
MAX_BYTES = 64 << 20  # of a file
LEFT_OUT = ("constraint", "reader", "n", "prompt_logprobs", "logprobs")  # options that a receipt does not have


@dataclass(frozen=True)
class Receipt:
    """What can be checked of one answer.

    Attributes:
        model: what the model is called; backend: what computed it. For readers alone.
        identity: of weights and arithmetic: equal identities give equal bits.
        prompt: its token ids, chat template and all; prompt_digest: theirs.
        options: the sampling parameters that differ from the defaults, and the seed; "grammar": what the grammar of the
            answer is made of; "thought": where a grammar, a budget or stop strings begin, and how a thought is marked;
            "choice": which of several answers it is, if not the first; "max_tokens": of an answer that was cut, where.
            options_digest: theirs.
        tokens: the answer's ids, the one that ended it included.
        finish_reason: "stop" or "length".
        logprobs: a digest of the log-probabilities of each `STRETCH` tokens.
        made_at: in seconds since 1970.
        seal: a keyed hash over all of it; None if its maker has no key.
    """

    model: str
    backend: str
    identity: str
    prompt: tuple[int, ...]
    prompt_digest: str
    options: dict[str, Any]
    options_digest: str
    tokens: tuple[int, ...]
    finish_reason: str
    logprobs: tuple[str, ...]
    made_at: int
    seal: str | None = None

    @classmethod
    def of(cls, llm: LLM, prompt: Sequence[int], request: Request, tokens: Sequence[Token]) -> "Receipt":
        """The receipt of one of a plain request's answers, whose tokens have log-probabilities.

        Args:
            llm: what made it.
            prompt: its token ids.
            request: the request.
            tokens: those of the answer.

        Raises:
            InvalidRequest: an answer that a receipt cannot describe.
        """
        params = request.params
        follow = describable(params)
        reason, logprobs = tokens[-1].finish_reason if tokens else None, [token.logprob for token in tokens]
        if reason is None or None in logprobs:
            raise InvalidRequest("a receipt is for an answer that is complete and has log-probabilities")
        options = {name: getattr(params, name) for name in sorted(params.changed - set(LEFT_OUT))}
        # Also the end of a context or of memory cuts an answer, which may be larger where it is checked.
        options |= {"seed": request.seed, "max_tokens": len(tokens) if reason == "length" else params.max_tokens}
        if tokens[0].choice:
            options["choice"] = tokens[0].choice
        if follow is not None:
            options["grammar"] = dict(follow.description)
        if (thought := described(params)) is not None:
            options["thought"] = thought
        options = json.loads(json.dumps(options))
        made = cls(
            llm.name,
            llm.backend.label,
            llm.model.id,
            tuple(prompt),
            digest(list(prompt)),
            options,
            digest(options),
            tuple(token.id for token in tokens),
            reason,
            stretches([float(value) for value in logprobs if value is not None]),
            int(time.time()),
        )
        return dataclasses.replace(made, seal=seal(made.content, PURPOSE))

    @property
    def content(self) -> bytes:
        """What is sealed: all of it but the seal."""
        return json.dumps(self.as_json() | {"seal": None}, sort_keys=True).encode()

    @property
    def name(self) -> str:
        """A name for its file: when it was made, and a digest of it."""
        return f"{self.made_at}-{digest(self.as_json())[:16]}"

    def as_json(self) -> dict[str, Any]:
        """The receipt as JSON has it."""
        return json.loads(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}))

    @classmethod
    def from_json(cls, value: Any) -> "Receipt":
        """The receipt of such JSON. Raises InvalidRequest for anything else."""
        names = {field.name for field in dataclasses.fields(cls)}
        given: dict[str, Any] = dict(value) if isinstance(value, dict) else {}
        if given.pop("format", None) != FORMAT or given.keys() != names:
            raise InvalidRequest(f"this is no receipt: it must be a JSON object of the form {FORMAT}")
        ids = [*_list(given["prompt"], int), *_list(given["tokens"], int)]
        texts = ("model", "backend", "identity", "prompt_digest", "options_digest", "finish_reason")
        fine = all(isinstance(given[name], str) for name in texts) and isinstance(given["made_at"], int)
        fine = fine and isinstance(given["options"], dict) and isinstance(given["seal"], str | None)
        if not fine or not given["tokens"] or not given["prompt"] or min(ids) < 0:
            raise InvalidRequest("this is no receipt: a field has a value of the wrong kind")
        _list(given["logprobs"], str)
        lists: dict[str, Any] = {name: tuple(given[name]) for name in ("prompt", "tokens", "logprobs")}
        return cls(**(given | lists))

    def save(self, path: Path) -> None:
        """Write it as a file. Raises OSError."""
        with atomic_replace(path) as out:
            out.write(json.dumps(self.as_json()).encode())

    @classmethod
    def load(cls, path: Path) -> "Receipt":
        """Read the first receipt of a file. Raises OSError or InvalidRequest."""
        return cls.load_all(path)[0]

    @classmethod
    def load_all(cls, path: Path) -> "list[Receipt]":
        """Read a file, or the response that receipts came in. Raises OSError or InvalidRequest."""
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        try:
            value = json.loads(data) if len(data) <= MAX_BYTES else None
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict) and isinstance(response := value.get("response"), dict):
            value = response  # of the last event of a stream of /v1/responses
        if isinstance(value, dict) and isinstance(several := value.get("receipts"), list) and several:
            return [cls.from_json(one) for one in several]
        return [cls.from_json(value["receipt"] if isinstance(value, dict) and "receipt" in value else value)]


Remake = Callable[[Mapping[str, Any]], ConstraintFactory]


def describable(params: SamplingParams) -> DescribedConstraint | None:
    """The grammar of the answer, if it has one. Raises InvalidRequest for parameters that a receipt cannot describe."""
    reader, follow = params.reader, params.constraint
    tools = reader.answer if isinstance(reader, ReasoningReaderFactory) else reader
    if tools is not None and params.stop:
        raise InvalidRequest("a receipt has no stop strings beside tools: leave out stop")
    if isinstance(follow, ReasoningConstraintFactory):
        follow = follow.answer
    if follow is not None and not isinstance(follow, DescribedConstraint):
        raise InvalidRequest("a receipt needs a grammar that can be made again from its description")
    return follow


def digest(value: Any) -> str:
    """SHA-256 of a value as JSON."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def stretches(logprobs: Sequence[float]) -> tuple[str, ...]:
    """A digest of each stretch of log-probabilities, over the bits of the doubles."""
    parts = (logprobs[start : start + STRETCH] for start in range(0, len(logprobs), STRETCH))
    return tuple(hashlib.sha256(struct.pack(f"<{len(part)}d", *part)).hexdigest()[:32] for part in parts)


def _list(value: Any, kind: type) -> list[Any]:
    if not isinstance(value, list) or not all(type(one) is kind for one in value):
        raise InvalidRequest("this is no receipt: a list has values of the wrong kind")
    return value
