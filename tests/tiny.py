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
DEEPSEEK_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 128,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "moe_intermediate_size": 32,
    "n_routed_experts": 7,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
}
NEMOTRON = {
    "hidden_size": 96,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "n_groups": 2,
    "ssm_state_size": 64,
    "time_step_min": 1e-30,  # steps of any size: it is a limit in transformers' prefills alone
    "moe_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 96,
    "n_routed_experts": 5,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
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
    "qwen3_5": (
        "Qwen3_5",
        {
            "head_dim": 64,
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_5moe": (
        "Qwen3_5Moe",
        {
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 32,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "num_experts": 7,
            "num_experts_per_tok": 3,
        },
    ),
    "qwen3_next": (
        "Qwen3Next",
        {
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 32,
            "linear_value_head_dim": 64,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": (
        "Lfm2",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 5,
            "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "conv_L_cache": 4,
        },
    ),
    "lfm2moe": (
        "Lfm2Moe",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "num_hidden_layers": 4,
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "moe_intermediate_size": 32,
            "num_dense_layers": 1,
            "num_experts": 7,
            "num_experts_per_tok": 3,
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
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"] * 2,
            "sliding_window": 24,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": VOCAB,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4-12b": (
        "Gemma4",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "num_attention_heads": 6,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 24,
            "hidden_size_per_layer_input": 0,
        },
    ),
    "gemma4-moe": (
        "Gemma4",
        {
            "head_dim": 32,
            "global_head_dim": 64,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 7,
            "top_k_experts": 3,
            "moe_intermediate_size": 32,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            "hidden_size": 96,
            "intermediate_size": 32,
            "num_attention_heads": 6,
            "head_dim": 32,
            "sliding_window": 24,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "ministral3": (
        "Ministral3",
        {
            "head_dim": 32,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
            },
        },
    ),
    "granite": (
        "Granite",
        {
            "head_dim": 32,
            "attention_bias": True,
            "mlp_bias": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "granite4": (
        "GraniteMoeHybrid",
        {
            "head_dim": 32,
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["full_attention"] * 3,
            "tie_word_embeddings": True,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "granite4-hybrid": (
        "GraniteMoeHybrid",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "intermediate_size": 32,
            "num_hidden_layers": 4,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 96,
            "layer_types": ["mamba", "full_attention", "mamba", "mamba"],
            "mamba_n_groups": 2,
            "mamba_d_state": 64,
            "mamba_d_head": 32,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.125,
            "residual_multiplier": 0.5,
            "logits_scaling": 2.0,
        },
    ),
    "olmo2": ("Olmo2", {"head_dim": 32, "num_attention_heads": 6}),
    "olmo3": (
        "Olmo3",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "num_hidden_layers": 4,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 10000.0,
                    "factor": 8.0,
                    "attention_factor": 1.2079441541679836,  # YaRN's own; llama.cpp's converter writes it all the same
                    "original_max_position_embeddings": 256,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "qwen2moe": (
        "Qwen2Moe",
        {
            "head_dim": 32,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
            "num_experts": 7,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [1],
        },
    ),
    "phi3": (
        "Phi3",
        {
            "sliding_window": 24,
            "original_max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0 + 0.25 * i for i in range(12)],
                "long_factor": [2.0 + i for i in range(12)],
                "attention_factor": 1.2,
            },
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
        },
    ),
    "glm4": ("Glm4", {"head_dim": 32, "num_attention_heads": 6}),
    "glm": ("Glm", {"head_dim": 32, "attention_bias": True}),
    "deepseek_v2": ("DeepseekV2", MLA | {"q_lora_rank": None, "n_shared_experts": 2, "rope_parameters": DEEPSEEK_YARN}),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        MLA | {"num_attention_heads": 5, "num_key_value_heads": 5, "hidden_size": 96, "v_head_dim": 64},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        MLA | {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "qk_nope_head_dim": 64, "rope_interleave": True},
    ),
    "falcon_h1": (
        "FalconH1",
        {
            "hidden_size": 96,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
            "mamba_n_groups": 2,
            "mamba_d_state": 64,
            "embedding_multiplier": 3.0,
            "lm_head_multiplier": 0.5,
            "mlp_multipliers": [0.9, 0.8],
            "ssm_multipliers": [0.9, 1.1, 0.8, 1.2, 0.7],
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.1,
            "attention_out_multiplier": 0.7,
            "ssm_in_multiplier": 1.2,
            "ssm_out_multiplier": 0.8,
        },
    ),
    "nemotron_h": (
        "NemotronH",
        NEMOTRON | {"layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"]},
    ),
    "nemotron_h_moe": (
        "NemotronH",
        NEMOTRON | {"layers_block_type": ["linear_attention", "moe", "linear_attention", "full_attention", "moe"]},
    ),
    "mixtral": ("Mixtral", {"head_dim": 32, "num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5, "no_rope_layers": [1, 0, 1, 1, 0], "tie_word_embeddings": True}),
}

# Files of a family's layers under another name.
TWINS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_unified": ("Gemma4Unified", FAMILIES["gemma4-12b"][1]),
    "kimi_k2": ("DeepseekV3", MLA | {"n_group": 1, "topk_group": 1}),
}


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")
RECURRENT = (
    *("qwen3_5", "qwen3_5moe", "qwen3_next", "lfm2", "lfm2moe", "granite4-hybrid"),
    *("falcon_h1", "nemotron_h", "nemotron_h_moe"),
)


def write_model(family: str, directory: Path, seed: int = 0, **sizes: Any) -> Path:
    """A random model of a family with a byte-level tokenizer; norms and biases are random too."""
    kind, changes = (FAMILIES | TWINS)[family]
    name = f"{kind}Text" if kind in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe") else kind
    chosen = COMMON | changes | sizes
    if "vocab_size_per_layer_input" in chosen:
        chosen["vocab_size_per_layer_input"] = chosen["vocab_size"]
    if "mamba_d_head" in chosen and "mamba_d_ssm" not in chosen:
        chosen["mamba_n_heads"] = 2 * chosen["hidden_size"] // chosen["mamba_d_head"]
    config = getattr(transformers, f"{name}Config")(**chosen)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        scalars = [(name, one) for name, one in model.named_buffers() if name.endswith(("layer_scalar", "_bias"))]
        for parameter_name, parameter in [*model.named_parameters(), *scalars]:
            # Every tensor must have an effect: a bias of 0 or a norm of 1 would hide a mistake.
            factor = any(part in parameter_name for part in ("norm", "scal")) and kind not in ("Gemma2", "Gemma3")
            shift = 1.0 if factor else 0.0
            shift = -2.0 if parameter_name.endswith("A_log") else shift  # a state that forgets slowly
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
