"""Finds a model's sizes by name or path. No weights are read, and nothing is fetched."""

import os
import tomllib
from collections.abc import Mapping
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
from twostroke.models.families.tensor_names import guesser_of
from twostroke.models.recurrent import GatedDeltaNet
from twostroke.study.roofline.layer_kind import LatentSizes, LayerKind
from twostroke.study.roofline.model_spec import ModelSpec, spec_of_config
from twostroke.study.roofline.suggestions import did_you_mean
from twostroke.study.roofline.techniques import Companion
from twostroke.study.roofline.weight_formats import WeightFormat, stored_format, weight_format

# A config.json alone does not tell how many tensors there are; no model has more.
MAX_TENSORS = 1 << 20
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
    whole = dict(zip(("kv_heads", "head_dim", "entry_matrices", "other"), table.get("global", ()), strict=False))
    sizes: dict[str, Any] = {key: table[key] for key in ("heads", "intermediate")}
    given = ("kv_heads", "head_dim", "gated", "experts", "chosen", "shared", "key_is_value", "output_gate")
    sizes |= {key: table[key] for key in given if key in table}
    if "latent" in table:
        latent = LatentSizes(*table["latent"])
        sizes |= {"latent": latent, "kv_heads": 1, "head_dim": latent.kv + latent.rope, "key_is_value": True}
    recurrent = _recurrent(table)
    dense, wide = table.get("dense", (0, 0))
    others = sliding + dense + sum(kind.count for kind in recurrent)
    sizes["other"] = table["other_layer"]
    kinds = [
        LayerKind(count=count, window=seen, **(sizes | own))
        for count, seen, own in ((table["layers"] - others, None, whole), (sliding, window, {}))
        if count
    ]
    if dense:
        mlp: dict[str, Any] = {"intermediate": wide, "experts": 1, "chosen": 1, "shared": 0}
        kinds.append(LayerKind(count=dense, **(sizes | mlp)))
    return ModelSpec(
        name=name,
        hidden=table["hidden"],
        vocab=table["vocab"],
        max_position=table["max_position"],
        layers=(*kinds, *recurrent),
        tied=table.get("tied", False),
        other=table["other"],
        weights=table.get("weights", "bf16"),
        source=table["source"],
        published=table["parameters"],
        guesser=kinds[0] if table.get("mtp") else None,
    )


def _recurrent(table: Mapping[str, Any]) -> list[LayerKind]:
    """The layers with a state in place of attention, if there are any."""
    if "recurrent" not in table:
        return []
    count, k_heads, v_heads, dim, width = table["recurrent"]
    sizes = {key: table[key] for key in ("intermediate", "experts", "chosen", "shared") if key in table}
    state = GatedDeltaNet(k_heads, v_heads, dim, dim, width)
    return [LayerKind(count, k_heads, k_heads, dim, state=state, other=table["other_recurrent"], **sizes)]


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
    return FoundModel(spec_of_config(path.resolve().name, described, source=str(config)))


def _of_checkpoint(checkpoint: Checkpoint) -> FoundModel:
    guesser = None if checkpoint.guesser is None else guesser_of(checkpoint.config)
    model = spec_of_config(checkpoint.name, checkpoint.config, str(checkpoint.files[0]), "stored", guesser)
    return FoundModel(model, checkpoint)


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
