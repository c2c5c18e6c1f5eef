"""A model on the native backend: the forward pass, in one call, and the head."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from twostroke.backends.interface import PAGE, ForwardOutput, LazyLogits, RaggedBatch, StateStep
from twostroke.backends.lazy_logits import HiddenRows, KnownTokens, resolved, sample_rows
from twostroke.backends.native.library import (
    NativeAttention,
    NativeBatch,
    NativeConfig,
    NativeState,
    ThreadTeam,
    array_strides,
)
from twostroke.backends.native.statistics import NativeStatistics, packed_noises
from twostroke.backends.native.weight_sources import WeightSource
from twostroke.backends.native.weights import PAGE_SIZE, PANEL, PackedMatrix, floats
from twostroke.backends.page_memory import PageMemory
from twostroke.models.config import (
    ROUTER,
    SELECTION_BIAS,
    SHARED_GATE,
    Activation,
    Attention,
    Experts,
    GatedMLP,
    Layer,
    ModelConfig,
    QueryGrowth,
)
from twostroke.models.layer_groups import EntryKind, PageShape, StatePages, entry_places, layer_groups
from twostroke.models.recurrent import STATE_VECTORS, GatedDeltaNet, Mamba2, RecurrentMixer, ShortConvolution
from twostroke.models.rope import NO_ROPE, Rope, amplitudes, frequencies
from twostroke.sampling.draw import Draw, Noise
from twostroke.sampling.statistics import RowStatistics, combine, new_summaries, sound
from twostroke.system.scratch import ScratchMemory, address

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "swiglu_oai")  # in the order of native/decoder.h
KV_DTYPES = ("bfloat16", "int8")  # in the order of native/attention_pages.h; the first unless another is asked for
STATES: tuple[type[RecurrentMixer], ...] = (GatedDeltaNet, ShortConvolution, Mamba2)  # in the order of native/decoder.h
STATE_ATTENTION = Attention(1, 1, 32, 1.0, NO_ROPE)  # what a block with a state has in its place
SKETCH_ROWS = 8  # maximum number of rows in one search with the head's sketch


class NativeModel:
    """Implements `CompiledModel` and `LogitsHead`. Hidden states are float32 arrays, [R, hidden]."""

    def __init__(
        self,
        team: ThreadTeam,
        statistics: NativeStatistics,
        config: ModelConfig,
        kv_dtype: str,
        weights: WeightSource,
        call: Callable[..., None] | None = None,
    ) -> None:
        """`kv_dtype`: one of `KV_DTYPES`. `call` is `SharedMemoryRanks.call` if there are other ranks."""
        self.config, self.team, self.library = config, team, team.library
        self.statistics, self._call = statistics, call or _alone
        self.turned = list(dict.fromkeys(one for attention in config.attentions for one in _turned(attention)))
        self.half_dim = max((one.head_dim for one in config.attentions), default=0) // 2
        self.q_width = max((one.num_heads * one.head_dim for one in config.attentions), default=0)
        self.places = entry_places(config, kv_dtype)
        kinds: tuple[EntryKind, ...] = ("rows", "inputs")
        self.state_places = {kind: entry_places(config, kv_dtype, kind) for kind in kinds}
        shape = PageShape(layer_groups(config, kv_dtype), PAGE_SIZE, kv_dtype)
        self.state_pages = StatePages(config.state_layers, shape.page_bytes if config.state_layers else 0)
        self.turns = np.empty((0, 0)), np.empty((0, 0))
        self.scratch, self._lock = ScratchMemory(), threading.Lock()
        # What a pass reads has to outlive it, and members of the team may be late.
        self.lent: list[np.ndarray] = []
        self.kv: list[np.ndarray] = []
        self.matrices: list[PackedMatrix] = []
        # An embedding that is not also the head is only looked up, never multiplied.
        self.table = None if config.tied else weights.table(team, "embed")
        self.head = self._matrix(weights, config.head_tensor)
        mlps = [layer.feed_forward for layer in config.layers]
        fields = NativeConfig(
            hidden=config.hidden_size,
            intermediate=max((0, *(mlp.intermediate_size for mlp in mlps if isinstance(mlp, GatedMLP)))),
            activation=max((ACTIVATIONS.index(mlp.activation) for mlp in mlps), default=0),  # all have the same
            num_ropes=len(self.turned),
            kv_format=KV_DTYPES.index(kv_dtype),
            q_width=self.q_width,
            kv_width=max((one.num_kv_heads * one.head_dim for one in config.attentions), default=0),
            half_dim=self.half_dim,
            vocab=self.head.shape[0],
            embedding_format=0 if config.tied else weights.table_format(self.table),
            eps=config.norm_eps,
            embedding_scale=config.embedding_scale,
            residual_scale=config.residual_scale,
            score_cap=config.score_cap or 0,
            logit_cap=config.logit_cap or 0,
        )
        self.handle = self.library.twostroke_model(
            team.handle,
            ctypes.byref(fields),
            self.head.handle if config.tied else None,
            self.head.handle,
            self._lend(weights.vector("norm") * np.float32(config.logit_scale)),
        )
        team.free_with(self, self.library.twostroke_model_free, self.handle, self.lent, self.kv)
        self.inputs = weights.table(team, "inputs.embed") if config.token_inputs else None
        if config.token_inputs:
            matrix, norm = self._matrix(weights, "inputs.projection").handle, self._vector(weights, "inputs.norm")
            format = weights.table_format(self.inputs)
            self.library.twostroke_token_inputs(self.handle, matrix, norm, config.token_inputs, format)
        for i, layer in enumerate(config.layers):
            self._add(i, layer, weights)
        if weights.handle is not None:
            self.library.twostroke_join(self.handle, weights.handle)
        bounds = weights.largest([matrix.bound() for matrix in self.matrices])
        for matrix, bound in zip(self.matrices, bounds, strict=True):
            matrix.bound(bound)
        # There is no sketch if the head has as few bits itself, or has weights that are not finite.
        self.sketch_bytes = self.library.twostroke_sketch(self.handle)
        without, failed = weights.largest([self.sketch_bytes == 0, self.sketch_bytes < 0])
        if failed:
            raise MemoryError("no memory for the sketch of the head: free some, or open a smaller model")
        if without:
            self.library.twostroke_drop_sketch(self.handle)

    def _add(self, index: int, layer: Layer, weights: WeightSource) -> None:
        prefix = f"layers.{index}."
        state = layer.mixer if isinstance(layer.mixer, RecurrentMixer) else None
        attention = STATE_ATTENTION if isinstance(layer.mixer, RecurrentMixer) else layer.mixer
        norms = ["attn_norm", "mlp_norm"] if layer.pre_norms else ["", ""]
        norms += [f"{part}_norm" if attention.qk_norm and part in attention.projections else "" for part in "qk"]
        vectors = [self._vector(weights, prefix + name) if name else None for name in norms]
        vectors.append(self._lend(np.ones(attention.head_dim, np.float32)) if attention.value_norm else None)
        after = ["attn_post_norm", "mlp_post_norm"] if layer.post_norms else ["", ""]
        after += ["scale" if layer.scaled else "", "input_norm" if self.inputs else ""]
        vectors += [self._vector(weights, prefix + name) if name else None for name in after]
        pointers = (ctypes.c_void_p * 9)(*vectors)
        own = attention.source is None
        heads = weights.share.kv_heads(attention)
        group, place = self.places.get(index, (0, 0))
        ropes = [0, 0] if state else [self.turned.index(one) for one in _turned(attention)]
        shape = NativeAttention(
            attention.num_heads,
            *attention.kv_shape,
            heads.start,
            heads.stop,
            weights.share.any_head(attention),
            *ropes,
            attention.window or 0,
            group,
            place,
            own,
            attention.whole_norm,
            attention.scale,
            self._vector(weights, f"{prefix}sink_logits") if attention.sink_logits else None,
        )
        mlp = layer.feed_forward
        each = [""] if isinstance(mlp, GatedMLP) else [f"experts.{e}." for e in range(mlp.count)]
        gate_up, down = ([f"{one}{part}" for one in each for part in parts] for parts in (("gate", "up"), ("down",)))
        selects = isinstance(mlp, Experts) and mlp.selection_bias
        biases = (ctypes.c_void_p * 6)(
            self._biases(weights, prefix, attention.projections if attention.bias else ()),
            self._biases(weights, prefix, "o" if attention.output_bias else ()),
            self._biases(weights, prefix, gate_up if mlp.bias else ()),
            self._biases(weights, prefix, down if mlp.bias else ()),
            self._biases(weights, prefix, (ROUTER,) if mlp.bias and isinstance(mlp, Experts) else ()),
            self._vector(weights, prefix + SELECTION_BIAS) if selects else None,
        )
        described = biases, ctypes.byref(shape)
        parts = list((attention if state is None else state).projections)
        names = dict.fromkeys(parts)  # one matrix for k and v, if v is k
        turned = dict(zip(names, self._handles(weights, prefix, *names), strict=True))
        first = [turned[part] for part in parts]
        o = self._handles(weights, prefix, "o" if state is None else "state_o")
        matrices = [*first[:3], *([] if own else [None, None]), *o]
        self._add_block(prefix, mlp, weights, pointers, matrices, described)
        if state is not None:
            shape = self._state(index, state, weights)
            self.library.twostroke_add_state(self.handle, _pointers(first), ctypes.byref(shape))
        elif attention.output_gate:
            first += self._handles(weights, prefix, "q_gate")
            self.library.twostroke_add_gate(self.handle, _pointers(first))

    def _state(self, index: int, state: RecurrentMixer, weights: WeightSource) -> NativeState:
        prefix, pages = f"layers.{index}.", self.state_pages
        vectors = {name: weights.vector(f"{prefix}{name}") for name in state.vectors}
        vectors["conv"] = np.ascontiguousarray(vectors["conv"].reshape(state.conv_size, state.conv_width).T)
        return NativeState(
            STATES.index(type(state)),
            state.num_k_heads,
            state.num_v_heads,
            state.k_dim,
            state.v_dim,
            state.conv_width,
            state.tiled,
            *self.state_places["rows"].get(index, (-1, 0)),
            *self.state_places["inputs"][index],
            pages.starts[index],
            state.snapshot_row,
            pages.rows_in_page(index),
            *(self._lend(vectors[name]) if name in vectors else None for name in STATE_VECTORS),
        )

    def _add_block(
        self,
        prefix: str,
        mlp: GatedMLP | Experts,
        weights: WeightSource,
        pointers: ctypes.Array[ctypes.c_void_p],
        matrices: list[int | None],
        described: tuple[object, object],
    ) -> None:
        """The MLP or the experts of a block, whose other parts are there."""
        if isinstance(mlp, GatedMLP):
            inputs = ("input_gate", "input_projection") if self.inputs else ()
            matrices += self._handles(weights, prefix, "gate", "up", "down", *inputs)
            self.library.twostroke_add_block(self.handle, pointers, _pointers(matrices), *described)
            return
        experts: list[int | None] = []
        for e in range(mlp.count):
            experts += self._handles(weights, f"{prefix}experts.{e}.", "gate", "up", "down")
        gate = self._vector(weights, prefix + SHARED_GATE) if mlp.shared_size and mlp.shared_gated else None
        if mlp.shared_size:
            experts += self._handles(weights, f"{prefix}shared.", "gate", "up", "down")
        self.library.twostroke_add_experts_block(
            self.handle,
            pointers,
            _pointers(matrices),
            *described,
            self._vector(weights, f"{prefix}{ROUTER}"),
            mlp.count,
            mlp.chosen,
            mlp.normalized,
            mlp.sigmoid,
            _pointers(experts),
            bool(mlp.shared_size),
            gate,
        )

    def _biases(self, weights: WeightSource, prefix: str, parts: Sequence[str]) -> int | None:
        """Those of these parts, one after another; None without parts."""
        return self._lend(np.concatenate([weights.vector(f"{prefix}{part}_bias") for part in parts])) if parts else None

    def _handles(self, weights: WeightSource, prefix: str, *names: str) -> list[int | None]:
        return [self._matrix(weights, prefix + name).handle for name in names]

    def _matrix(self, weights: WeightSource, name: str) -> PackedMatrix:
        self.matrices.append(PackedMatrix(self.team, weights.matrix(name)))
        return self.matrices[-1]

    def _vector(self, weights: WeightSource, name: str) -> int:
        return self._lend(weights.vector(name))

    def _lend(self, array: np.ndarray) -> int:
        self.lent.append(array)
        return address(array)

    # A step ----------------------------------------------------------------------------------------------------

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        config, kv, token_ids = self.config, memory.storages, resolved(batch)
        hidden = np.empty((len(batch.wanted), config.hidden_size), np.float32)
        rope_tables = self._rope_tables_for(int(batch.positions.max()) + 1)
        row_starts = np.array(batch.row_starts, np.int32)
        span_starts = np.array([0, *accumulate(len(table) for table in batch.tables)], np.int32)
        spans = _by_group(np.concatenate(batch.tables, dtype=np.int32))
        fields = NativeBatch(
            batch.num_rows,
            len(batch.tables),
            *(address(array) for array in (token_ids, batch.pages, batch.slots, batch.positions)),
            *(address(array) for array in (row_starts, span_starts, spans, *rope_tables)),
            rope_tables[0].shape[1],
            num_wanted=len(batch.wanted),
            wanted=address(batch.wanted),
        )
        if self.table is not None:
            embeddings = np.frombuffer(self.table.read(token_ids.tolist()), np.uint8)
            fields.embeddings = address(embeddings)
        if self.inputs is not None:
            token_inputs = np.frombuffer(self.inputs.read(token_ids.tolist()), np.uint8)
            fields.token_inputs = address(token_inputs)
        if batch.dropout is not None:
            fields.dropout = address(batch.dropout)
        steps = self._state_fields(batch.states)  # which the pass copies
        for name, array in steps.items():
            setattr(fields, name, array if isinstance(array, int) else address(array))
        queries = None
        if batch.query_rows is not None:
            queries = np.empty((config.num_layers, len(batch.query_rows), self.q_width), np.float32)
            fields.num_queries = len(batch.query_rows)
            fields.query_rows, fields.queries = address(batch.query_rows), address(queries)
        states = None
        if batch.state_rows is not None:
            states = np.empty((config.num_layers + 1, len(batch.state_rows), config.hidden_size), np.float32)
            fields.num_states = len(batch.state_rows)
            fields.state_rows, fields.states = address(batch.state_rows), address(states)
        with self._lock:
            if not (self.kv and self.kv[0] is kv[0]):
                self.team.settle()
                self.kv[:], self.strides = kv, array_strides(kv)
            places = self.handle, ctypes.byref(fields), address(kv[0]), self.strides, address(hidden)
            self._call(self.library.twostroke_forward, *places)
        return ForwardOutput(HiddenRows.of(self, hidden), None if queries is None else self._by_head(queries), states)

    def _state_fields(self, steps: Sequence[StateStep]) -> dict[str, np.ndarray | int]:
        """What a batch says of recurrent layers."""
        count = self.state_pages.num_pages if self.config.state_layers else 0
        if not count:
            return {}
        assert steps, "a batch for recurrent layers says what of states each sequence reads"
        zeros = np.full(count, -1, np.int32)
        targets = [(s, *target) for s, step in enumerate(steps) for target in step.targets]
        ends = accumulate((len(step.targets) for step in steps), initial=0)
        return {
            "state_pages": count,
            "state_counts": np.array([step.rows for step in steps], np.int32),
            "state_sources": np.stack([step.source if len(step.source) else zeros for step in steps]).astype(np.int32),
            "target_starts": np.fromiter(ends, np.int32, len(steps) + 1),
            "target_sequences": np.array([s for s, _, _ in targets], np.int32),
            "target_rows": np.array([row for _, row, _ in targets], np.int32),
            "target_pages": np.array([frames for _, _, frames in targets], np.int32).reshape(-1, count),
        }

    def _by_head(self, queries: np.ndarray) -> np.ndarray:
        """[layers, R, width] -> [layers, R, Hq, D]: zeros where a layer has fewer heads, or smaller ones."""
        config, queries = self.config, queries[list(self.config.attention_layers)]
        if config.uniform:
            return queries.reshape(*queries.shape[:2], config.num_heads, config.head_dim)
        most, longest = max(a.num_heads for a in config.attentions), max(a.head_dim for a in config.attentions)
        heads = np.zeros((*queries.shape[:2], most, longest), np.float32)
        for i, (one, row) in enumerate(zip(config.attentions, queries, strict=True)):
            own = row[:, : one.num_heads * one.head_dim].reshape(-1, one.num_heads, one.head_dim)
            heads[i, :, : one.num_heads, : one.head_dim] = own
        return heads

    def _rope_tables_for(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin of at least `count` positions, by amplitude and growth: [turned, positions, half_dim] each."""
        if self.turns[0].shape[1] < count:
            positions = np.arange(max(1024, 1 << (count - 1).bit_length()), dtype=np.float32)[:, None]
            angles = np.zeros((len(self.turned), len(positions), self.half_dim), np.float32)
            for angle, (rope, dim, _) in zip(angles, self.turned, strict=True):
                angle[:, : dim // 2] = positions * frequencies(rope, dim)
            turns = tuple(of(angles, dtype=np.float64).astype(np.float32) for of in (np.cos, np.sin))
            for i, (rope, dim, growth) in enumerate(self.turned):
                size = amplitudes(rope, dim) if growth is None else amplitudes(rope, dim) * growth.factors(positions)
                for turn in turns:
                    turn[i, :, : dim // 2] *= size
            self.turns = turns[0], turns[1]
        return self.turns

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> KnownTokens:
        return sample_rows(self, rows, draws)

    def rows_of(self, states: np.ndarray) -> HiddenRows:
        return HiddenRows.of(self, floats(states))

    # Its head --------------------------------------------------------------------------------------------------

    def logits(self, hidden: np.ndarray) -> tuple[np.ndarray, RowStatistics]:
        hidden, count = floats(hidden), len(hidden)
        out, summaries = self.scratch.array(count, self.head.padded), new_summaries(count)
        places = self.handle, address(hidden), count, address(out), address(summaries)
        self._call(self.library.twostroke_logits, *places)
        if self.head.padded > (vocab := self.head.shape[0]):
            out = out[:, :vocab].copy()
        return out, combine(summaries)

    def search(self, hidden: np.ndarray, noises: Sequence[Noise]) -> list[int]:
        """Uses the head's sketch if that is faster, and all logits if some are not finite."""
        ids = self._search(hidden, noises, None)
        if min(ids) >= 0:
            return ids
        logits = self.logits(hidden)[0]
        return sound(logits, self.statistics.draw(logits, noises))

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def copy(self, hidden: np.ndarray) -> np.ndarray:
        return hidden.copy()

    def draw_by_sketch(self, hidden: np.ndarray, noises: Sequence[Noise]) -> tuple[list[int], np.ndarray]:
        """Search with the sketch, even if it is not faster (for tests). At most SKETCH_ROWS rows.

        [W, hidden] -> W ids (-1 if logits are not finite), and [W, vocab / PANEL] upper bounds of logits plus noise in
        each panel.
        """
        highest = np.empty((len(hidden), self.head.padded // PANEL), np.float32)
        return self._search(hidden, noises, highest), highest

    def _search(self, hidden: np.ndarray, noises: Sequence[Noise], highest: np.ndarray | None) -> list[int]:
        hidden, ids = floats(hidden), np.empty(len(hidden), np.int32)
        places = self.handle, address(hidden), len(ids), packed_noises(noises), address(ids)
        self._call(self.library.twostroke_search, *places, None if highest is None else address(highest))
        return ids.tolist()


def _turned(attention: Attention) -> list[tuple[Rope, int, QueryGrowth | None]]:
    """How keys and queries are turned."""
    return [(attention.rope, attention.head_dim, growth) for growth in (None, attention.growth)]


def _by_group(spans: np.ndarray) -> np.ndarray:
    """Span tables [n, 3 + groups] as kernels read them: [groups, n, 4], with one page each."""
    if spans.shape[1] == PAGE + 1:
        return spans
    each = np.empty((spans.shape[1] - PAGE, len(spans), PAGE + 1), np.int32)
    each[:, :, :PAGE], each[:, :, PAGE] = spans[:, :PAGE], spans[:, PAGE:].T
    return each


def _alone(function: Callable[..., int], *args: object) -> None:
    """Call a native function in a single process."""
    function(*args)


def _pointers(handles: Sequence[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(handles))(*handles)
