"""The native CPU backend (native/*): a whole forward pass in one call, over weights in GGUF's own bits.

Activations are quantized to int8 per token and group of 32 and multiplied by 4- to 8-bit weights with VNNI, or
rounded to bfloat16 where weights are, and everywhere with AMX. KV is bfloat16, in the pairs that attention multiplies.
A row's result is the same bit for bit in any batch, chunk and thread count (`exact` is True).
"""

from __future__ import annotations

import ctypes
import struct
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from twostroke.kernels import library
from twostroke.kernels.formats import RawTensor
from twostroke.kernels.interface import RaggedBatch
from twostroke.kernels.mapped import row_reader
from twostroke.kernels.noise import NO_NOISE, Noise
from twostroke.kernels.reuse import Reused
from twostroke.kernels.rope import Rope, frequencies
from twostroke.kernels.summary import MadeSummaries, Summary, address, combine, new_summaries

if TYPE_CHECKING:
    from twostroke.models.decoder import Decoder

FORMATS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "BF16")  # in the order of native/weights.h
PANEL, PAGE_SIZE = 16, 16
SKETCH_ROWS = 8  # whose tokens are searched for at once: of more rows all logits are made
PACKED_BYTES = 8 << 20  # of a file that are packed at once, and then let go

_POINTER = ctypes.c_void_p
_NOISE = struct.Struct("=fIQ")


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "intermediate", "heads", "kv_heads", "dim", "gelu", "ropes")),
        ("embedding_format", ctypes.c_int32),
        *((name, ctypes.c_float) for name in ("eps", "attention_scale", "embedding_scale")),
    ]


class _Batch(ctypes.Structure):
    _fields_ = [
        ("rows", ctypes.c_int32),
        ("sequences", ctypes.c_int32),
        *((name, _POINTER) for name in ("tokens", "pages", "slots", "positions")),
        *((name, _POINTER) for name in ("row_starts", "span_starts", "spans", "cos", "sin")),
        ("turns", ctypes.c_int64),
        ("num_queries", ctypes.c_int64),
        *((name, _POINTER) for name in ("query_rows", "queries", "dropout", "embeddings")),
        ("num_wanted", ctypes.c_int64),
        ("wanted", _POINTER),
    ]


def unsupported(tensors: Mapping[str, RawTensor], head_dim: int, page_size: int) -> str | None:
    """Why this model cannot run on the native backend; None where it can."""
    if page_size != PAGE_SIZE:
        return f"it wants pages of {PAGE_SIZE} entries, not {page_size}"
    if head_dim % 32:
        return f"it wants heads of a multiple of 32, not {head_dim}"
    for tensor in tensors.values():
        if len(tensor.shape) == 2 and tensor.format not in FORMATS:
            wanted = "open the model with weights bf16, int8 or int4"
            return f"it has no kernels for {tensor.format} weights ({tensor.name}): {wanted}"
        if len(tensor.shape) == 2 and (tensor.shape[0] % PANEL or tensor.shape[1] % 32):
            return f"it wants multiples of {PANEL} rows and 32 columns, not {tensor.shape} ({tensor.name})"
    return None


@dataclass(frozen=True)
class NativeWeight:
    """Packed matrices whose outputs follow one another, or a float32 vector; biases joined."""

    matrices: tuple[Matrix, ...]
    vector: np.ndarray | None
    bias: np.ndarray | None


