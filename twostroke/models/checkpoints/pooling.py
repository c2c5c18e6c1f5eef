"""How a model's hidden states become the embedding of a text, as its files say.

A directory of sentence-transformers lists its modules in modules.json: the model, a pooling, a normalization. A GGUF
file has `ARCHITECTURE.pooling_type`. A model without either was trained to generate: its last token has seen all of the
text, and stands for it.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.huggingface.json_files import read_json

Mode = Literal["last", "mean", "cls"]
_MODES: dict[str, Mode] = {
    "lasttoken": "last",
    "mean_tokens": "mean",
    "mean": "mean",
    "cls_token": "cls",
    "cls": "cls",
}
_GGUF: dict[int, Mode] = {0: "last", 1: "mean", 2: "cls", 3: "last"}  # 0: none is stated
_RANK = 4


@dataclass(frozen=True)
class Pooling:
    """A model's pooling.

    Attributes:
        mode: which tokens' hidden states, after the last norm, are averaged: the last one, all, or the first.
        normalized: whether an embedding is divided by its length.
        prompts: texts that come before the user's, by their names ("query", "document").
        default_prompt: the name of the one that is taken if none is named.
        stated: whether the model's files say so, as those of embedding models do.
        ranks: whether a GGUF file is of a model that ranks documents.
        refusal: why no embedding can be computed as the files ask, or None.
    """

    mode: Mode = "last"
    normalized: bool = True
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    stated: bool = False
    refusal: str | None = None
    ranks: bool = False


def gguf_pooling(metadata: Mapping[str, Any]) -> Pooling:
    """That of a GGUF file. llama.cpp's embeddings are normalized whatever the file says, and so are these."""
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    if kind is None:
        return Pooling()
    if kind == _RANK:
        return Pooling(stated=True, refusal="the model ranks documents: call /v1/rerank", ranks=True)
    if kind not in _GGUF:
        return Pooling(stated=True, refusal=f"pooling_type {kind!r:.20} is not known here")
    return Pooling(_GGUF[kind], stated=True)


def directory_pooling(directory: Path) -> Pooling:
    """That of a Hugging Face directory. Raises CheckpointError if a file is not JSON."""
    path = directory / "modules.json"
    if not path.is_file():
        return Pooling()
    prompts = _optional(directory / "config_sentence_transformers.json")
    mode: Mode = "last"
    refusal, normalized = None, False
    for module in _modules(path):
        kind = str(module.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            config = _optional(directory / str(module.get("path")) / "config.json")
            asked = [name.removeprefix("pooling_mode_") for name, on in config.items() if on is True]
            asked = [str(config["pooling_mode"])] if "pooling_mode" in config else asked
            asked = [name for name in asked if name != "include_prompt"]
            if len(asked) != 1 or asked[0] not in _MODES or config.get("include_prompt") is False:
                refusal = f"the pooling of {directory.name} ({' and '.join(asked)}) is not supported: last, mean or cls"
            else:
                mode = _MODES[asked[0]]
        elif kind == "Normalize":
            normalized = True
        elif kind != "Transformer":
            refusal = f"{directory.name} has a module {kind} behind its pooling, which is not supported"
    texts = {str(name): str(text) for name, text in (prompts.get("prompts") or {}).items()}
    return Pooling(mode, normalized, texts, prompts.get("default_prompt_name"), stated=True, refusal=refusal)


def _modules(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
        raise CheckpointError(f"{path}: must hold a list of modules")
    return found


def _optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}
