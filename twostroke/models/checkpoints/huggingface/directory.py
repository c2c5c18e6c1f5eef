"""Hugging Face directories: config.json and memory-mapped safetensors files.

Where config.json and weights disagree they are read as transformers reads them, with a line in the log.
"""

import logging
import re
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.checkpoint import Checkpoint, HfTokenizerSource
from twostroke.models.checkpoints.classes import ClassHead, take_head
from twostroke.models.checkpoints.generation import directory_generation
from twostroke.models.checkpoints.huggingface.config import read_config, stated_family
from twostroke.models.checkpoints.huggingface.json_files import read_json
from twostroke.models.checkpoints.huggingface.quantized.methods import unpacked
from twostroke.models.checkpoints.huggingface.safetensors import read_all
from twostroke.models.checkpoints.huggingface.split_tensors import split_experts, split_heads
from twostroke.models.checkpoints.pooling import directory_pooling
from twostroke.models.config import ModelConfig
from twostroke.models.families import BY_NAME
from twostroke.models.families.tensor_names import fused_rows, guesser_of, stored_names, unread_names
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.tensor_shapes import SHARED_GATE

log = logging.getLogger(__name__)
# Gemma 3 with vision has a longer prefix. A model that was saved without its head (transformers' AutoModel) has none.
PREFIXES = ("model.", "backbone.", "model.language_model.", "language_model.model.", "language_model.", "")
HEADS = ("lm_head.weight", "language_model.lm_head.weight")
GUESSERS = ("mtp.", "model.mtp.", "language_model.mtp.")  # prefixes of the head of multi-token prediction
# Other parts of multimodal checkpoints, and tables that follow from the config. Text generation does not need them.
OTHER_PARTS = "vision_tower|visual|multi_modal_projector|audio_tower|embed_vision|embed_audio|mtp"
UNUSED = re.compile(rf"(model\.)?({OTHER_PARTS})\..*|.*\.rotary_emb\.inv_freq")
FORMATS = ("F32", "F16", "BF16")


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


def tensor_names(config: ModelConfig, prefix: str, head: str) -> dict[str, str]:
    """Map from Twostroke name to name in the files, for every tensor of the model."""
    family = BY_NAME[config.architecture]
    outer = {"embed": f"{prefix}embed_tokens.weight", "norm": f"{prefix}norm.weight", "head": head}
    outer |= {ours: prefix + theirs for ours, theirs in family.huggingface_outer.items()}
    names = stored_names(config, outer, prefix + "layers.{}.", family.huggingface_parts, family.stored_layer)
    return {ours: name.tensor for ours, name in names.items()}


def _licence(directory: Path) -> str | None:
    """The `license:` line of the model card's front matter."""
    try:
        card = (directory / "README.md").read_text(errors="replace")
    except OSError:
        return None
    front = re.match(r"---\n(.*?)\n---", card, re.DOTALL)
    found = re.search(r"^license:\s*(\S+)", front[1], re.MULTILINE) if front else None
    return found[1] if found else None


def _is_empty_bias(tensor: RawTensor) -> bool:
    return tensor.name.endswith(".bias") and not tensor.data.any()


def open_huggingface(directory: Path, name: str | None = None) -> Checkpoint:
    """Opens a directory of a supported family; `name` defaults to the directory's.

    Raises UnsupportedArchitecture naming the family or variant, CheckpointError for damaged or incomplete files.
    """
    config_path = directory / "config.json"
    if not config_path.is_file():
        raise CheckpointError(f"{directory}: there is no config.json")
    stated_family(config_path, read_json(config_path))  # before the weights, which may not be there yet
    files, tensors = read_all(directory)
    tensors = split_experts(tensors)
    config = read_config(config_path, len(tensors))
    tensors = unpacked(directory, tensors)
    packed = any(isinstance(tensor, PackedTensor) for tensor in tensors.values())
    tensors = split_heads(tensors, config)
    classes = take_head(tensors, directory)
    if classes is not None:  # such a model has no other head, and none is read
        config = replace(config, tied=True)
    family = BY_NAME[config.architecture]
    embedding = family.huggingface_outer.get("embed", "embed_tokens.weight")
    prefix = next((p for p in PREFIXES if p + embedding in tensors), PREFIXES[0])
    head = next((head for head in HEADS if head in tensors), HEADS[0])
    names = tensor_names(config, prefix, head)
    config, names = resolve_conflicts(config, names, head, tensors, directory, family.guess_layers)
    used = set(names.values()) | set(HEADS if config.tied else ())  # a tied head is the embedding
    used |= unread_names(config, prefix + "layers.{}.", family.huggingface_parts)
    guessing = re.compile(rf"{re.escape(prefix)}layers\.(\d{{1,6}})\..*") if family.guess_layers else None
    for theirs in tensors:
        if guessing and (layer := guessing.fullmatch(theirs)) and int(layer[1]) >= config.num_layers:
            continue
        if theirs not in used and not UNUSED.fullmatch(theirs):
            if packed and _is_empty_bias(tensors[theirs]):
                continue  # AutoGPTQ writes one for every matrix
            raise UnsupportedArchitecture(f"{tensors[theirs].source}: {config.architecture} has no such tensor")
    name, opened = name or directory.resolve().name, partial(_opened, directory, files, tensors, classes)
    found = _guesser_names(config, names, tensors)
    guesser = None if found is None else partial(_opened_guesser, opened, f"{name} mtp", config, found, tensors)
    return opened(name, config, names, guesser)


