"""Heads of multi-token prediction with random weights, and what they guess by their definition, in transformers."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

OUTER = ("fc.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight", "norm.weight")


def add_guesser(directory: Path, seed: int = 7) -> Path:
    """Add the head that files of Qwen3.5 and Qwen3-Next have to a model's directory."""
    made = PlainGuesser(directory, empty=True)
    path, generator = directory / "model.safetensors", torch.Generator().manual_seed(seed)

    def random(name: str, shape: Sequence[int]) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * (0.2 if len(shape) == 1 else 1.5 * shape[-1] ** -0.5)

    size = made.model.config.get_text_config().hidden_size
    shapes = dict.fromkeys(OUTER, (size,)) | {"fc.weight": (size, 2 * size)}
    shapes |= {f"layers.0.{name}": one.shape for name, one in made.layer.model.layers[0].named_parameters()}
    added = {f"mtp.{name}": random(name, shape) for name, shape in shapes.items()}
    save_file(load_file(path) | added, path)
    return directory


class PlainGuesser:
    """A model and its head, as vLLM's `qwen3_next_mtp.py` defines it, without any cache."""

    def __init__(self, directory: Path, empty: bool = False) -> None:
        """`empty`: whether the directory has no head yet."""
        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        config = transformers.AutoConfig.from_pretrained(directory).get_text_config()
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        self.layer: Any = type(self.model)(config)
        self.stored = {} if empty else load_file(directory / "model.safetensors")
        if empty:
            return
        parts = {name.removeprefix("mtp.layers.0."): one for name, one in self.stored.items() if "mtp.layers" in name}
        self.layer.model.layers[0].load_state_dict(parts)
        self.layer.model.norm.weight.data = self.stored["mtp.norm.weight"]

    @cached_property
    def _eps(self) -> float:
        return self.layer.config.rms_norm_eps

    def _normed(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._eps) * (1 + self.stored[f"mtp.{name}.weight"])

    @torch.no_grad()
    def guesses(self, text: list[int], first: int, count: int) -> list[int]:
        """What it guesses behind a text, if it reads what follows position `first`."""
        hidden, made = self.model.model(torch.tensor([text])).last_hidden_state[0, first : len(text) - 1], text[:]
        for _ in range(count):
            embedded = self.model.model.embed_tokens(torch.tensor(made[first + 1 :]))
            joined = [self._normed(embedded, "pre_fc_norm_embedding"), self._normed(hidden, "pre_fc_norm_hidden")]
            states = torch.cat(joined, -1) @ self.stored["mtp.fc.weight"].T
            behind = self.layer.model(inputs_embeds=states[None], use_cache=False).last_hidden_state[0]
            made.append(int(self.model.lm_head(behind[-1]).argmax()))
            hidden = torch.cat([hidden, behind[-1:]])
        return made[len(text) :]
