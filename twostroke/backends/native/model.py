"""A model on the native backend: the forward pass, in one call, and the head."""

import ctypes
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from twostroke.backends.hidden_inputs import HiddenInputs, HiddenJoin
from twostroke.backends.interface import PAGE, ForwardOutput, LazyLogits, RaggedBatch, StateStep
from twostroke.backends.lazy_logits import HiddenRows, KnownTokens, resolved, sample_rows
from twostroke.backends.native.layers import LentWeights, NativeLayers
from twostroke.backends.native.library import NativeBatch, NativeConfig, ThreadTeam, array_strides
from twostroke.backends.native.rope_tables import RopeTables
from twostroke.backends.native.statistics import NativeStatistics, packed_noises
from twostroke.backends.native.weight_sources import WeightSource
from twostroke.backends.native.weights import PAGE_SIZE, PackedMatrix, floats
from twostroke.backends.page_memory import PageMemory
from twostroke.models.config import GatedMLP, ModelConfig
from twostroke.models.feed_forward import Activation
from twostroke.models.layer_groups import PageShape, StatePages, layer_groups
from twostroke.sampling.draw import Draw, Noise
from twostroke.sampling.statistics import RowStatistics, combine, new_summaries, sound
from twostroke.system.scratch import ScratchMemory, address

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "swiglu_oai", "relu2")  # in the order of native/decoder.h
# In the order of native/attention_pages.h; the first unless another is asked for.
KV_DTYPES = ("bfloat16", "int8", "k8v4")
SKETCH_ROWS = 8  # maximum number of rows in one search with the head's sketch


