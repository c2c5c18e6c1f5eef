"""A decoder's whole forward pass as one call of the native backend, and its head."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from twostroke.backends.interface import RaggedBatch
from twostroke.backends.native.library import Batch, Config
from twostroke.backends.native.statistics import NativeStatistics, packed_noises
from twostroke.backends.native.weights import PANEL, Table, floats
from twostroke.models.rope import Rope, frequencies
from twostroke.sampling.noise import Noise
from twostroke.sampling.statistics import MadeSummaries, new_summaries
from twostroke.system.reuse import Reused, address

if TYPE_CHECKING:
    from twostroke.backends.reference.decoder import Decoder

SKETCH_ROWS = 8  # that a sketch of the head can be multiplied with at once


class NativePass:
    """A decoder's forward pass and head. Not to be called from two threads at once."""

    def __init__(self, statistics: NativeStatistics, decoder: Decoder) -> None:
        config = decoder.config
        self.statistics, self.decoder = statistics, decoder
        self.team, self.library = statistics.team, statistics.library
        self.ropes: list[Rope] = list(dict.fromkeys(config.ropes))
        self.turns = np.empty((0, 0)), np.empty((0, 0))
        self.head = decoder.head.matrices[0]
        self.table = decoder.embed if isinstance(decoder.embed, Table) else None  # else rows are the head's
        fields = Config(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.activation == "gelu_tanh",
            len(self.ropes),
            self.head.shape[0],
            self.table.format if self.table else 0,
            config.norm_eps,
            config.attention_scale,
            config.embedding_scale,
        )
        norm = decoder.norm.vector
        embed = None if self.table else self.head.handle
        self.handle = self.library.twostroke_model(
            self.team.handle, ctypes.byref(fields), embed, self.head.handle, address(norm)
        )
        # What a pass reads has to outlive it, and members of the team may be late.
        self.lent: list[np.ndarray] = [norm]
        self.kv: list[np.ndarray] = []
        self.room = Reused()
        self.team.free_with(self, self.library.twostroke_model_free, self.handle, self.lent, self.kv)
        for layer in decoder.layers:
            post = layer.post_norms or (None, None)
            qk = layer.qk_norms or (None, None, 0.0)
            norms = [layer.attn_norm, layer.mlp_norm, *qk[:2], *post]
            vectors = [norm.vector for norm in norms if norm is not None] + [layer.qkv.bias]
            self.lent += [vector for vector in vectors if vector is not None]
            matrices = [*layer.qkv.matrices, *layer.o.matrices, *layer.gate_up.matrices, *layer.down.matrices]
            self.library.twostroke_add_block(
                self.handle,
                (ctypes.c_void_p * 6)(*(None if norm is None else address(norm.vector) for norm in norms)),
                (ctypes.c_void_p * 7)(*(matrix.handle for matrix in matrices)),
                None if layer.qkv.bias is None else address(layer.qkv.bias),
                self.ropes.index(layer.rope),
                layer.window or 0,
            )

        # Of no use where the head has no more bits itself, or weights that are not finite.
        self.sketch_bytes = self.library.twostroke_sketch(self.handle)
        if self.sketch_bytes < 0:
            raise MemoryError("no memory for the sketch of the head: free some, or open a smaller model")

    def forward(self, batch: RaggedBatch[np.ndarray], kv: np.ndarray) -> np.ndarray:
        """[W, hidden] before the last norm; K and V are written to `kv`."""
        config = self.decoder.config
        hidden = np.empty((len(batch.wanted), config.hidden_size), np.float32)
        turns = self._turns(int(batch.positions.max()) + 1)
        row_starts = np.array(batch.row_starts, np.int32)
        span_starts = np.array([0, *accumulate(len(table) for table in batch.tables)], np.int32)
        spans = np.concatenate(batch.tables, dtype=np.int32)
        fields = Batch(
            batch.num_rows,
            len(batch.tables),
            *(address(array) for array in (batch.token_ids, batch.pages, batch.slots, batch.positions)),
            *(address(array) for array in (row_starts, span_starts, spans, *turns)),
            turns[0].shape[1],
            num_wanted=len(batch.wanted),
            wanted=address(batch.wanted),
        )
        if self.table is not None:
            embeddings = np.frombuffer(self.table.read(batch.token_ids.tolist()), np.uint8)
            fields.embeddings = address(embeddings)
        if batch.dropout is not None:
            fields.dropout = address(batch.dropout)
        if batch.query_rows is not None and batch.queries is not None:
            fields.num_queries = len(batch.query_rows)
            fields.query_rows, fields.queries = address(batch.query_rows), address(batch.queries)
        if not (self.kv and self.kv[0] is kv):
            self.team.settle()
            self.kv[:] = [kv]
        strides = (ctypes.c_int64 * 3)(*(stride // kv.itemsize for stride in kv.strides[:3]))
        self.library.twostroke_forward(self.handle, ctypes.byref(fields), address(kv), strides, address(hidden))
        return hidden

    def _turns(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of at least so many positions: [ropes, positions, head_dim / 2] each."""
        if self.turns[0].shape[1] < count:
            positions = np.arange(max(1024, 1 << (count - 1).bit_length()), dtype=np.float32)[:, None]
            angles = np.stack([positions * frequencies(rope, self.decoder.config.head_dim) for rope in self.ropes])
            turns = np.cos(angles, dtype=np.float64), np.sin(angles, dtype=np.float64)
            self.turns = turns[0].astype(np.float32), turns[1].astype(np.float32)
        return self.turns

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """[W, hidden] -> [W, vocab]."""
        hidden, count = floats(hidden), len(hidden)
        out, summaries = self.room.array(count, self.head.padded), new_summaries(count)
        self.library.twostroke_logits(self.handle, address(hidden), count, address(out), address(summaries))
        if self.head.padded > (vocab := self.head.shape[0]):
            out = out[:, :vocab].copy()
        self.statistics.latest = MadeSummaries(out, summaries)
        return out

    def draw(self, hidden: np.ndarray, noises: Sequence[Noise]) -> list[int]:
        """[W, hidden] -> W ids."""
        ids = self._search(hidden, noises, None)
        return ids if min(ids) >= 0 else self.statistics.draw(self.logits(hidden), noises)

    def draw_by_sketch(self, hidden: np.ndarray, noises: Sequence[Noise]) -> tuple[list[int], np.ndarray]:
        """[W, hidden] -> W ids, -1 where logits are not finite, and [W, vocab / PANEL]: what nothing in a panel is
        above, its noise included. For tests: of up to SKETCH_ROWS rows, whether it pays or not."""
        highest = np.empty((len(hidden), self.head.padded // PANEL), np.float32)
        return self._search(hidden, noises, highest), highest

    def _search(self, hidden: np.ndarray, noises: Sequence[Noise], highest: np.ndarray | None) -> list[int]:
        hidden, ids = floats(hidden), np.empty(len(hidden), np.int32)
        places = (address(ids), None if highest is None else address(highest))
        self.library.twostroke_search(self.handle, address(hidden), len(ids), packed_noises(noises), *places)
        return ids.tolist()
