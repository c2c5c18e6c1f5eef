"""Directories whose config.json and weights disagree, read as transformers reads them, with a line in the log."""

import logging
import re
from collections.abc import MutableMapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from twostroke.models.config import ModelConfig
from twostroke.models.formats.tensor import RawTensor

log = logging.getLogger(__name__)


def resolve_conflicts(
    config: ModelConfig,
    names: dict[str, str],
    head: str,
    tensors: MutableMapping[str, RawTensor],
    directory: Path,
    guess_layers: bool = False,
) -> tuple[ModelConfig, dict[str, str]]:
    """The config and the names of its tensors in the files (Twostroke's -> theirs), after what the weights say.

    - A tied model whose files have a head that is not the embedding is untied.
    - A tied model whose files have only the head takes it for the embedding.
    - Layers beyond the config's number are left out: they are removed from `tensors`, unless they guess further tokens
      in files of the family (`guess_layers`).
    """
    embedding = names["embed"]
    if config.tied and head in tensors:
        if embedding not in tensors:
            names = names | {"embed": head}
        elif not _same(tensors[head], tensors[embedding]):
            log.warning(
                "%s: tie_word_embeddings is true, but %s is not the embedding: both are used, as in transformers",
                directory, head,
            )  # fmt: skip
            config, names = replace(config, tied=False), names | {"head": head}
    layer = re.compile(re.escape(embedding.removesuffix("embed_tokens.weight")) + r"layers\.(\d+)\..*")
    beyond = [name for name in tensors if (found := layer.fullmatch(name)) and int(found[1]) >= config.num_layers]
    if beyond and not guess_layers:
        log.warning(
            "%s: num_hidden_layers is %d, and the files have further layers: they are left out, as in transformers",
            directory, config.num_layers,
        )  # fmt: skip
        for name in beyond:
            del tensors[name]
    return config, names


def _same(a: RawTensor, b: RawTensor) -> bool:
    return a.format == b.format and a.shape == b.shape and np.array_equal(a.data.reshape(-1), b.data.reshape(-1))