class NativeKernels:
    name = "native"
    exact = True
    kv_in_pairs = True

    def __init__(self, threads: int, variant: str | None = None) -> None:
        """`variant` is one of `library.variants()`, the quickest unless said."""
        self.device, self.dtype, self.kv_dtype = "cpu", "float32", "bfloat16"
        self.variant, self.threads = variant or library.variants()[0], threads
        self.label, self.library = f"native-{self.variant}", library.load(self.variant)
        self.team = self.library.twostroke_team(threads)
        weakref.finalize(self, self.library.twostroke_team_free, self.team)
        self.latest = MadeSummaries(np.empty((0, 1), np.float32), new_summaries(0))
        self.room = Reused()
        # A model without blocks has all that a product by itself takes.
        self.bare = self.library.twostroke_model(self.team, ctypes.byref(_Config()), None, None, None)
        weakref.finalize(self, self.library.twostroke_model_free, self.bare)

    def pack(self, parts: Sequence[RawTensor], bias: Sequence[RawTensor] = ()) -> NativeWeight:
        joined = np.concatenate([_vector(b) for b in bias]) if bias else None
        if len(parts[0].shape) == 1:
            return NativeWeight((), _vector(parts[0]), joined)
        return NativeWeight(tuple(Matrix(self, part) for part in parts), None, joined)

    def table(self, rows: RawTensor) -> Table:
        return Table(self, rows)

    def whole_pass(self, decoder: Decoder) -> NativePass:
        return NativePass(self, decoder)

    def summarize(self, logits: np.ndarray) -> Summary:
        made = self.latest.take(logits)
        if made is not None:
            return made
        logits = _floats(logits)
        rows, count = logits.shape
        out = new_summaries(rows)
        self.library.twostroke_summarize(self.team, address(logits), rows, count, address(out))
        return combine(out)

    def draw(self, logits: np.ndarray, noises: Sequence[Noise]) -> list[int]:
        logits = _floats(logits)
        rows, count = logits.shape
        ids = np.empty(rows, np.int32)
        self.library.twostroke_draw(self.team, address(logits), rows, count, _packed(noises), address(ids))
        return ids.tolist()

    def weigh(self, logits: np.ndarray, tops: Sequence[float], gains: Sequence[float]) -> list[float]:
        logits = _floats(logits)
        rows, count = logits.shape
        arrays = np.array(tops, np.float32), np.array(gains, np.float32), np.empty(rows)
        places = (address(array) for array in arrays)
        self.library.twostroke_weigh(self.team, address(logits), rows, count, *places)
        return arrays[-1].tolist()

    def likeliest(self, logits: np.ndarray, counts: Sequence[int], floors: Sequence[float]) -> list[np.ndarray]:
        logits = _floats(logits)
        rows, count = logits.shape
        ids, found = self.room.array(rows, count).view(np.int32), np.empty(rows, np.int32)
        arrays = logits, np.array(counts, np.int32), np.array(floors, np.float32), ids, found
        places = [address(array) for array in arrays]
        self.library.twostroke_likeliest(self.team, places[0], rows, count, *places[1:])
        return [row[:some].astype(np.int64) for row, some in zip(ids, found.tolist(), strict=True)]