class NativeModel:
    """Implements `CompiledModel` and `LogitsHead`. Hidden states are contiguous float32 arrays, [R, hidden]."""

    def __init__(
        self,
        team: ThreadTeam,
        statistics: NativeStatistics,
        config: ModelConfig,
        kv_dtype: str,
        source: WeightSource,
        call: Callable[..., None] | None = None,
        join: HiddenJoin | None = None,
        head: PackedMatrix | None = None,
        resident: bool = True,
    ) -> None:
        """`kv_dtype`: one of `KV_DTYPES`. `call` is `SharedMemoryRanks.call` if there are other ranks.

        `join`: of a model that takes hidden states; `head`: another model's, which is this one's too; `resident`: keep
        all layers in memory.
        """
        self.config, self.team, self.library, self.kv_dtype = config, team, team.library, kv_dtype
        self.statistics, self._call = statistics, call or _alone
        self.weights, self._ropes = LentWeights(team, source), RopeTables(config)
        self.q_width = max((one.num_heads * one.head_dim for one in config.attentions), default=0)
        shape = PageShape(layer_groups(config, kv_dtype), PAGE_SIZE, kv_dtype)
        self.state_pages = StatePages(config.state_layers, shape.page_bytes if config.state_layers else 0)
        self.scratch, self._lock = ScratchMemory(), threading.Lock()
        self.kv: list[np.ndarray] = []  # what a pass reads has to outlive it, and members of the team may be late
        # An embedding that is not also the head is only looked up, never multiplied.
        self.table = None if config.tied else source.table(team, "embed")
        self.head = self.weights.matrix(config.head_tensor) if head is None else head
        self._join = None if join is None else (join, self.weights.matrix("join.projection"))
        mlps = [layer.feed_forward for layer in config.layers]
        self._fields = NativeConfig(
            hidden=config.hidden_size,
            intermediate=max((0, *(mlp.intermediate_size for mlp in mlps if isinstance(mlp, GatedMLP)))),
            activation=max((ACTIVATIONS.index(mlp.activation) for mlp in mlps), default=0),  # all have the same
            num_ropes=len(self._ropes.turned),
            kv_format=KV_DTYPES.index(kv_dtype),
            q_width=self.q_width,
            kv_width=max((one.num_kv_heads * one.head_dim for one in config.attentions), default=0),
            half_dim=self._ropes.half_dim,
            vocab=self.head.shape[0],
            embedding_format=0 if config.tied else source.table_format(self.table),
            eps=config.norm_eps,
            embedding_scale=config.embedding_scale,
            residual_scale=config.residual_scale,
            score_cap=config.score_cap or 0,
            logit_cap=config.logit_cap or 0,
        )
        self._norm = self.weights.lend(source.vector("norm") * np.float32(config.logit_scale))
        self.inputs = source.table(team, "inputs.embed") if config.token_inputs else None
        self.handle = self.with_layers(self.weights, range(config.num_layers if resident else 0))
        # There is no sketch if the head has as few bits itself, or has weights that are not finite.
        self.sketch_bytes = self.library.twostroke_sketch(self.handle)
        without, failed = source.largest([self.sketch_bytes == 0, self.sketch_bytes < 0])
        if failed:
            raise MemoryError("no memory for the sketch of the head: free some, or open a smaller model")
        if without:
            self.library.twostroke_drop_sketch(self.handle)

    def with_layers(self, weights: LentWeights, indices: range) -> int:
        """Some layers as kernels know them; freed with `weights`, into which they are read."""
        config, source, library = self.config, weights.source, self.library
        embed = self.head.handle if config.tied else None
        handle: int = library.twostroke_model(
            self.team.handle, ctypes.byref(self._fields), embed, self.head.handle, self._norm
        )
        self.team.free_with(weights, library.twostroke_model_free, handle, self.weights.lent, weights.lent, self.kv)
        if config.token_inputs:
            matrix, norm = weights.matrix("inputs.projection").handle, weights.vector("inputs.norm")
            format = source.table_format(self.inputs)
            library.twostroke_token_inputs(handle, matrix, norm, config.token_inputs, format)
        layers = NativeLayers(config, self.kv_dtype, weights, self._ropes, self.state_pages, handle)
        for i in indices:
            layers.add(i, config.layers[i])
        if source.handle is not None:
            library.twostroke_join(handle, source.handle)
        bounds = source.largest([matrix.bound() for matrix in weights.matrices])
        for matrix, bound in zip(weights.matrices, bounds, strict=True):
            matrix.bound(bound)
        return handle

    # A step ----------------------------------------------------------------------------------------------------

    def forward(self, batch: RaggedBatch[np.ndarray], memory: PageMemory) -> ForwardOutput:
        made = self.run(self.handle, len(self.config.layers), batch, memory)
        return made if made.queries is None else made._replace(queries=self.by_head(made.queries))

    def run(
        self,
        handle: int,
        layers: int,
        batch: RaggedBatch[np.ndarray],
        memory: PageMemory,
        entered: np.ndarray | None = None,
    ) -> ForwardOutput:
        """A pass through some layers. Queries are [layers, R, width], as kernels have them.

        `entered`: what the first of them reads, [N, hidden] float32, if not the embeddings.
        """
        config, kv, token_ids = self.config, memory.storages, resolved(batch)
        hidden = np.empty((len(batch.wanted), config.hidden_size), np.float32)
        rope_tables = self._ropes.of_positions(int(batch.positions.max()) + 1)
        row_starts = np.array(batch.row_starts, np.int32)
        span_starts = np.array([0, *accumulate(len(table) for table in batch.tables)], np.int32)
        spans = _by_group(np.concatenate(batch.tables, dtype=np.int32))
        fields = NativeBatch(
            len(token_ids),
            len(batch.tables),
            *(address(array) for array in (token_ids, batch.pages, batch.slots, batch.positions)),
            *(address(array) for array in (row_starts, span_starts, spans, *rope_tables)),
            rope_tables[0].shape[1],
            num_wanted=len(batch.wanted),
            wanted=address(batch.wanted),
        )
        if batch.hidden is not None:
            entered = self._joined(token_ids, batch.hidden)
        if entered is not None:
            fields.hidden = address(entered)
        elif self.table is not None:
            embeddings = np.frombuffer(self.table.read(token_ids.tolist()), np.uint8)
            fields.embeddings = address(embeddings)
        if self.inputs is not None:
            token_inputs = np.frombuffer(self.inputs.read(token_ids.tolist()), np.uint8)
            fields.token_inputs = address(token_inputs)
        if batch.dropout is not None:
            fields.dropout = address(batch.dropout)
        steps = self._state_fields(batch.states)  # which the pass copies
        if batch.biases:
            steps["biases"] = np.array([0 if one is None else address(one) for one in batch.biases], np.int64)
            steps["bias_lengths"] = np.array([0 if one is None else one.shape[2] for one in batch.biases], np.int32)
        for name, array in steps.items():
            setattr(fields, name, array if isinstance(array, int) else address(array))
        queries = None
        if batch.query_rows is not None:
            queries = np.empty((layers, len(batch.query_rows), self.q_width), np.float32)
            fields.num_queries = len(batch.query_rows)
            fields.query_rows, fields.queries = address(batch.query_rows), address(queries)
        states = None
        if batch.state_rows is not None:
            states = np.empty((layers + 1, len(batch.state_rows), config.hidden_size), np.float32)
            fields.num_states = len(batch.state_rows)
            fields.state_rows, fields.states = address(batch.state_rows), address(states)
        with self._lock:
            if not (self.kv and self.kv[0] is kv[0]):
                self.team.settle()
                self.kv[:], self.strides = kv, array_strides(kv)
            places = handle, ctypes.byref(fields), address(kv[0]), self.strides, address(hidden)
            self._call(self.library.twostroke_forward, *places)
        return ForwardOutput(HiddenRows.of(self, hidden), queries, states)

    def _joined(self, token_ids: np.ndarray, hidden: HiddenInputs) -> np.ndarray:
        """What the first layer reads: [N, hidden] float32."""
        assert self._join is not None, "the model takes no hidden states"
        (join, projection), table = self._join, self.table or self.head
        embeddings = np.stack([table.row(token) for token in token_ids.tolist()]) * self.config.embedding_scale
        with self._lock:
            return projection.multiply(join(embeddings.astype(np.float32), hidden))

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

    def by_head(self, queries: np.ndarray) -> np.ndarray:
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

    def sample(self, rows: Sequence[LazyLogits], draws: Sequence[Draw]) -> KnownTokens:
        return sample_rows(self, rows, draws)

    def rows_of(self, states: np.ndarray) -> HiddenRows:
        return HiddenRows.of(self, floats(states))

    # Its head --------------------------------------------------------------------------------------------------

    def logits(self, hidden: np.ndarray) -> tuple[np.ndarray, RowStatistics]:
        count = len(hidden)
        out, summaries = self.scratch.array(count, self.head.padded), new_summaries(count)
        places = self.handle, address(hidden), count, address(out), address(summaries)
        self._call(self.library.twostroke_logits, *places)
        if self.head.padded > (vocab := self.head.shape[0]):
            out = out[:, :vocab].copy()
        return out, combine(summaries)

    def search(self, hidden: np.ndarray, noises: Sequence[Noise]) -> list[int]:
        """Uses the head's sketch if that is faster, and all logits if some are not finite."""
        ids = np.empty(len(hidden), np.int32)
        places = self.handle, address(hidden), len(ids), packed_noises(noises), address(ids)
        self._call(self.library.twostroke_search, *places, None)
        if ids.min() >= 0:
            return ids.tolist()
        logits = self.logits(hidden)[0]
        return sound(logits, self.statistics.draw(logits, noises))

    def join(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def copy(self, hidden: np.ndarray) -> np.ndarray:
        return hidden.copy()

    def to_host(self, hidden: np.ndarray) -> np.ndarray:
        return hidden.astype(np.float32)


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
