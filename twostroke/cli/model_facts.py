"""The facts of a model that `twostroke models` shows, for JSON."""

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.cli.report import ProgressDisplay

if TYPE_CHECKING:
    from twostroke.models.checkpoints.catalog import CatalogEntry
    from twostroke.models.checkpoints.checkpoint import Checkpoint
    from twostroke.models.checkpoints.tokenizer import Tokenizer
    from twostroke.models.config import ModelConfig


def origin(name: str) -> str | None:
    """Where the file of a catalog model came from, in words, if it is known."""
    from twostroke.models.checkpoints.catalog import CATALOG
    from twostroke.models.checkpoints.fetch import fetched_from

    entry = CATALOG.get(name)
    return None if entry is None else fetched_from(entry)


def catalog_facts(entry: "CatalogEntry") -> dict[str, Any]:
    from twostroke.models.checkpoints.fetch import is_fetched, model_path

    return {
        "name": entry.name,
        "description": entry.description,
        "size": entry.size,
        "licence": entry.licence,
        "chat": entry.chat,
        "fetched": is_fetched(entry),
        "fetched_from": origin(entry.name),
        "path": str(model_path(entry)),
        "sha256": entry.sha256,
        "sources": {"packages": list(entry.packages), "hub": entry.hub and ":".join(entry.hub)},
    }


def checkpoint_facts(name: str) -> dict[str, Any]:
    """All facts of a checkpoint, without its weights."""
    from twostroke.models.checkpoints.resolve import open_checkpoint
    from twostroke.models.checkpoints.tokenizer import Tokenizer

    with ProgressDisplay(f"opening {name}") as progress:
        checkpoint = open_checkpoint(name, progress=progress)
        tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
    return {
        "name": checkpoint.name,
        "licence": checkpoint.licence,
        **geometry_facts(checkpoint),
        "parameters": sum(tensor.num_elements for tensor in checkpoint.stored.values()),
        "weights": weight_facts(checkpoint),
        "weights_id": checkpoint.weights_id,
        "generation": dict(checkpoint.generation),
        "tokenizer": {"kind": tokenizer_kind(checkpoint), **tokenizer_facts(tokenizer)},
        "files": file_facts(checkpoint),
    }


def geometry_facts(checkpoint: "Checkpoint") -> dict[str, Any]:
    from twostroke.kv.geometry import Geometry
    from twostroke.models.kv_formats import CODED

    config = checkpoint.config
    ropes = Counter(
        (one.rope.base, one.rope.scaled, one.rope.turned(one.head_dim), one.head_dim) for one in config.attentions
    )
    shapes = Counter((one.num_heads, one.num_kv_heads, one.head_dim) for one in config.attentions)
    windows = Counter(config.windows)
    dtypes = "float32", "bfloat16", *(() if config.latent else CODED)
    return {
        "architecture": config.architecture,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": max(layer.feed_forward.intermediate_size for layer in config.layers),
        "experts": _experts(config),
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_position,
        "windows": [{"window": window, "layers": count} for window, count in windows.items()],
        "ropes": [
            {"base": base, "scaled": scaled, "rotated": turns, "head_dim": whole, "layers": count}
            for (base, scaled, turns, whole), count in ropes.items()
        ],
        "head_shapes": [
            {"heads": heads, "kv_heads": kv_heads, "head_dim": dim, "layers": count}
            for (heads, kv_heads, dim), count in shapes.items()
        ],
        "tied_embeddings": config.tied,
        "recurrent_layers": list(config.state_layers),
        "state_bytes": Geometry.of(config, "bfloat16", "").state_bytes,
        "kv_bytes_per_token": {dtype: Geometry.of(config, dtype, "").entry_bytes for dtype in dtypes},
    }


def _experts(config: "ModelConfig") -> dict[str, int] | None:
    from twostroke.models.config import Experts

    mixtures = [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)]
    return {"count": mixtures[0].count, "chosen": mixtures[0].chosen, "layers": len(mixtures)} if mixtures else None


def weight_facts(checkpoint: "Checkpoint") -> dict[str, dict[str, int]]:
    """Tensors and stored bytes of each number format, the largest first."""
    from twostroke.models.formats.packed_tensor import PackedTensor

    formats: dict[str, dict[str, int]] = {}
    for tensor in checkpoint.stored.values():
        kind = tensor.method if isinstance(tensor, PackedTensor) else tensor.format
        one = formats.setdefault(kind, {"tensors": 0, "bytes": 0})
        one["tensors"] += 1
        one["bytes"] += tensor.nbytes
    return dict(sorted(formats.items(), key=lambda item: -item[1]["bytes"]))


def tokenizer_kind(checkpoint: "Checkpoint") -> str:
    """The tokenizer's kind, as the checkpoint's files name it."""
    from twostroke.models.checkpoints.checkpoint import GgufTokenizerSource

    source = checkpoint.tokenizer_source
    if isinstance(source, GgufTokenizerSource):
        return str(source.metadata["tokenizer.ggml.model"])
    return json.loads((source.directory / "tokenizer.json").read_text(encoding="utf-8"))["model"]["type"]


def tokenizer_facts(tokenizer: "Tokenizer") -> dict[str, Any]:
    eos = sorted(tokenizer.eos_ids)
    return {
        "vocab_size": tokenizer.vocab_size,
        "bos_id": tokenizer.bos_id,
        "adds_bos": tokenizer.add_bos,
        "eos_ids": eos,
        "eos_tokens": [tokenizer.token_text(id) for id in eos],
        "fingerprint": tokenizer.fingerprint,
        "chat_template": tokenizer.chat_template,
    }


def file_facts(checkpoint: "Checkpoint") -> list[dict[str, Any]]:
    return [{"path": str(path), "bytes": Path(path).stat().st_size} for path in checkpoint.files]
