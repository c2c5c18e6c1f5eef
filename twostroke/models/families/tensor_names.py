"""The names of a model's tensors in a checkpoint's files."""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.config import ModelConfig
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import tensor_shapes


class StoredName(NamedTuple):
    """The name of a tensor in a file; with `expert`, that expert's or head's part of a 3-D tensor."""

    tensor: str
    expert: int | None = None


def stored_names(
    config: ModelConfig,
    outer: Mapping[str, str],
    layers: str,
    parts: Mapping[str, str],
    number: Callable[[ModelConfig, int, str], int] | None = None,
) -> dict[str, StoredName]:
    """Twostroke's name -> the file's name, for every tensor of the model.

    `outer` names the tensors outside the layers. The name of a layer's tensor is the prefix `layers`, with the layer's
    number in place of {}, or what `number` (`Family.stored_layer`) says, followed by the name in `parts`.
    """
    names: dict[str, StoredName] = {}
    for ours in tensor_shapes(config):
        if ours in outer:
            names[ours] = StoredName(outer[ours])
            continue
        _, layer, *rest = ours.split(".")
        prefix = layers.format(layer if number is None else number(config, int(layer), rest[0]))
        if rest[0] in ("experts", "heads"):
            kind, expert, part = rest
            theirs = parts[f"{kind}.{part}"]
            own = "{}" in theirs
            names[ours] = StoredName(prefix + theirs.format(expert), None if own else int(expert))
        else:
            names[ours] = StoredName(prefix + parts[".".join(rest)])
    return names


def guesser_of(config: ModelConfig) -> ModelConfig:
    """The head of multi-token prediction in files of this model: a layer as its last one with attention, behind a
    projection."""
    last = max(config.attention_layers)
    return replace(config, layers=(config.layers[last],), takes_hidden=True)


def unread_names(config: ModelConfig, layers: str, parts: Mapping[str, str]) -> set[str]:
    """Names of tensors that files may have and nobody reads: of K and V in layers that read another layer's."""
    borrowing = (i for i, one in enumerate(config.attentions) if one.source is not None)
    return {layers.format(i) + parts[part] for i in borrowing for part in ("k", "v", "k_norm")}


class FusedRows(NamedTuple):
    """The rows of a matrix in a tensor of the file that holds several, with `total` rows.

    They follow one another, in an `order` of the tensor's rows if it has another.
    """

    start: int
    stop: int
    total: int
    order: np.ndarray | None = None

    def of(self, tensor: RawTensor) -> RawTensor:
        """The matrix. Raises CheckpointError if the tensor has another number of rows."""
        if tensor.shape[0] != self.total:
            raise CheckpointError(f"{tensor.source}: shape {tensor.shape} where there are {self.total} rows")
        tensor = tensor if self.order is None else tensor.permute_rows(self.order)
        return tensor.rows(self.start, self.stop)


def fused_rows(
    config: ModelConfig, names: Mapping[str, Hashable], orders: Mapping[str, np.ndarray]
) -> dict[str, FusedRows]:
    """Twostroke's name -> its rows, for matrices whose tensor in the file is that of others too (Phi-3).

    They follow one another in the order of `names`, after their tensor's rows have been put in its order in `orders`
    (`Family.row_orders`).
    """
    parts: dict[Hashable, list[str]] = defaultdict(list)
    for ours, theirs in names.items():
        parts[theirs].append(ours)
    shapes, found = tensor_shapes(config), dict[str, FusedRows]()
    for fused in parts.values():
        ends = [0]
        for ours in fused:
            ends.append(ends[-1] + shapes[ours][0])
        if len(fused) > 1:
            order = orders.get(fused[0])
            found |= {ours: FusedRows(ends[i], ends[i + 1], ends[-1], order) for i, ours in enumerate(fused)}
    return found
