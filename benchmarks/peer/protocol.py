"""What a worker and the harness say to each other: one JSON object a line. Standard library alone, as every engine's
environment imports it.

    harness                                    worker
                                           <-  Ready, once the model is loaded
    Job: prompts, output_tokens             ->
                                           <-  Generated: when each token of each sequence came, or an error
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Protocol

PROPERTIES = "ENGINE_PROPERTIES"  # environment variable: JSON of what an adapter passes on to its engine


@dataclass(frozen=True)
class Job:
    """Prompts of token ids to answer at once, each with exactly `output_tokens` greedy tokens."""

    prompts: list[list[int]]
    output_tokens: int


@dataclass(frozen=True)
class Generated:
    """For each sequence its tokens, and when each came: in seconds since the job reached the engine."""

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
        """Run the job. The clock starts when the engine is handed token ids, and stops with each token known to us:
        no tokenizer is involved, and what an engine has to tidy up afterwards is outside."""
        ...


@dataclass(frozen=True)
class Options:
    """How a worker opens its model: `context` is the most entries of a sequence, `sequences` the most at once. Without
    `amx` it does without the processor's tiles."""

    model: str
    threads: int
    context: int
    sequences: int
    amx: bool = True


def to_line(message: Job | Generated | Ready | Options) -> str:
    return json.dumps(asdict(message)) + "\n"


def from_line(line: str) -> dict[str, Any]:
    """Raises ValueError for what is not one JSON object."""
    value = json.loads(line)
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {line:.80}")
    return value
