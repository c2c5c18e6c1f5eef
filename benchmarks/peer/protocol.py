"""Messages between a worker and the harness: one JSON object per line.

Every engine's environment imports this module, so it uses only the standard library.

    harness                                    worker
                                           <-  Ready, once the model is loaded
    Job: prompts, output_tokens             ->
                                           <-  Generated: when each token of each sequence came, or an error
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

PROPERTIES = "ENGINE_PROPERTIES"  # environment variable: JSON of options that an adapter passes to its engine


@dataclass(frozen=True)
class Job:
    """Prompts of token ids to answer together, each with exactly `output_tokens` greedy tokens."""

    prompts: list[list[int]]
    output_tokens: int


@dataclass(frozen=True)
class Generated:
    """The tokens of each sequence, and the arrival of each token in seconds since the job reached the engine."""

    tokens: list[list[int]]
    times: list[list[float]]


@dataclass(frozen=True)
class Ready:
    """The model is loaded."""

    version: str
    load_s: float


class Adapter(Protocol):
    """An engine with a model loaded. Each module of `adapters` has a function `load(options)` that makes one."""

    version: str

    def answer(self, job: Job) -> Generated:
        """Run the job.

        The clock starts when the engine gets token ids, and each token is timed when it reaches us. No tokenizer is
        involved, and cleanup after the last token is not timed.
        """
        ...


@dataclass(frozen=True)
class Options:
    """How a worker opens its model: `context` is the maximum length of a sequence, `sequences` the maximum batch.

    Without `amx` the engine does not use AMX.
    """

    model: str
    threads: int
    context: int
    sequences: int
    amx: bool = True


def to_line(message: Job | Generated | Ready | Options) -> str:
    return json.dumps(asdict(message)) + "\n"


def from_line(line: str) -> dict[str, Any]:
    """The object in a line. Raises ValueError if it is not one JSON object."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {line:.80}")
    return value
