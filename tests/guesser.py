"""Heads of multi-token prediction with random weights, and what they guess by their definition, in transformers."""

import json
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny import write_model

OUTER = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")
# Of a head that is a layer behind the last: the norms of embeddings and of hidden states, and the projection.
JOIN = ("enorm.weight", "hnorm.weight", "eh_proj.weight")


def add_guesser(directory: Path, seed: int = 7) -> Path:
    """Add the head that files of Qwen3.5 and Qwen3-Next have to a model's directory."""
    made = PlainGuesser(directory, empty=True)
    path, size = directory / "model.safetensors", made.model.config.get_text_config().hidden_size
    shapes = dict.fromkeys(OUTER, (size,)) | {"fc.weight": (size, 2 * size)}
    shapes |= {f"layers.0.{name}": one.shape for name, one in made.layer.model.layers[0].named_parameters()}
    save_file(load_file(path) | random({f"mtp.{name}": shape for name, shape in shapes.items()}, seed), path)
    return directory


def write_with_layer(family: str, directory: Path, seed: int = 7) -> Path:
    """A model of DeepSeek-V3's form whose head is a layer behind the last, as published files have it: transformers
    makes that layer as one more, and its inputs are added, with copies of the embeddings and of the head."""
    write_model(family, directory, num_hidden_layers=4)
    path, described = directory / "model.safetensors", directory / "config.json"
    values, tensors = json.loads(described.read_text()), load_file(path)
    size, layer = values["hidden_size"], "model.layers.3."
    shapes: dict[str, Sequence[int]] = {f"{layer}{name}": (size,) for name in (*JOIN[:2], "shared_head.norm.weight")}
    tensors |= random(shapes | {f"{layer}{JOIN[2]}": (size, 2 * size)}, seed)
    tensors[f"{layer}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{layer}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path)
    described.write_text(json.dumps(_with_layers(values, 3) | {"num_nextn_predict_layers": 1}))
    return directory


def random(shapes: dict[str, Sequence[int]], seed: int) -> dict[str, torch.Tensor]:
    """Tensors of these shapes; norms vary by a factor of 0.2."""
    generator = torch.Generator().manual_seed(seed)

    def scale(shape: Sequence[int]) -> float:
        return 0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5

    return {name: torch.randn(*shape, generator=generator) * scale(shape) for name, shape in shapes.items()}


def _with_layers(values: dict[str, Any], count: int) -> dict[str, Any]:
    """A config of the first layers; of the last of four, if there is one."""
    kinds = values.get("mlp_layer_types")
    cut = {} if kinds is None else {"mlp_layer_types": kinds[:count] if count > 1 else ["sparse"]}
    return values | {"num_hidden_layers": count} | cut | ({"first_k_dense_replace": 0} if count == 1 else {})


class PlainGuesser:
    """A model and its head, as vLLM's `qwen3_next_mtp.py` and `deepseek_mtp.py` define it, without any cache."""

    def __init__(self, directory: Path, empty: bool = False) -> None:
        """`empty`: whether the directory has no head yet."""
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self.stored = load_file(directory / "model.safetensors")
        inner = f"model.layers.{self.model.config.get_text_config().num_hidden_layers}."
        if inner + JOIN[2] in self.stored:
            self.layer: Any = self._last_layer(directory, inner)
            self.norms = [self.stored[inner + name] for name in JOIN[:2]]
            self.projection = self.stored[inner + JOIN[2]]
            return
        config = transformers.AutoConfig.from_pretrained(directory).get_text_config()
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        self.layer = type(self.model)(config)
        if empty:
            return
        parts = {name.removeprefix("mtp.layers.0."): one for name, one in self.stored.items() if "mtp.layers" in name}
        self.layer.model.layers[0].load_state_dict(parts)
        self.layer.model.norm.weight.data = self.stored["mtp.norm.weight"]
        fc, *norms = (self.stored[f"mtp.{name}"] for name in OUTER[:3])
        self.norms, self.projection = [1 + one for one in norms], fc

    def _last_layer(self, directory: Path, inner: str) -> Any:
        """A model of that layer alone."""
        own = {name.replace(inner, "model.layers.0."): one for name, one in self.stored.items() if inner in name}
        own |= {name: self.stored[name] for name in ("model.embed_tokens.weight", "lm_head.weight")}
        own["model.norm.weight"] = own.pop("model.layers.0.shared_head.norm.weight")
        values = json.loads((directory / "config.json").read_text())
        with tempfile.TemporaryDirectory() as room:
            (Path(room) / "config.json").write_text(json.dumps(_with_layers(values, 1)))
            save_file(own, Path(room) / "model.safetensors", {"format": "pt"})
            return transformers.AutoModelForCausalLM.from_pretrained(room, dtype=torch.float32)

    @cached_property
    def _eps(self) -> float:
        return self.layer.config.rms_norm_eps

    def _normed(self, x: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * norm

    @torch.no_grad()
    def guesses(self, text: list[int], first: int, count: int) -> list[int]:
        """What it guesses behind a text, if it reads what follows position `first`."""
        hidden, made = self.model.model(torch.tensor([text])).last_hidden_state[0, first : len(text) - 1], text[:]
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor(made[first + 1 :]))
            joined = [self._normed(one, norm) for one, norm in zip((embedded, hidden), self.norms, strict=True)]
            states = torch.cat(joined, -1) @ self.projection.T
            behind = self.layer.model(inputs_embeds=states[None], use_cache=False).last_hidden_state[0]
            made.append(int(self.model.lm_head(behind[-1]).argmax()))
            hidden = torch.cat([hidden, behind[-1:]])
        return made[len(text) :]
