"""Attention over pages against a naive implementation, entry by entry."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twostroke.backends.interface import START, STOP, RaggedBatch
from twostroke.backends.reference.operations import Operations
from twostroke.models.config import Attention
from twostroke.models.rope import NO_ROPE

HEADS, KV_HEADS, DIM, SIZE, PAGES = 4, 2, 8, 4, 40


def naive(q: torch.Tensor, kv: torch.Tensor, batch: RaggedBatch, scale: float, window: int | None) -> torch.Tensor:
    rows = []
    for s, table in enumerate(batch.tables):
        entries = [
            (page, slot, position + slot - start)
            for start, stop, position, page in table.tolist()
            for slot in range(start, stop)
        ]
        own = range(batch.row_starts[s], batch.row_starts[s + 1])
        for back, row in enumerate(reversed(own)):
            seen = entries[: len(entries) - back]
            if window is not None:
                seen = [e for e in seen if e[2] > seen[-1][2] - window]
            k = torch.stack([kv[0, page, :, slot] for page, slot, _ in seen], dim=1)  # [Hkv, n, D]
            v = torch.stack([kv[1, page, :, slot] for page, slot, _ in seen], dim=1)
            grouped = q[row].view(KV_HEADS, HEADS // KV_HEADS, DIM)
            rows.append((row, ((grouped @ k.mT * scale).softmax(-1) @ v).flatten()))
    return torch.stack([out for _, out in sorted(rows, key=lambda pair: pair[0])])


@st.composite
def batches(draw: st.DrawFn) -> RaggedBatch:
    """Sequences of spans of any length, with gaps in positions, and pages in any order, some of them shared."""
    tables, starts, position_of_row = [], [0], []
    for _ in range(draw(st.integers(1, 5))):
        spans, position = [], draw(st.integers(0, 9))
        for _ in range(draw(st.integers(1, 12))):
            start = draw(st.integers(0, SIZE - 1))
            stop = draw(st.integers(start + 1, SIZE))
            spans.append((start, stop, position, draw(st.integers(0, PAGES - 1))))
            position += stop - start + draw(st.sampled_from([0, 0, 5]))
        table = np.array(spans, np.int32)
        length = int((table[:, STOP] - table[:, START]).sum())
        rows = min(length, draw(st.sampled_from([1, 1, 2, 7])))
        tables.append(table)
        starts.append(starts[-1] + rows)
        position_of_row += [0] * rows
    nothing = torch.zeros(starts[-1], dtype=torch.int64)
    return RaggedBatch(nothing, nothing, nothing[None], nothing, starts, tables, nothing)


@settings(max_examples=150, deadline=None)
@given(
    batch=batches(),
    window=st.sampled_from([None, 1, 3, 10]),
    tile=st.sampled_from([4, 8, 512]),
    block=st.sampled_from([2, 3, 128]),
)
def test_attention(batch: RaggedBatch, window: int | None, tile: int, block: int) -> None:
    generator = torch.Generator().manual_seed(0)
    kv = torch.randn(2, PAGES, KV_HEADS, SIZE, DIM, generator=generator)
    q = torch.randn(batch.num_rows, HEADS, DIM, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("twostroke.backends.reference.attention_tiles.TILE_KEYS", tile)
        patch.setattr("twostroke.backends.reference.attention_tiles.BLOCK_ROWS", block)
        mine = Operations().attention(q, kv, batch, 0, Attention(HEADS, KV_HEADS, DIM, 0.4, NO_ROPE, window), None)
    torch.testing.assert_close(mine, naive(q, kv, batch, 0.4, window), atol=1e-5, rtol=1e-5)


def test_stray_values_in_unused_slots_do_no_harm() -> None:
    """A slot past the end may hold any finite value: it has weight 0."""
    kv = torch.full((2, 2, KV_HEADS, SIZE, DIM), 1e30)
    kv[:, 1, :, :2] = 1.0
    nothing = torch.zeros(1, dtype=torch.int64)
    batch = RaggedBatch(nothing, nothing, nothing, nothing, [0, 1], [np.array([[0, 2, 0, 1]], np.int32)], nothing)
    one = Attention(HEADS, KV_HEADS, DIM, 1.0, NO_ROPE)
    out = Operations().attention(torch.ones(1, HEADS, DIM), kv, batch, 0, one, None)
    assert (out == 1.0).all()
