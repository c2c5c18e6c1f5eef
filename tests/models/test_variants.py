"""Variants of a family's config.json and of its files: logits agree with transformers in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.test_against_transformers import all_logits, assert_close, tokens
from tests.tiny import write_model
from twostroke.api.llm import LLM

WINDOW = {"use_sliding_window": True, "sliding_window": 8}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-attention-bias": ("llama", {"attention_bias": True}),
    "llama-mlp-bias": ("llama", {"mlp_bias": True}),
    "llama-both-biases": ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "qwen3-attention-bias": ("qwen3", {"attention_bias": True}),
    "qwen3moe-attention-bias": ("qwen3moe", {"attention_bias": True}),
    "gemma3-attention-bias": ("gemma3", {"attention_bias": True}),
    "swish": ("llama", {"hidden_act": "swish"}),
    "swish-experts": ("qwen3moe", {"hidden_act": "swish"}),
    "gelu": ("mistral", {"hidden_act": "gelu_pytorch_tanh"}),
    "gelu_new": ("llama", {"hidden_act": "gelu_new"}),
    "gelu_fast": ("gemma3", {"hidden_activation": "gelu_fast"}),
    "qwen3moe-window": ("qwen3moe", WINDOW | {"max_window_layers": 1}),
    "qwen3moe-no-window": ("qwen3moe", {"use_sliding_window": False, "sliding_window": 8}),
    "qwen3-window": ("qwen3", WINDOW | {"max_window_layers": 1}),
    "qwen2-window": ("qwen2", WINDOW | {"max_window_layers": 2}),
    "qwen2-all-windows": ("qwen2", WINDOW | {"max_window_layers": 0}),
    "qwen2-layer-types": ("qwen2", WINDOW | {"layer_types": ["sliding_attention", "full_attention"] * 2,
                                             "num_hidden_layers": 4}),
    "mistral-no-window": ("mistral", {"sliding_window": None}),
    "gemma3-all-full": ("gemma3", {"layer_types": ["full_attention"] * 7}),
}  # fmt: skip
# Keys that transformers does not read in these families: their windows and biases are as without them.
UNREAD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"sliding_window": 8, "use_sliding_window": True}),
    "qwen2": ("qwen2", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("mistral", {"use_sliding_window": False, "attention_bias": True}),
    "qwen3moe": ("qwen3moe", WINDOW | {"layer_types": ["full_attention"] * 3, "mlp_bias": True}),
    "gemma3": ("gemma3", {"use_sliding_window": False, "mlp_bias": True}),
}


def compare(directory: Path, model: str | None = None) -> None:
    """Compare 48 rows of logits, computed in steps of 37 tokens and less."""
    reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with LLM(str(directory), backend="reference", kv_bytes=8 << 20, threads=1, max_step_tokens=37) as llm:
        ids = tokens(48, llm.config.vocab_size, seed=0)
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0].numpy()
        assert_close(all_logits(llm, ids), expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_the_config(variant: str, tmp_path: Path) -> None:
    family, changes = VARIANTS[variant]
    compare(write_model(family, tmp_path, **changes))


@pytest.mark.parametrize("family", UNREAD)
def test_keys_that_transformers_does_not_read(family: str, tmp_path: Path) -> None:
    name, changes = UNREAD[family]
    path = write_model(name, tmp_path) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    compare(tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_a_model_that_was_saved_without_its_head(family: str, tmp_path: Path) -> None:
    """transformers' AutoModel saves tensors without the prefix `model.`; the head is the embedding."""
    write_model(family, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(file).items()}
    assert "embed_tokens.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    compare(tmp_path)
