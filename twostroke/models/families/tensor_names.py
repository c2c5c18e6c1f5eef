"""The names of a model's tensors in a checkpoint's files."""

from collections.abc import Mapping
from typing import NamedTuple

from twostroke.models.config import ModelConfig, tensor_shapes


class StoredName(NamedTuple):
    """The name of a tensor in a file; with `expert`, that expert's part of a 3-D tensor."""

    tensor: str
    expert: int | None = None


def stored_names(
    config: ModelConfig, outer: Mapping[str, str], layers: str, parts: Mapping[str, str]
) -> dict[str, StoredName]:
    """Twostroke's name -> the file's name, for every tensor of the model.

    `outer` names the tensors outside the layers. The name of a layer's tensor is the prefix `layers`, with the layer's
    number in place of {}, followed by the name in `parts`.
    """
    names: dict[str, StoredName] = {}
    for ours in tensor_shapes(config):
        if ours in outer:
            names[ours] = StoredName(outer[ours])
            continue
        _, layer, *rest = ours.split(".")
        prefix = layers.format(layer)
        if rest[0] == "experts":
            _, expert, part = rest
            theirs = parts[f"experts.{part}"]
            own = "{}" in theirs
            names[ours] = StoredName(prefix + theirs.format(expert), None if own else int(expert))
        else:
            names[ours] = StoredName(prefix + parts[rest[0]])
    return names
