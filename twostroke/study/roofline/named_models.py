"""Finds a model's sizes by name or path. No weights are read, and nothing is fetched."""

import os
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from twostroke.engine.options import GUESSER
from twostroke.errors import CheckpointError, UnknownModel, UnsupportedArchitecture
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.fetch import is_fetched, model_path
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.config import read_config
from twostroke.models.checkpoints.resolve import open_path
from twostroke.models.config import Attention, Layer, ModelConfig
from twostroke.models.families.tensor_names import guesser_of
from twostroke.models.feed_forward import UNGATED, Experts, GatedMLP
from twostroke.models.latent import Latent
from twostroke.models.recurrent import GatedDeltaNet
from twostroke.models.rope import NO_ROPE
from twostroke.study.roofline.model_spec import ModelSpec
from twostroke.study.roofline.suggestions import did_you_mean
from twostroke.study.roofline.techniques import Companion
from twostroke.study.roofline.weight_formats import WeightFormat, stored_format, weight_format

# A config.json alone does not tell how many tensors there are; no model has more.
MAX_TENSORS = 1 << 20
NORM_EPS = 1e-6  # of a model that is known by its sizes alone, which nothing computes
# The specification of catalog models that are not fetched yet.
SAME_SIZES = {
    "qwen2.5-coder-0.5b": "qwen2.5-0.5b",
    "qwen2.5-coder-1.5b": "qwen2.5-1.5b",
    "gemma3-270m": "gemma-3-270m",
    "smollm2-135m": "smollm2-135m",
}


class FoundModel(NamedTuple):
    """A model's sizes, and its opened checkpoint if there are files with weights."""

    model: ModelSpec
    checkpoint: Checkpoint | None = None

    def form(self, wanted: str | None) -> WeightFormat:
        """The format of that name, or else that of its files, or as published. Raises InvalidRequest."""
        if wanted is None and self.checkpoint is not None:
            return stored_format(self.checkpoint)
        return weight_format(self.model.weights if wanted is None else wanted)


def find_model(name: str) -> FoundModel:
    """A named specification, a catalog model, a GGUF file, or a directory with a config.json.

    Raises:
        UnknownModel: the name is none of these; the message lists near names.
        UnsupportedArchitecture: files of another family, or no decoder. CheckpointError: files that cannot be read.
    """
    entry = CATALOG.get(name)
    if entry is not None and is_fetched(entry):
        return _of_checkpoint(open_gguf(model_path(entry), name=name))
    wanted = SAME_SIZES.get(name, name)
    if wanted in specifications():
        return FoundModel(specifications()[wanted])
    path = Path(name).expanduser()
    if name and os.path.exists(path):
        return _of_path(path)
    known = sorted({*specifications(), *CATALOG})
    raise UnknownModel(
        f"unknown model {name!r}: {did_you_mean(name, known)}known are {', '.join(known)}; a GGUF file or a directory "
        f"with a config.json also works"
    )


@cache
def specifications() -> Mapping[str, ModelSpec]:
    """All named specifications."""
    text = files("twostroke.study.roofline").joinpath("data/models.toml").read_text()
    tables = tomllib.loads(text)
    return {name: _of_table(name, tables.get(table.get("like", ""), {}) | table) for name, table in tables.items()}


def _of_table(name: str, table: Mapping[str, Any]) -> ModelSpec:
    window, sliding = table.get("windows", (None, 0))
    size, others = table["intermediate"], table["other_layer"]
    mlp: GatedMLP | Experts = GatedMLP(size, "silu" if table.get("gated", True) else UNGATED)
    if "experts" in table:
        mlp = Experts(table["experts"], table["chosen"], size, shared_size=table.get("shared", 0))
    attention = _attention(table)
    kv_heads, head_dim, matrices, own = table.get("global", (*attention.kv_shape, 2, others))
    whole = replace(attention, num_kv_heads=kv_heads, head_dim=head_dim, keys_as_values=matrices == 1)
    dense, wide = table.get("dense", (0, 0))
    recurrent, k_heads, v_heads, dim, width = table.get("recurrent", (0, 1, 1, 1, 1))
    kinds = (
        (table["layers"] - sliding - dense - recurrent, Layer(whole, mlp), own),
        (sliding, Layer(replace(attention, window=window), mlp), others),
        (dense, Layer(attention, GatedMLP(wide)), others),
        (recurrent, Layer(GatedDeltaNet(k_heads, v_heads, dim, dim, width), mlp), table.get("other_recurrent", 0)),
    )
    layers = tuple(layer for count, layer, _ in kinds for _ in range(count))
    sizes = table["vocab"], table["hidden"], table["max_position"], NORM_EPS
    config, outer = ModelConfig(name, *sizes, layers, tied=table.get("tied", False)), table["other"]
    head = ModelSpec(name, replace(config, layers=layers[:1], takes_hidden=True), others + outer)
    return ModelSpec(
        name,
        config,
        outer + sum(count * each for count, _, each in kinds),
        table.get("weights", "bf16"),
        table["source"],
        table["parameters"],
        guesser=head if table.get("mtp") else None,
    )


def _attention(table: Mapping[str, Any]) -> Attention:
    heads, gate = table["heads"], table.get("output_gate", False)
    if "latent" not in table:
        return Attention(heads, table["kv_heads"], table["head_dim"], 1.0, NO_ROPE, output_gate=gate)
    query_rank, rank, plain, rotated, value = table["latent"]
    latent = Latent(rank, rotated, plain, value, query_rank)
    return Attention(heads, 1, latent.entry, 1.0, NO_ROPE, output_gate=gate, latent=latent)


def _of_path(path: Path) -> FoundModel:
    """Files with weights are opened, which reads their headers alone; a config.json is enough."""
    weights = path.is_file() or any(path.glob("*.gguf")) or any(path.glob("*.safetensors"))
    if weights:
        return _of_checkpoint(open_path(path))
    config = path / "config.json"
    if not config.is_file():
        raise CheckpointError(f"{path}: holds neither a config.json nor a GGUF file")
    try:
        described = read_config(config, MAX_TENSORS)
    except UnsupportedArchitecture as error:
        raise UnsupportedArchitecture(f"{error}: a plan needs a decoder of a family that the engine knows") from None
    return FoundModel(ModelSpec(path.resolve().name, described, source=str(config)))


def _of_checkpoint(checkpoint: Checkpoint) -> FoundModel:
    name, config, file = checkpoint.name, checkpoint.config, str(checkpoint.files[0])
    guesser = None if checkpoint.guesser is None else ModelSpec(name, guesser_of(config))
    return FoundModel(ModelSpec(name, config, weights="stored", source=file, guesser=guesser), checkpoint)


def companion_of(name: str | None, model: ModelSpec) -> Companion | None:
    """A draft in the format that it is stored or published in, or "mtp", the model's own head; None for None.

    Raises InvalidRequest, UnknownModel.
    """
    if name is None:
        return None
    if name == GUESSER:
        return Companion(model.guessing)
    found = find_model(name)
    return Companion(found.model, found.form(None))