class GuesserNames(NamedTuple):
    """Where the head of multi-token prediction is in the files of a directory."""

    tensors: Mapping[str, str]  # of Twostroke's names
    copies: Mapping[str, str]  # tensors that must be copies of the model's, which are read in their place


def _guesser_names(config: ModelConfig, names: Mapping[str, str], tensors: Collection[str]) -> GuesserNames | None:
    """The head, if there is one of one layer that shares the model's embeddings."""
    family, copies = BY_NAME[config.architecture], dict[str, str]()
    if family.guess_layers:
        every = names["embed"].removesuffix("embed_tokens.weight") + "layers.{}."
        prefix = layers = every.format(config.num_layers)
        more = every.format(config.num_layers + 1)
        copies = {"embed_tokens.weight": names["embed"], "shared_head.head.weight": names.get("head", names["embed"])}
        copies = {prefix + copy: theirs for copy, theirs in copies.items() if prefix + copy in tensors}
    else:
        prefix = next((p for p in GUESSERS if f"{p}fc.weight" in tensors), "")
        layers, more = prefix + "layers.{}.", f"{prefix}layers.1."
    own = {ours: prefix + theirs for ours, theirs in family.huggingface_guesser.items()}
    if not own or own["join.projection"] not in tensors or any(one.startswith(more) for one in tensors):
        return None
    if f"{prefix}embed_tokens.weight" in tensors and not copies:
        return None
    outer = {"embed": names["embed"], "head": names.get("head", ""), "join.main_norm": names["norm"]} | own
    found = stored_names(guesser_of(config), outer, layers, family.huggingface_parts)
    return GuesserNames({ours: one.tensor for ours, one in found.items()}, copies)


def _opened_guesser(
    opened: Callable[..., Checkpoint],
    name: str,
    config: ModelConfig,
    found: GuesserNames,
    tensors: Mapping[str, RawTensor],
) -> Checkpoint:
    """The head. Raises CheckpointError for embeddings of its own."""
    for copy, theirs in found.copies.items():
        if tensors[copy].format != tensors[theirs].format or not np.array_equal(
            tensors[copy].data, tensors[theirs].data
        ):
            raise CheckpointError(f"{tensors[copy].source}: this is no copy of {theirs}, which a draft mtp needs")
    return opened(name, guesser_of(config), found.tensors)


def _opened(
    directory: Path,
    files: Sequence[Path],
    tensors: Mapping[str, RawTensor],
    classes: ClassHead | None,
    name: str,
    config: ModelConfig,
    names: Mapping[str, str],
    guesser: Callable[[], Checkpoint] | None = None,
) -> Checkpoint:
    """The model with these tensors of a directory. Raises CheckpointError for those that are missing or damaged."""
    orders, stored = BY_NAME[config.architecture].row_orders(config, "huggingface"), dict[str, RawTensor]()
    fused = fused_rows(config, names, orders)
    for ours, theirs in names.items():
        found = tensors.get(theirs)
        if found is None:
            raise CheckpointError(f"{directory}: the tensor {theirs} is missing")
        if not isinstance(found, PackedTensor):
            if found.format not in FORMATS or not found.shape:
                raise CheckpointError(
                    f"{found.source}: {found.format} {found.shape}; only F32, F16 and BF16 are supported"
                )
            # A gate is a matrix of one row there, and a vector here; a convolution by channel has one input of each.
            thin = ours.endswith((f".{SHARED_GATE}", ".conv"))
            shape = tuple(size for size in found.shape if size != 1) if thin else found.shape
            found = RawTensor.from_bytes(ours, found.format, shape, found.data.reshape(-1), found.source)
        stored[ours] = replace(fused[ours].of(found) if ours in fused else found, name=ours)
    return Checkpoint(
        name=name,
        files=(directory / "config.json", *files),
        config=config,
        licence=_licence(directory),
        tokenizer_source=HfTokenizerSource(directory),
        stored=stored,
        transforms=BY_NAME[config.architecture].transforms(config, "huggingface"),
        generation=directory_generation(directory),
        pooling=directory_pooling(directory),
        classes=classes,
        guesser=guesser,
    )
