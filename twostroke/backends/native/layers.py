"""The layers of a native model, which kernels are told one by one, and the weights that they read."""

import ctypes
from collections.abc import Sequence

import numpy as np

from twostroke.backends.native.library import NativeAttention, NativeLatent, NativeState, ThreadTeam
from twostroke.backends.native.rope_tables import RopeTables
from twostroke.backends.native.weight_sources import WeightSource
from twostroke.backends.native.weights import PackedMatrix
from twostroke.models.config import Attention, Experts, GatedMLP, Layer, ModelConfig
from twostroke.models.latent import Latent
from twostroke.models.layer_groups import StatePages, entry_places
from twostroke.models.recurrent import STATE_VECTORS, GatedDeltaNet, Mamba2, RecurrentMixer, ShortConvolution
from twostroke.models.rope import NO_ROPE
from twostroke.models.tensor_shapes import EXPERT_NORMS, FACTORS, ROUTER, SELECTION_BIAS, SHARED_GATE
from twostroke.system.scratch import address

STATES: tuple[type[RecurrentMixer], ...] = (GatedDeltaNet, ShortConvolution, Mamba2)  # in the order of native/decoder.h
STATE_ATTENTION = Attention(1, 1, 32, 1.0, NO_ROPE)  # what a block with a state has in its place


class LentWeights:
    """Packed matrices and vectors that kernels read by their addresses."""

    def __init__(self, team: ThreadTeam, source: WeightSource) -> None:
        # source: where they come from
        self.team, self.source = team, source
        # matrices, lent: those that are in use
        self.lent: list[np.ndarray] = []
        self.matrices: list[PackedMatrix] = []

    def biases(self, prefix: str, parts: Sequence[str]) -> int | None:
        """Those of these parts, one after another; None without parts."""
        vectors = [self.source.vector(f"{prefix}{part}_bias") for part in parts]
        return self.lend(np.concatenate(vectors)) if vectors else None

    def handles(self, prefix: str, *names: str) -> list[int | None]:
        """The handles of matrices whose names begin alike."""
        return [self.matrix(prefix + name).handle for name in names]

    def matrix(self, name: str) -> PackedMatrix:
        self.matrices.append(PackedMatrix(self.team, self.source.matrix(name)))
        return self.matrices[-1]

    def vector(self, name: str) -> int:
        return self.lend(self.source.vector(name))

    def lend(self, array: np.ndarray) -> int:
        """The address of an array, which is kept."""
        self.lent.append(array)
        return address(array)


