"""Tiny random models of every family, written by transformers as Hugging Face directories."""

import json
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, trainers

VOCAB = 384
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
    "initializer_range": 0.3,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": 24, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
        },
    ),
}


def write_model(family: str, directory: Path, seed: int = 0, **sizes: Any) -> Path:
    """A random model of a family with a byte-level tokenizer; norms and biases are random too."""
    kind, changes = FAMILIES[family]
    name = "Gemma3Text" if kind == "Gemma3" else kind
    config = getattr(transformers, f"{name}Config")(**(COMMON | changes | sizes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            # Every tensor must have an effect: a bias of 0 or a norm of 1 would hide a mistake.
            shift = 1.0 if "norm" in parameter_name and kind != "Gemma3" else 0.0
            scale = 0.2 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale + shift)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_tokenizer(directory: Path) -> None:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(["the quick brown fox jumps over the lazy dog and then the cat " * 3], trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
