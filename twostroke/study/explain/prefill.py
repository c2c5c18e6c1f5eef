"""The prefill, explained: the tensors of a layer, the KV that is stored, and the cost."""

from dataclasses import dataclass

from twostroke.backends.interface import PAGE
from twostroke.kv import spans
from twostroke.kv.cache import KVCache
from twostroke.kv.geometry import layers_by_kind
from twostroke.models.config import Experts, ModelConfig
from twostroke.models.cost import SequenceRows, attended
from twostroke.study.explain.shown_tokens import Candidate
from twostroke.study.explain.step_work import StepWork


@dataclass(frozen=True)
class LayerTensor:
    """One tensor on its way through a layer."""

    name: str  # "Q", "scores", ..
    # axes, dims: what each dimension counts, and its size
    axes: tuple[str, ...]
    dims: tuple[int, ...]
    made: str  # how it is made
    stored: bool = False  # whether it stays, in the KV cache


@dataclass(frozen=True)
class StoredLayers:
    """Layers of one shape and window: in each, an entry has 2 x KV heads x head_dim numbers, or half where K is V.

    `window`: entries further back are given up, in whole pages; None if all are kept.
    """

    layers: int
    kv_heads: int
    head_dim: int
    window: int | None
    one_part: bool = False


@dataclass(frozen=True)
class StoredStates:
    """What recurrent layers keep in place of K and V."""

    layers: int  # their number
    # heads, k_dim, v_dim: of a layer's state, float32; inputs: of its convolution, numbers that later tokens see
    heads: int
    k_dim: int
    v_dim: int
    inputs: int
    chunk: int  # positions between two snapshots of the states
    snapshots: int  # those that are kept; snapshot_bytes: of one, all layers
    snapshot_bytes: int
    rows: int  # tokens since the last snapshot that is needed; row_bytes: of the rows of one, all layers
    row_bytes: int
    bytes: int  # of all this, and of the last inputs of convolutions


@dataclass(frozen=True)
class StoredKV:
    """The KV cache after a prefill."""

    entries: int
    kinds: tuple[StoredLayers, ...]
    dtype: str
    entry_bytes: int  # K and V of one token in all layers: the sum over `kinds`
    bytes: int  # of the entries that are kept, and of states
    page_size: int
    pages: int
    states: StoredStates | None  # of recurrent layers; None if the model has none


@dataclass(frozen=True)
class PrefillExplanation:
    """Stroke one of the prompt.

    Attributes:
        attends: the entries that the last row attends to most, mean over layers and heads: (index, weight).
        token, probability: the first token, and its probability.
    """

    layer: int  # index of the layer whose shapes are given
    shapes: tuple[LayerTensor, ...]  # of that layer, for all rows of the prompt together
    pairs: int  # pairs of a query and a key that this layer attends, of n x n: no row sees a later entry
    stored: StoredKV
    work: StepWork
    steps: int  # how many steps the engine took for it
    seconds: float  # TTFT of the request that was timed: from its arrival to its first token
    attends: tuple[tuple[int, float], ...]
    candidates: tuple[Candidate, ...]  # the first token's
    token: Candidate


def layer_shapes(config: ModelConfig, layer: int, rows: int, entries: int) -> tuple[LayerTensor, ...]:
    """The tensors of a layer for `rows` rows, the last ones of `entries` entries."""
    one, hidden = config.layers[layer], config.hidden_size
    attention, mlp = one.attention, one.feed_forward
    heads, kv_heads, dim = attention.num_heads, attention.num_kv_heads, attention.head_dim
    gate = " x sigmoid(norm(hidden) W_gate)" if attention.output_gate else ""
    axes, made = ("rows", "KV heads", "head_dim"), {"K": "norm(hidden) W_K, turned by RoPE", "V": "norm(hidden) W_V"}
    if attention.latent is not None:
        made = {"K": "norm(norm(hidden) W_latent), which is V too, and a part that is turned by RoPE"}
    shapes = [
        LayerTensor("hidden", ("rows", "hidden"), (rows, hidden), "what the layer before made"),
        LayerTensor("Q", ("rows", "heads", "head_dim"), (rows, heads, dim), "norm(hidden) W_Q, turned by RoPE"),
        *(LayerTensor(name, axes, (rows, kv_heads, dim), how, True) for name, how in made.items()),
        LayerTensor("scores", ("heads", "rows", "entries"), (heads, rows, entries), "Q K^T x scale, tile by tile"),
        LayerTensor("attended", ("rows", "heads", "head_dim"), (rows, heads, dim), f"softmax(scores) V{gate}"),
        LayerTensor("hidden + attention", ("rows", "hidden"), (rows, hidden), "hidden + attended W_O"),
    ]
    if isinstance(mlp, Experts):
        wide = (rows, mlp.chosen, mlp.intermediate_size)
        axes = ("rows", "chosen experts", "intermediate")
        shapes.append(LayerTensor("router", ("rows", "experts"), (rows, mlp.count), "norm(hidden) W_router"))
    else:
        wide, axes = (rows, mlp.intermediate_size), ("rows", "intermediate")
    if not mlp.intermediate_size:
        return tuple(shapes)
    activation = {"silu": "SiLU", "gelu_tanh": "GELU", "swiglu_oai": "clamped SwiGLU"}.get(mlp.activation)
    how = f"{activation}(norm(hidden) W_gate) x norm(hidden) W_up" if activation else "max(norm(hidden) W_up, 0)^2"
    shapes += [
        LayerTensor("gated", axes, wide, how),
        LayerTensor(
            "hidden + MLP", ("rows", "hidden"), (rows, hidden), "hidden + gated W_down: the next layer's input"
        ),
    ]
    return tuple(shapes)


def attended_pairs(config: ModelConfig, layer: int, rows: int) -> int:
    """Pairs of a query and a key in a layer, of a prompt of `rows` tokens."""
    return attended(SequenceRows(rows), config.layers[layer].attention.window)[0]


def stored_kv(kv: KVCache) -> StoredKV:
    """Describe the memory of a KV value."""
    geometry = kv.pool.geometry
    return StoredKV(
        len(kv),
        tuple(StoredLayers(count, *kind) for kind, count in layers_by_kind(geometry.groups).items()),
        geometry.kv_dtype,
        kv.pool.entry_bytes,
        kv.nbytes,
        kv.pool.page_size,
        kv.num_pages,
        _stored_states(kv),
    )


def _stored_states(kv: KVCache) -> StoredStates | None:
    geometry, snapshots = kv.pool.geometry, [one for one in kv.entry_table.snapshots if len(one.pages)]
    if not geometry.states:
        return None
    held = (spans.counts(kv.table) @ (kv.table[:, PAGE:] != spans.NO_PAGE)).tolist()  # entries of each group
    other = [g for g, group in enumerate(geometry.groups) if group.kind != "kv"]
    rows = [g for g in other if geometry.groups[g].kind == "rows"]
    state = geometry.states[0][1]
    return StoredStates(
        len(geometry.states),
        state.num_v_heads,
        state.k_dim,
        state.v_dim,
        (state.conv_width - 1) * state.conv_size,
        state.chunk,
        len(snapshots),
        geometry.state_bytes,
        held[rows[0]] if rows else 0,
        sum(geometry.group_bytes[g] for g in rows),
        len(snapshots) * geometry.state_bytes + sum(held[g] * geometry.group_bytes[g] for g in other),
    )
