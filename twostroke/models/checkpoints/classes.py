"""The head that tells a text's class, in directories of transformers' `...ForSequenceClassification`."""

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.huggingface.json_files import read_json
from twostroke.models.formats.tensor import RawTensor

Activation = Literal["softmax", "sigmoid", "none"]
_ACTIVATIONS: dict[str, Activation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
WEIGHT, BIAS = "score.weight", "score.bias"


@dataclass(frozen=True)
class ClassHead:
    """A matrix behind the last token's hidden state."""

    weight: np.ndarray  # [classes, hidden] float32; bias: [classes] float32, or None
    bias: np.ndarray | None
    labels: tuple[str, ...]  # the classes' names
    # what makes scores of logits, by `problem_type`; without one softmax, or sigmoid of a single class
    activation: Activation


def take_head(tensors: MutableMapping[str, RawTensor], directory: Path) -> ClassHead | None:
    """Take the head out of a directory's tensors; None for a model that has none. Raises CheckpointError."""
    if WEIGHT not in tensors:
        return None
    config, stored = read_json(directory / "config.json"), tensors.pop(WEIGHT)
    weight = stored.dequantize()
    bias = tensors.pop(BIAS).dequantize() if BIAS in tensors else None
    if weight.ndim != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        raise CheckpointError(f"{stored.source}: {WEIGHT} must be a matrix, with a bias of its rows")
    kind = config.get("problem_type")
    unstated: Activation = "sigmoid" if len(weight) == 1 else "softmax"
    return ClassHead(weight, bias, _labels(config, len(weight)), _ACTIVATIONS.get(str(kind), unstated))


def _labels(config: Mapping[str, Any], count: int) -> tuple[str, ...]:
    named = config.get("id2label")
    known: Mapping[str, Any] = named if isinstance(named, dict) else {}
    return tuple(str(known.get(str(i), f"LABEL_{i}")) for i in range(count))
