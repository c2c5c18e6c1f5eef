"""The work of one step: the chunks that lanes enter, the forward pass that computes them, and the report."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np

from twostroke.backends.hidden_inputs import HiddenInputs
from twostroke.backends.interface import DrawnTokens, RaggedBatch
from twostroke.engine.decode_lane import DecodeLane
from twostroke.engine.lane import Lane
from twostroke.engine.model import Model
from twostroke.engine.request import Choice
from twostroke.kv.slot_mapping import SlotMapping


class Chunk(NamedTuple):
    """The tokens that one lane of a choice enters in a step, with their slots."""

    choice: Choice
    lane: Lane
    tokens: list[int]  # negative: a placeholder, see `RaggedBatch.drawn`
    slot_mapping: SlotMapping
    logit_rows: int  # number of last rows that return logits
    query_rows: int = 0  # number of last rows that return queries
    state_rows: int = 0  # number of last rows that return hidden states


@dataclass(frozen=True)
class ScheduledStep:
    """A step whose tokens have their slots."""

    chunks: Sequence[Chunk]  # what it computes
    predicted: float | None  # its predicted duration in seconds; None without a forecast
    began: float  # when it began, in seconds of the engine's clock


@dataclass(frozen=True)
class StepReport:
    """Tokens that a step computed, in decoding lanes and in chunks (including replays).

    `predicted_s` is the predicted duration in seconds; None without an ITL objective.
    """

    prefill: int = 0
    decode: int = 0
    predicted_s: float | None = None

    @classmethod
    def of(cls, step: ScheduledStep) -> "StepReport":
        """The report of a step whose tokens have been placed."""
        decode = sum(len(chunk.tokens) == 1 and isinstance(chunk.lane, DecodeLane) for chunk in step.chunks)
        return cls(sum(len(chunk.tokens) for chunk in step.chunks) - decode, decode, step.predicted)


def run_forward(model: Model, chunks: Sequence[Chunk], drawn: DrawnTokens | None = None) -> None:
    """Compute the chunks of one model together and hand each lane its logits, queries and hidden states.

    `drawn` are the tokens that the chunks' placeholders stand for.
    """
    starts = [0, *accumulate(len(chunk.tokens) for chunk in chunks)]

    def last(counts: Sequence[int]) -> np.ndarray:
        """Row indices of the last `counts[i]` rows of each chunk i."""
        ends = zip(starts[1:], counts, strict=True)
        return np.array([row for end, count in ends for row in range(end - count, end)], np.int64)

    token_ids = np.fromiter(chain.from_iterable(chunk.tokens for chunk in chunks), np.int64, starts[-1])
    positions, slots, *frames = np.concatenate([chunk.slot_mapping.rows for chunk in chunks], 1)
    batch = RaggedBatch(
        token_ids=token_ids,
        positions=positions,
        pages=np.stack(frames),
        slots=slots,
        row_starts=starts,
        tables=model.pool.step_tables([chunk.lane.writer.table for chunk in chunks]),
        wanted=last([chunk.logit_rows for chunk in chunks]),
        query_rows=last([chunk.query_rows for chunk in chunks]) if any(chunk.query_rows for chunk in chunks) else None,
        state_rows=last([chunk.state_rows for chunk in chunks]) if any(chunk.state_rows for chunk in chunks) else None,
        dropout=_dropout(model, chunks),
        biases=_biases(chunks),
        drawn=None if drawn is None or token_ids.min() >= 0 else drawn,
        states=[chunk.slot_mapping.states for chunk in chunks if chunk.slot_mapping.states is not None],
        hidden=_hidden(chunks) if model.config.takes_hidden else None,
    )
    logits, queries, states = model.compiled.forward(batch, model.pool.memory)
    taken = handed_out = seen = 0
    for chunk in chunks:
        if queries is not None and chunk.query_rows:
            chunk.lane.queries.add(queries[:, handed_out : handed_out + chunk.query_rows])
            handed_out += chunk.query_rows
        if states is not None and chunk.state_rows:
            chunk.lane.states.add(states[:, seen : seen + chunk.state_rows])
            seen += chunk.state_rows
        chunk.lane.num_computed = len(chunk.lane.writer) - (chunk.tokens[-1] < 0)
        chunk.lane.computed(logits[taken : taken + chunk.logit_rows])
        taken += chunk.logit_rows


def _hidden(chunks: Sequence[Chunk]) -> HiddenInputs:
    """The hidden states that go with the chunks' tokens."""
    parts = [one for chunk in chunks if (one := chunk.lane.hidden_inputs(len(chunk.tokens))) is not None]
    return HiddenInputs(np.concatenate([one.rows for one in parts]), np.concatenate([one.own for one in parts]))


def _biases(chunks: Sequence[Chunk]) -> list[np.ndarray | None]:
    biases = [chunk.lane.writer.bias for chunk in chunks]
    return [] if all(one is None for one in biases) else biases


def _dropout(model: Model, chunks: Sequence[Chunk]) -> np.ndarray | None:
    """Factors [layers, N, hidden], 1 (which changes no bits) for rows without dropout; None if no row has dropout."""
    if all(chunk.lane.dropout is None for chunk in chunks):
        return None
    blocks, columns = model.config.num_layers, model.config.hidden_size
    parts = [
        np.ones((blocks, len(chunk.tokens), columns), np.float32)
        if chunk.lane.dropout is None
        else chunk.lane.dropout.factors(chunk.slot_mapping.positions, blocks, columns)
        for chunk in chunks
    ]
    return np.concatenate(parts, 1)
