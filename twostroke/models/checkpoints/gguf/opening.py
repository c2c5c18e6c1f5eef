"""GGUF files as checkpoints: `open_gguf`."""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from twostroke.errors import CheckpointError, TwostrokeError
from twostroke.models.checkpoints.checkpoint import Checkpoint, GgufTokenizerSource
from twostroke.models.checkpoints.generation import gguf_generation
from twostroke.models.checkpoints.gguf.config import guesser_names, read_config, tensor_names
from twostroke.models.checkpoints.gguf.file import GgufFile, read_set
from twostroke.models.checkpoints.gguf.split_files import set_name
from twostroke.models.checkpoints.pooling import gguf_pooling
from twostroke.models.config import ModelConfig
from twostroke.models.families import BY_NAME
from twostroke.models.families.tensor_names import StoredName, fused_rows, guesser_of
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import tensor_shapes

log = logging.getLogger(__name__)


def _with_scale(file: GgufFile, name: StoredName, tensor: RawTensor, read: Collection[str]) -> RawTensor:
    """The tensor times the number (one for each expert) that converters of NVFP4 store beside it.

    `read`: tensors that the model has, of which Gemma 4's factors of experts contain that number.
    """
    scale = file.tensors.get(stored := name.tensor.removesuffix(".weight") + ".scale")
    if scale is None or stored in read or tensor.format != "NVFP4" or len(tensor.shape) != 2:
        return tensor
    if scale.num_elements <= (name.expert or 0):
        raise CheckpointError(f"{scale.source}: shape {scale.shape} where there is a number for each matrix")
    factor = scale.dequantize().reshape(-1)[name.expert or 0]

    def make() -> np.ndarray:
        return (tensor.dequantize() * factor).view(np.uint8)

    return PackedTensor.of(tensor.shape, "F32", tensor.source, "NVFP4 with a scale", (tensor, scale), make)


def open_gguf(path: Path, name: str | None = None) -> Checkpoint:
    """Opens a GGUF file of a supported architecture, or a set of files of which `path` is any.

    `name` defaults to the file's stem, without the number of its part.

    Raises UnsupportedArchitecture naming the architecture, CheckpointError for a damaged or incomplete file.
    """
    paths, file = read_set(path)
    config = read_config(file.metadata, file.tensors, path)
    names = tensor_names(config, file.tensors)
    for tensor, count in Counter(name.tensor for name in set(names.values()) if name.expert is not None).items():
        if (found := file.tensors.get(tensor)) is not None and found.shape[0] != count:
            raise CheckpointError(f"{found.source}: shape {found.shape} where there are {count} experts")
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    if len(tokens) > config.vocab_size:
        log.warning(
            "%s: the tokenizer has %d tokens and the embedding %d rows: a prompt that has one of the last is refused",
            path, len(tokens), config.vocab_size,
        )  # fmt: skip
    found, guesser = guesser_names(config, file.metadata, file.tensors), None
    title = name or set_name(path)
    if found is not None:
        guesser = partial(_opened, file, paths, f"{title} mtp", path, guesser_of(config), found)
    return _opened(file, paths, title, path, config, names, guesser)


def _opened(
    file: GgufFile,
    paths: tuple[Path, ...],
    name: str,
    path: Path,
    config: ModelConfig,
    names: Mapping[str, StoredName],
    guesser: Callable[[], Checkpoint] | None = None,
) -> Checkpoint:
    """The model with these tensors of a file. Raises CheckpointError for those that are missing or damaged."""
    fused = fused_rows(config, names, BY_NAME[config.architecture].row_orders(config, "gguf"))
    stored, shapes = dict[str, RawTensor](), tensor_shapes(config)
    read = {place.tensor for place in names.values()}
    for ours, place in names.items():
        if (found := file.tensors.get(place.tensor)) is None:
            continue
        found = _with_scale(file, place, found if place.expert is None else found.part(place.expert), read)
        found = replace(fused[ours].of(found) if ours in fused else found, name=ours)
        wanted = shapes[ours]
        if len(wanted) == 1 and prod(found.shape) == prod(wanted):  # with an axis more: what Mamba-2 has for each head
            found = RawTensor.from_bytes(ours, found.format, wanted, found.data.reshape(-1), found.source)
        stored[ours] = found
    licence = file.metadata.get("general.license")
    try:
        return Checkpoint(
            name=name,
            files=paths,
            config=config,
            licence=licence if isinstance(licence, str) else None,
            tokenizer_source=GgufTokenizerSource(file.path, file.metadata),
            stored=stored,
            transforms=BY_NAME[config.architecture].transforms(config, "gguf"),
            generation=gguf_generation(file.metadata, path),
            pooling=gguf_pooling(file.metadata, file.tensors),
            guesser=guesser,
        )
    except TwostrokeError:
        missing = [name.tensor for ours, name in names.items() if ours not in stored]
        if missing:  # use the file's name for the tensor
            raise CheckpointError(f"{path}: the tensor {missing[0]} is missing") from None
        raise