class Matrix:
    """One packed matrix. `multiply` and `row` are for tests: a pass uses it in place."""

    def __init__(self, kernels: NativeKernels, raw: RawTensor) -> None:
        self.kernels, self.shape = kernels, raw.shape
        self.handle = kernels.library.twostroke_matrix(FORMATS.index(raw.format), *raw.shape)
        if not self.handle:
            raise MemoryError(f"no memory to pack {raw.source}")
        rows = max(1, PACKED_BYTES // (PANEL * raw.data.shape[1])) * PANEL
        for first in range(0, raw.shape[0], rows):
            part = replace(raw, data=raw.data[first : first + rows])
            data = np.ascontiguousarray(part.data)
            kernels.library.twostroke_pack(kernels.team, self.handle, first, len(data), address(data), data.shape[1])
            part.release()  # or a mapped file would stay in memory beside what was packed from it
        weakref.finalize(self, _free_settled, kernels.library.twostroke_matrix_free, self.handle, kernels)

    @property
    def nbytes(self) -> int:
        return self.kernels.library.twostroke_matrix_bytes(self.handle)

    def row(self, index: int) -> np.ndarray:
        out = np.empty(self.shape[1], np.float32)
        self.kernels.library.twostroke_unpack(self.handle, index, address(out))
        return out

    def multiply(self, x: np.ndarray) -> np.ndarray:
        out, x, kernels = np.empty((len(x), self.shape[0]), np.float32), _floats(x), self.kernels
        kernels.library.twostroke_multiply(kernels.bare, self.handle, address(x), len(x), address(out))
        return out


class Table:
    """Rows that are looked up and never multiplied: not packed, and left in their file if it is mapped.

    `read` gives their bytes, as a pass wants them. `row` is for tests.
    """

    def __init__(self, kernels: NativeKernels, raw: RawTensor) -> None:
        self.kernels, self.shape, self.format = kernels, raw.shape, FORMATS.index(raw.format)
        self.read = row_reader(raw.data, raw.source)

    def row(self, index: int) -> np.ndarray:
        out, raw = np.empty(self.shape[1], np.float32), np.frombuffer(self.read([index]), np.uint8)
        self.kernels.library.twostroke_read_row(self.format, address(raw), self.shape[1], address(out))
        return out


class NativePass:
    """A decoder's forward pass and head. Not to be called from two threads at once."""

    def __init__(self, kernels: NativeKernels, decoder: Decoder) -> None:
        config = decoder.config
        self.kernels, self.decoder, self.library = kernels, decoder, kernels.library
        self.ropes: list[Rope] = list(dict.fromkeys(config.ropes))
        self.turns = np.empty((0, 0)), np.empty((0, 0))
        self.head = decoder.head.matrices[0]
        self.table = decoder.embed if isinstance(decoder.embed, Table) else None  # else rows are the head's
        fields = _Config(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.activation == "gelu_tanh",
            len(self.ropes),
            self.table.format if self.table else 0,
            config.norm_eps,
            config.attention_scale,
            config.embedding_scale,
        )
        norm = decoder.norm.vector
        embed = None if self.table else self.head.handle
        self.handle = self.library.twostroke_model(
            kernels.team, ctypes.byref(fields), embed, self.head.handle, address(norm)
        )
        # What a pass reads has to outlive it, and members of the team may be late.
        self.lent: list[np.ndarray] = [norm]
        self.kv: list[np.ndarray] = []
        self.room = Reused()
        free = self.library.twostroke_model_free
        weakref.finalize(self, _free_settled, free, self.handle, kernels, self.lent, self.kv)
        for layer in decoder.layers:
            post = layer.post_norms or (None, None)
            qk = layer.qk_norms or (None, None, 0.0)
            norms = [layer.attn_norm, layer.mlp_norm, *qk[:2], *post]
            vectors = [norm.vector for norm in norms if norm is not None] + [layer.qkv.bias]
            self.lent += [vector for vector in vectors if vector is not None]
            matrices = [*layer.qkv.matrices, *layer.o.matrices, *layer.gate_up.matrices, *layer.down.matrices]
            self.library.twostroke_add_block(
                self.handle,
                (_POINTER * 6)(*(None if norm is None else address(norm.vector) for norm in norms)),
                (_POINTER * 7)(*(matrix.handle for matrix in matrices)),
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
        fields = _Batch(
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
            self.library.twostroke_settle(self.kernels.team)
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
        hidden, count = _floats(hidden), len(hidden)
        out, summaries = self.room.array(count, self.head.shape[0]), new_summaries(count)
        self.library.twostroke_logits(self.handle, address(hidden), count, address(out), address(summaries))
        self.kernels.latest = MadeSummaries(out, summaries)
        return out

    def draw(self, hidden: np.ndarray, noises: Sequence[Noise]) -> list[int]:
        """[W, hidden] -> W ids."""
        if self.sketch_bytes and len(hidden) <= SKETCH_ROWS:
            ids = self._search(hidden, noises, None)
            if min(ids) >= 0:
                return ids
        logits = self.logits(hidden)
        if all(noise == NO_NOISE for noise in noises) and (found := self.kernels.summarize(logits)).finite:
            return found.best  # which the head has found
        return self.kernels.draw(logits, noises)

    def bounds(self, hidden: np.ndarray, noises: Sequence[Noise]) -> np.ndarray:
        """[W, hidden] -> [W, vocab / PANEL], which nothing in a panel is above, its noise included. For tests."""
        highest = np.empty((len(hidden), self.head.shape[0] // PANEL), np.float32)
        self._search(hidden, noises, highest)
        return highest

    def _search(self, hidden: np.ndarray, noises: Sequence[Noise], highest: np.ndarray | None) -> list[int]:
        hidden, ids = _floats(hidden), np.empty(len(hidden), np.int32)
        places = (address(ids), None if highest is None else address(highest))
        self.library.twostroke_search(self.handle, address(hidden), len(ids), _packed(noises), *places)
        return ids.tolist()


def _packed(noises: Sequence[Noise]) -> bytes:
    """As native/noise.h has them."""
    return b"".join([_NOISE.pack(noise.gain, noise.key is not None, noise.key or 0) for noise in noises])


def _floats(array: np.ndarray) -> np.ndarray:
    """As kernels read them."""
    return np.ascontiguousarray(array, np.float32)


def _vector(raw: RawTensor) -> np.ndarray:
    values = raw.dequantize()
    raw.release()
    return values


def _free_settled(free: Callable[[int], None], handle: int, kernels: NativeKernels, *_kept: list[np.ndarray]) -> None:
    """Frees what a team may read, when none of its members is late with a pass."""
    kernels.library.twostroke_settle(kernels.team)
    free(handle)
