"""One forward pass: from lanes and counts of tokens to a ragged batch, and back to logits or tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import numpy as np

from twostroke.backends.interface import RaggedBatch
from twostroke.engine.lane import Lane
from twostroke.engine.model import Model
from twostroke.kv.writer import Places


@dataclass(frozen=True)
class Chunk:
    """What one lane enters in a step: tokens that have places already."""

    lane: Lane
    tokens: list[int]
    places: Places
    logit_rows: int  # how many of the last rows hand out logits
    query_rows: int = 0  # and how many queries


def run(model: Model, entries: Sequence[Chunk]) -> None:
    """Compute the entries of one model together and hand each lane the logits and queries it asked for."""
    starts = [0, *accumulate(len(entry.tokens) for entry in entries)]

    def last(counts: Sequence[int]) -> np.ndarray:
        """So many of the last rows of each entry."""
        return np.concatenate([np.arange(end - count, end) for end, count in zip(starts[1:], counts, strict=True)])

    columns = np.empty((4, starts[-1]), np.int64)
    for entry, start, end in zip(entries, starts, starts[1:], strict=False):
        columns[0, start:end], columns[1:, start:end] = entry.tokens, entry.places.rows
    token_ids, positions, frames, slots = columns
    batch = RaggedBatch(
        token_ids=token_ids,
        positions=positions,
        pages=frames,
        slots=slots,
        row_starts=starts,
        tables=model.pool.frames([entry.lane.writer.table for entry in entries]),
        wanted=last([entry.logit_rows for entry in entries]),
        dropout=_dropout(model, entries),
    )
    if any(entry.query_rows for entry in entries):
        batch.query_rows = last([entry.query_rows for entry in entries])
    hidden = model.decoder.forward(batch, model.pool.storage)
    answers = None
    if len(hidden):
        # All logits for everybody if anybody wants them: what is read for one row is read for all.
        whole = any(entry.logit_rows and entry.lane.wants_logits for entry in entries)
        if whole:
            answers = model.decoder.logits(hidden)
        else:
            noises = (entry.lane.noises(entry.logit_rows) for entry in entries if entry.logit_rows)
            answers = model.decoder.draw(hidden, list(chain.from_iterable(noises)))
    taken = handed_out = 0
    for entry in entries:
        mine = None
        if answers is not None and entry.logit_rows:
            mine = answers[taken : taken + entry.logit_rows]
            taken += entry.logit_rows
        if batch.queries is not None and entry.query_rows:
            entry.lane.queries.add(batch.queries[:, handed_out : handed_out + entry.query_rows])
            handed_out += entry.query_rows
        entry.lane.computed(mine)


def _dropout(model: Model, entries: Sequence[Chunk]) -> np.ndarray | None:
    """[layers, N, hidden] factors, 1 for rows without dropout, which leaves their bits alone; None if all are."""
    if all(entry.lane.dropout is None for entry in entries):
        return None
    blocks, columns = model.decoder.config.num_layers, model.decoder.config.hidden_size
    parts = [
        np.ones((blocks, len(entry.tokens), columns), np.float32)
        if entry.lane.dropout is None
        else entry.lane.dropout.factors(entry.places.positions, blocks, columns)
        for entry in entries
    ]
    return np.concatenate(parts, 1)