class NativeLayers:
    """Adds layers to a model that kernels know by its handle."""

    def __init__(
        self,
        config: ModelConfig,
        kv_dtype: str,
        weights: LentWeights,
        ropes: RopeTables,
        states: StatePages,
        handle: int,
    ) -> None:
        self._config, self._weights, self._ropes, self._state_pages = config, weights, ropes, states
        self._library, self._handle = weights.team.library, handle
        self._places = entry_places(config, kv_dtype)
        self._state_places = {kind: entry_places(config, kv_dtype, kind) for kind in ("rows", "inputs")}

    def add(self, index: int, layer: Layer) -> None:
        """Add a layer, behind those that are there."""
        prefix, weights = f"layers.{index}.", self._weights
        state = layer.mixer if isinstance(layer.mixer, RecurrentMixer) else None
        attention = STATE_ATTENTION if isinstance(layer.mixer, RecurrentMixer) else layer.mixer
        norms = [name if name in layer.norms else "" for name in ("attn_norm", "mlp_norm")]
        norms += [f"{part}_norm" if attention.qk_norm and part in attention.projections else "" for part in "qk"]
        vectors = [weights.vector(prefix + name) if name else None for name in norms]
        vectors.append(weights.lend(np.ones(attention.head_dim, np.float32)) if attention.value_norm else None)
        after = ["attn_post_norm", "mlp_post_norm"] if layer.post_norms else ["", ""]
        after += ["scale" if layer.scaled else "", "input_norm" if self._config.token_inputs else ""]
        vectors += [weights.vector(prefix + name) if name else None for name in after]
        pointers = (ctypes.c_void_p * 9)(*vectors)
        own = attention.source is None
        heads = weights.source.share.kv_heads(attention)
        group, place = self._places.get(index, (0, 0))
        ropes = [0, 0] if state else self._ropes.numbers(attention)
        shape = NativeAttention(
            attention.num_heads,
            *attention.kv_shape,
            heads.start,
            heads.stop,
            weights.source.share.any_head(attention),
            *ropes,
            attention.window or 0,
            group,
            place,
            own,
            attention.whole_norm,
            attention.both_ways,
            attention.scale,
            weights.vector(f"{prefix}sink_logits") if attention.sink_logits else None,
        )
        mlp = layer.feed_forward
        each = [""] if isinstance(mlp, GatedMLP) else [f"experts.{e}." for e in range(mlp.count)]
        gate_up, down = ([f"{one}{part}" for one in each for part in parts] for parts in (mlp.inputs, ("down",)))
        selects = isinstance(mlp, Experts) and mlp.selection_bias
        biases = (ctypes.c_void_p * 6)(
            weights.biases(prefix, attention.projections if attention.bias else ()),
            weights.biases(prefix, "o" if attention.output_bias else ()),
            weights.biases(prefix, gate_up if mlp.bias else ()),
            weights.biases(prefix, down if mlp.bias else ()),
            weights.biases(prefix, (ROUTER,) if mlp.bias and isinstance(mlp, Experts) else ()),
            weights.vector(prefix + SELECTION_BIAS) if selects else None,
        )
        described = biases, ctypes.byref(shape)
        parts = list((attention if state is None else state).projections)
        names = dict.fromkeys(parts)  # one matrix for k and v, if v is k
        turned = dict(zip(names, weights.handles(prefix, *names), strict=True))
        first = [turned[part] for part in parts]
        o = weights.handles(prefix, "o" if state is None else "state_o")
        matrices = [*first[:3], *([] if own else [None, None]), *o]
        if attention.latent is not None:
            matrices = [first[1], None, None, *o]
        self._add_block(prefix, mlp, pointers, matrices, described)
        if layer.beside:
            self._library.twostroke_add_beside(self._handle)
        if state is not None:
            shape = self._state(index, state)
            self._library.twostroke_add_state(self._handle, _pointers(first), ctypes.byref(shape))
        elif (latent := attention.latent) is not None:
            self._add_latent(prefix, first, latent, range(attention.num_heads))
        elif attention.output_gate:
            first += weights.handles(prefix, "q_gate")
            self._library.twostroke_add_gate(self._handle, _pointers(first))

    def _add_latent(self, prefix: str, first: list[int | None], latent: Latent, heads: range) -> None:
        """The latent entries of the last block, whose first product is there."""
        weights, narrow = self._weights, latent.query_rank is not None
        norm = weights.vector(f"{prefix}q_down_norm") if narrow else None
        sizes = latent.rank, latent.rotated, latent.plain, latent.value
        shape = NativeLatent(*sizes, norm, weights.vector(f"{prefix}kv_norm"))
        up = weights.handles(prefix, "q_up") if narrow else [None]
        for head in heads:
            up += weights.handles(f"{prefix}heads.{head}.", "k_up", "v_up")
        self._library.twostroke_add_latent(self._handle, _pointers(first + up), ctypes.byref(shape))

    def _state(self, index: int, state: RecurrentMixer) -> NativeState:
        prefix, pages, weights = f"layers.{index}.", self._state_pages, self._weights
        vectors = {name: weights.source.vector(f"{prefix}{name}") for name in state.vectors}
        vectors["conv"] = np.ascontiguousarray(vectors["conv"].reshape(state.conv_size, state.conv_width).T)
        return NativeState(
            STATES.index(type(state)),
            state.num_k_heads,
            state.num_v_heads,
            state.k_dim,
            state.v_dim,
            state.conv_width,
            state.tiled,
            *self._state_places["rows"].get(index, (-1, 0)),
            *self._state_places["inputs"][index],
            pages.starts[index],
            state.snapshot_row,
            pages.rows_in_page(index),
            *(weights.lend(vectors[name]) if name in vectors else None for name in STATE_VECTORS),
        )

    def _add_block(
        self,
        prefix: str,
        mlp: GatedMLP | Experts,
        pointers: ctypes.Array[ctypes.c_void_p],
        matrices: list[int | None],
        described: tuple[object, object],
    ) -> None:
        """The MLP or the experts of a block, whose other parts are there."""
        weights = self._weights
        inputs = ("input_gate", "input_projection") if self._config.token_inputs else ()
        matrices += self._mlp(prefix, mlp) if isinstance(mlp, GatedMLP) and mlp.intermediate_size else [None] * 3
        matrices += weights.handles(prefix, *inputs)
        if isinstance(mlp, GatedMLP):
            self._library.twostroke_add_block(self._handle, pointers, _pointers(matrices), *described)
            return
        experts: list[int | None] = []
        for e in range(mlp.count):
            experts += self._mlp(f"{prefix}experts.{e}.", mlp)
        gate = weights.vector(prefix + SHARED_GATE) if mlp.shared_size and mlp.shared_gated else None
        if mlp.shared_size:
            experts += self._mlp(f"{prefix}shared.", mlp)
        self._library.twostroke_add_experts_block(
            self._handle,
            pointers,
            _pointers(matrices),
            *described,
            weights.vector(f"{prefix}{ROUTER}"),
            mlp.count,
            mlp.chosen,
            mlp.normalized,
            mlp.sigmoid,
            mlp.groups,
            mlp.groups_chosen,
            mlp.scale,
            _pointers(experts),
            bool(mlp.shared_size),
            gate,
        )
        if mlp.own_norms:
            norms = _pointers([weights.vector(prefix + name) for name in EXPERT_NORMS])
            factors = weights.vector(prefix + FACTORS) if mlp.factors else None
            self._library.twostroke_add_expert_norms(self._handle, norms, factors)

    def _mlp(self, prefix: str, mlp: GatedMLP | Experts) -> list[int | None]:
        """The handles of gate, up and down; None where there is no gate."""
        found = self._weights.handles(prefix, *mlp.inputs, "down")
        return [None] * (3 - len(found)) + found


def _pointers(handles: Sequence[int | None]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(handles))(*handles)
