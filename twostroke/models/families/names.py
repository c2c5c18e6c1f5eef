"""What a checkpoint's files call the tensors of a model."""

from collections.abc import Mapping
from typing import NamedTuple

from twostroke.models.config import ModelConfig, tensor_shapes


class StoredName(NamedTuple):
    """A tensor of a file, or with `expert` that expert's part of a tensor of three dimensions."""

    tensor: str
    expert: int | None = None


def stored_names(
    config: ModelConfig, outer: Mapping[str, str], layers: str, parts: Mapping[str, str]
) -> dict[str, StoredName]:
    """Twostroke's name -> a file's, for every tensor of the model.

    `outer` names the tensors outside the layers; one of layer i is called `layers` (with {} for i) and its part.
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
