"""Width pruning: a student without the hidden and intermediate channels that calibration text uses least.

Importance is by activations as in Minitron (Muralidharan et al. 2024, arXiv:2407.14679, section 2.2) and OverFill (Kim
et al. 2025): for hidden channels the mean magnitude of all norms' outputs, for intermediate channels that of the gated
activations, by layer. Layers, heads and head_dim are kept, so the KV geometry does not change. `distilling` recovers a
part of the loss.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from twostroke.backends.reference.backend import ReferenceBackend
from twostroke.backends.reference.operations import DenseWeight, Operations
from twostroke.engine.engine import Engine
from twostroke.engine.model_loader import ModelLoader, new_pool
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.checkpoint import Checkpoint, HfTokenizerSource
from twostroke.models.checkpoints.huggingface.directory import tensor_names
from twostroke.models.checkpoints.huggingface.safetensors import SINGLE
from twostroke.models.checkpoints.tokenizer import FILES, Tokenizer
from twostroke.models.config import GatedMLP, ModelConfig
from twostroke.models.families import BY_NAME
from twostroke.models.families.tensor_names import fused_rows
from twostroke.models.feed_forward import Activation
from twostroke.models.tensor_shapes import tensor_shapes
from twostroke.sampling.params import SamplingParams

WINDOW = 512  # tokens of calibration text in one context
MULTIPLE = 32  # widths are multiples of this, which every backend and weight format supports
# The axes of a tensor that are hidden (h) and intermediate (i) channels; q, k and v biases and head norms have none.
AXES = {"embed": " h", "head": " h", "norm": "h", "attn_norm": "h", "mlp_norm": "h", "q": " h", "k": " h", "v": " h",
        "o": "h ", "gate": "ih", "up": "ih", "down": "hi",
        "o_bias": "h", "gate_bias": "i", "up_bias": "i", "down_bias": "h"}  # fmt: skip


class Observer(Operations):
    """Sums the magnitudes of the outputs of norms and gated activations."""

    def __init__(self, config: ModelConfig, intermediate_size: int) -> None:
        super().__init__()
        self.hidden = np.zeros(config.hidden_size)
        self.intermediate = np.zeros((config.num_layers, intermediate_size))
        self._layer = 0

    def norm(self, x: torch.Tensor, weight: DenseWeight, eps: float) -> torch.Tensor:
        normed = super().norm(x, weight, eps)
        if normed.dim() == 2:  # not the norms within heads
            self.hidden += normed.abs().double().sum(0).numpy()
        return normed

    def gated_linear(self, x: torch.Tensor, weight: DenseWeight, activation: Activation) -> torch.Tensor:
        gated = super().gated_linear(x, weight, activation)
        self.intermediate[self._layer] += gated.abs().double().sum(0).numpy()
        self._layer = (self._layer + 1) % len(self.intermediate)
        return gated


def prune(
    checkpoint: Checkpoint, text: str, directory: Path, hidden: float, intermediate: float, max_tokens: int = 16384
) -> ModelConfig:
    """Write a narrower model as a Hugging Face directory (bfloat16), and return its config.

    Args:
        text: calibration text; its first `max_tokens` tokens are read, in windows of 512.
        hidden, intermediate: shares of the widths to remove, from 0 to below 1; the new widths are multiples of 32.

    Raises:
        InvalidRequest: a share out of range, too little text, an unsupported family, an existing directory, or a full
            disk. Nothing stays of a new directory then.
    """
    config = checkpoint.config
    tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
    mlp = replace(
        found := mlp_of(config), intermediate_size=_width("intermediate", found.intermediate_size, intermediate)
    )
    kept = replace(
        config,
        hidden_size=_width("hidden", config.hidden_size, hidden),
        layers=tuple(replace(layer, feed_forward=mlp) for layer in config.layers),
    )
    described = _config_json(checkpoint, kept, tokenizer)
    tokens = tokenizer.encode(text)[:max_tokens]
    if len(tokens) < MULTIPLE:
        raise InvalidRequest(f"calibration needs at least {MULTIPLE} tokens of text, not {len(tokens)}")
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise InvalidRequest(f"{directory} exists already: name another directory") from None
    try:
        write_tensors(config, _cut(checkpoint, kept, observe(checkpoint, tokenizer, tokens)), directory)
        (directory / "config.json").write_text(json.dumps(described, indent=2) + "\n")
        _write_tokenizer(checkpoint, tokenizer, directory)
    except BaseException:  # Ctrl-C too: half a student would be in the way of the next try (see `Engine.tokens`)
        shutil.rmtree(directory, ignore_errors=True)
        raise
    return kept


def _cut(checkpoint: Checkpoint, kept: ModelConfig, seen: Observer) -> dict[str, torch.Tensor]:
    """The weights of the channels that stay, in bfloat16."""
    channels = _largest(seen.hidden, kept.hidden_size)
    inner = [_largest(row, mlp_of(kept).intermediate_size) for row in seen.intermediate]
    tensors: dict[str, torch.Tensor] = {}
    for ours in tensor_shapes(checkpoint.config):
        tensor = torch.from_numpy(checkpoint.tensor(ours).dequantize())
        layer, part = (int(ours.split(".")[1]), ours.split(".")[2]) if "." in ours else (0, ours)
        for axis, kind in enumerate(AXES.get(part, "")):
            if kind != " ":
                tensor = tensor.index_select(axis, channels if kind == "h" else inner[layer])
        tensors[ours] = tensor.bfloat16()
    return tensors


def write_tensors(config: ModelConfig, tensors: Mapping[str, torch.Tensor], directory: Path) -> None:
    """Write weights, given by Twostroke name, to a directory in bfloat16; an old file is replaced atomically.

    Raises InvalidRequest if there is no room; the old file stays.
    """
    names = tensor_names(config, "model.", "lm_head.weight")
    written = {theirs: tensors[ours].bfloat16().contiguous() for ours, theirs in names.items()}
    new = directory / f"{SINGLE}.new"
    try:
        save_file(written, new, metadata={"format": "pt"})
        new.replace(directory / SINGLE)  # the old file may be mapped
    except SafetensorError as error:
        raise InvalidRequest(f"{directory / SINGLE} cannot be written: {error}") from None
    finally:
        new.unlink(missing_ok=True)


def observe(checkpoint: Checkpoint, tokenizer: Tokenizer, tokens: list[int]) -> Observer:
    """Run text through the model, and sum its activations."""
    observer, backend = Observer(checkpoint.config, mlp_of(checkpoint.config).intermediate_size), ReferenceBackend()
    backend.operations = observer
    opening = ModelLoader(backend, index="off")
    model = opening.load(checkpoint, tokenizer, lambda geometry: new_pool(geometry, WINDOW // 16 + 1, 16, backend))
    engine = Engine({"main": model}, "main")
    for start in range(0, len(tokens), WINDOW):

        def program(window: list[int] = tokens[start : start + WINDOW]) -> Program:
            yield Prefill(window, logits="none")

        engine.finish([engine.submit(Request(program, SamplingParams(), tokenizer))])
    return observer


def mlp_of(config: ModelConfig) -> GatedMLP:
    """The MLP of every layer. Raises InvalidRequest for a model that cannot be pruned."""
    names = tensor_names(config, "model.", "lm_head.weight")
    if BY_NAME[config.architecture].transforms(config, "huggingface") or fused_rows(config, names, {}):
        raise InvalidRequest(f"{config.architecture} cannot be pruned: its files have matrices in another form")
    first = config.layers[0].feed_forward
    alike = all(layer.feed_forward == first and not layer.post_norms for layer in config.layers)
    if not isinstance(first, GatedMLP) or not alike:
        raise InvalidRequest(
            f"{config.architecture} cannot be pruned, only models with one gated MLP and two norms per layer"
        )
    return first


def _width(name: str, full: int, share: float) -> int:
    if not 0 <= share < 1:
        raise InvalidRequest(f"{name} must be from 0 to below 1, not {share}")
    return full if share == 0 else max(MULTIPLE, round(full * (1 - share) / MULTIPLE) * MULTIPLE)


def _largest(scores: np.ndarray, count: int) -> torch.Tensor:
    """The indices of the `count` largest scores, in ascending order."""
    return torch.from_numpy(np.sort(np.argsort(-scores, kind="stable")[:count]))


def _config_json(checkpoint: Checkpoint, kept: ModelConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The contents of config.json: those of the model's directory, or made from a GGUF file's config."""
    family = BY_NAME[kept.architecture]
    widths = {
        "hidden_size": kept.hidden_size,
        "intermediate_size": mlp_of(kept).intermediate_size,
        "head_dim": kept.head_dim,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
    }
    if isinstance(source := checkpoint.tokenizer_source, HfTokenizerSource):
        return json.loads((source.directory / "config.json").read_text()) | widths
    if any(rope.scaled for rope in kept.ropes) or len(set(kept.ropes)) > 1:
        raise InvalidRequest(f"{checkpoint.name} has scaled RoPE, and GGUF lacks its parameters: prune a directory")
    if (kept.embedding_scale, kept.residual_scale, kept.logit_scale) != (1, 1, 1):
        raise InvalidRequest(f"{checkpoint.name} has factors that only its own config.json states: prune a directory")
    return widths | {
        "architectures": [family.transformers],
        "model_type": family.model_types[0],
        "num_hidden_layers": kept.num_layers,
        "num_attention_heads": kept.num_heads,
        "num_key_value_heads": kept.num_kv_heads,
        "vocab_size": kept.vocab_size,
        "max_position_embeddings": kept.max_position,
        "rms_norm_eps": kept.norm_eps,
        "rope_theta": kept.ropes[0].base,
        "tie_word_embeddings": kept.tied,
        "hidden_act": "silu",
        "attention_bias": kept.layers[0].attention.output_bias,
        "mlp_bias": mlp_of(kept).bias,
        "sliding_window": kept.windows[0],
        "eos_token_id": sorted(tokenizer.eos_ids),
    }


def _write_tokenizer(checkpoint: Checkpoint, tokenizer: Tokenizer, directory: Path) -> None:
    if not isinstance(source := checkpoint.tokenizer_source, HfTokenizerSource):
        tokenizer.save(directory)
        return
    for name in FILES:
        if (found := source.directory / name).is_file():
            shutil.copy(found, directory / name)
