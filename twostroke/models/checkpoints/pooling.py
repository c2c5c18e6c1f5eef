"""How a model's hidden states become the embedding of a text, as its files say.

A directory of sentence-transformers lists its modules in modules.json: the model, a pooling, a normalization. A GGUF
file has `ARCHITECTURE.pooling_type`. A model without either was trained to generate: its last token has seen all of the
text, and stands for it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.huggingface.json_files import read_optional
from twostroke.models.checkpoints.huggingface.safetensors import read_safetensors
from twostroke.models.formats.tensor import RawTensor

Mode = Literal["last", "mean", "cls"]
_MODES: dict[str, Mode] = {"lasttoken": "last", "mean_tokens": "mean", "mean": "mean", "cls_token": "cls", "cls": "cls"}
_GGUF: dict[int, Mode] = {0: "last", 1: "mean", 2: "cls", 3: "last"}  # 0: none is stated
_RANK = 4
GGUF_DENSE = ("dense_2.weight", "dense_3.weight")


class Dense(NamedTuple):
    """A linear layer behind the pooling: weights [out, in] and a bias [out] or None, float32."""

    weight: np.ndarray
    bias: np.ndarray | None = None

    def __call__(self, vector: np.ndarray) -> np.ndarray:
        made = self.weight @ vector
        return made if self.bias is None else made + self.bias


@dataclass(frozen=True)
class Pooling:
    """A model's pooling."""

    # which tokens' hidden states, after the last norm, are averaged: the last one, all, or the first
    mode: Mode = "last"
    normalized: bool = True  # whether an embedding is divided by its length
    # texts that come before the user's, by their names ("query", "document")
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # the name of the one that is taken if none is named
    stated: bool = False  # whether the model's files say so, as those of embedding models do
    refusal: str | None = None  # why no embedding can be computed as the files ask, or None
    ranks: bool = False  # whether a GGUF file is of a model that ranks documents
    # what the pooled vector passes before it is normalized (EmbeddingGemma)
    dense: tuple[Dense, ...] = field(default=(), compare=False, repr=False)


def gguf_pooling(metadata: Mapping[str, Any], tensors: Mapping[str, RawTensor] | None = None) -> Pooling:
    """That of a GGUF file, with its dense layers if it has any.

    llama.cpp's embeddings are normalized whatever the file says, and so are these.
    """
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind is None:
        return Pooling()
    if kind == _RANK:
        return Pooling(stated=True, refusal="the model ranks documents: call /v1/rerank", ranks=True)
    if kind not in _GGUF:
        return Pooling(stated=True, refusal=f"pooling_type {kind!r:.20} is not known here")
    dense = tuple(Dense(tensors[name].dequantize()) for name in GGUF_DENSE if tensors and name in tensors)
    return Pooling(_GGUF[kind], stated=True, dense=dense)


def directory_pooling(directory: Path) -> Pooling:
    """That of a Hugging Face directory. Raises CheckpointError if a file is not JSON."""
    path = directory / "modules.json"
    if not path.is_file():
        return Pooling()
    prompts = read_optional(directory / "config_sentence_transformers.json")
    mode: Mode = "last"
    refusal, normalized = None, False
    dense: list[Dense] = []
    for module in _modules(path):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            config = read_optional(directory / str(module.get("path")) / "config.json")
            asked = [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True]
            asked = [str(config["pooling_mode"])] if "pooling_mode" in config else asked
            asked = [name for name in asked if name != "include_prompt"]
            if len(asked) != 1 or asked[0] not in _MODES or config.get("include_prompt") is False:
                refusal = f"the pooling of {directory.name} ({' and '.join(asked)}) is not supported: last, mean or cls"
            else:
                mode = _MODES[asked[0]]
        elif kind == "Dense" and not normalized:
            try:
                dense.append(_dense(directory / str(module.get("path"))))
            except CheckpointError as error:
                refusal = str(error)
        elif kind == "Normalize":
            normalized = True
        elif kind != "Transformer":
            refusal = f"{directory.name} has a module {kind} behind its pooling, which is not supported"
    texts = {str(name): str(text) for name, text in (prompts.get("prompts") or {}).items()}
    return Pooling(mode, normalized, texts, prompts.get("default_prompt_name"), True, refusal, dense=tuple(dense))


def _dense(folder: Path) -> Dense:
    """That of a folder. Raises CheckpointError."""
    function = str(read_optional(folder / "config.json").get("activation_function"))
    if function.rpartition(".")[2] != "Identity":
        raise CheckpointError(f"{folder}: a dense layer with the activation {function:.60} is not supported: Identity")
    tensors = read_safetensors(folder / "model.safetensors")
    weight, bias = (tensors.get(f"linear.{name}") for name in ("weight", "bias"))
    if weight is None or len(weight.shape) != 2:
        raise CheckpointError(f"{folder}: model.safetensors must hold a matrix linear.weight")
    return Dense(_floats(weight), None if bias is None else _floats(bias))


def _floats(tensor: RawTensor) -> np.ndarray:
    return RawTensor.from_bytes(
        tensor.name, tensor.format, tensor.shape, tensor.data.reshape(-1), tensor.source
    ).dequantize()


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise CheckpointError(f"{path}: must hold a list of modules")
    return found
