"""Values of config.json that a family cannot use: one clear line that names the file and the key."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twostroke.errors import CheckpointError, UnsupportedArchitecture
from twostroke.models.checkpoints.huggingface.directory import open_huggingface
from twostroke.models.config import ModelConfig

Directory = Callable[[str], Path]
Change = Callable[[dict[str, Any]], dict[str, Any]]


def edited(directory: Path, into: Path, change: Change) -> Path:
    """A copy whose config.json is changed."""
    shutil.copytree(directory, into)
    values = json.loads((into / "config.json").read_text())
    (into / "config.json").write_text(json.dumps(change(values)))
    return into


def rope(**changes: Any) -> Change:
    return lambda values: values | {"rope_parameters": values["rope_parameters"] | changes}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must be a list of 5 numbers 0 and 1"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval must be a positive"),
        ("smollm3", {"use_sliding_window": True}, "smollm3 with use_sliding_window is not supported"),
        ("phi3", rope(partial_rotary_factor=0.3), "partial_rotary_factor must be an even part of 32"),
        ("phi3", rope(short_factor=[1.0] * 16), "short_factor must be a list of 12 numbers"),
        ("phi3", {"rope_scaling": {"type": "yarn"}}, "phi3 with RoPE scaling 'yarn' is not supported"),
        ("phi3", {"num_attention_heads": 6, "head_dim": 32}, "where there are 256 rows"),
        ("glm4", rope(partial_rotary_factor=2), "partial_rotary_factor must be an even part of 32 numbers; it is 2"),
        ("llama", rope(partial_rotary_factor=0.5), "llama with partial_rotary_factor 0.5 is not supported"),
        ("gemma2", {"attn_logit_softcapping": -1}, "attn_logit_softcapping must be a positive number; it is -1"),
        ("llama", {"attn_logit_softcapping": 2.0}, "llama with attn_logit_softcapping is not supported"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be a positive number; it is 0"),
        ("granite", {"residual_multiplier": None}, "residual_multiplier must be a positive number; it is missing"),
        ("granite4", {"layer_types": ["mamba"] * 3}, "granitemoehybrid with no layer of attention is not supported"),
        ("granite4", {"layer_types": ["mamba", "attention"]}, "layer_types must be one for each layer"),
        ("granite4", {"layer_types": ["attention", "mlp", "mamba"]}, "granitemoehybrid with layer_types other than"),
        ("granite4-hybrid", {"time_step_limit": [0.1, 2.0]}, "granitemoehybrid with time_step_limit is not supported"),
        ("granite4-hybrid", {"mamba_conv_bias": False}, "granitemoehybrid with biases of Mamba's projections, or none"),
        ("granite4-hybrid", {"mamba_n_heads": 5}, "mamba_n_heads must be a multiple of 2 groups"),
        ("qwen3_next", {"mlp_only_layers": [1]}, "qwen3_next with layers without experts, or weights that are not"),
        ("lfm2", {"conv_bias": True}, "lfm2 with conv_bias is not supported"),
        ("lfm2moe", {"routed_scaling_factor": 2.0}, "lfm2moe with factors of experts"),
        ("lfm2moe", {"num_dense_layers": -1}, "num_dense_layers must be from 0 to 4"),
        ("granite4", {"position_embedding_type": "alibi"}, "position_embedding_type 'alibi' is not supported"),
        ("ministral3", rope(llama_4_scaling_beta="much"), "llama_4_scaling_beta must be a positive number"),
        ("olmo3", {"layer_types": ["chunked_attention"] * 4}, "layer_types other than full_attention and sliding"),
        ("gemma4-moe", {"top_k_experts": 8}, "top_k_experts must be at most the 7 experts; it is 8"),
        ("gemma4-moe", {"num_experts": None}, "num_experts must be a positive integer"),
        ("gemma4", {"num_kv_shared_layers": 5}, "num_kv_shared_layers must be fewer, as no layer makes keys with the"),
        ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers must be fewer"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "attention in both directions, or with biases is not"),
        ("gemma4", {"per_layer_config": {"4": {"head_dim": 7}}}, "must be one that fits 4 heads and 2 KV heads"),
        ("gemma4", {"per_layer_config": [3]}, "per_layer_config must be an object for each layer"),
        ("gpt_oss", {"swiglu_limit": 5.0}, "gpt_oss with swiglu_limit 5.0 is not supported"),
        ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most the 5 experts; it is 9"),
        ("qwen3_5", {"layer_types": [["full_attention"]] * 4}, "layer_types other than full_attention and linear"),
        ("qwen2moe", {"use_sliding_window": True}, "qwen2moe with use_sliding_window True is not supported"),
        ("qwen2moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a"),
    ],
)  # fmt: skip
def test_bad_values_are_one_clear_error(
    family: str, changes: dict[str, Any] | Change, message: str, tiny_directory: Directory, tmp_path: Path
) -> None:
    change = (lambda values: values | changes) if isinstance(changes, dict) else changes
    directory = edited(tiny_directory(family), tmp_path / "a", change)
    with pytest.raises((CheckpointError, UnsupportedArchitecture)) as caught:
        open_huggingface(directory)
    assert message in str(caught.value)
    assert str(directory) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_window_as_long_as_the_context_is_none(tiny_directory: Directory, tmp_path: Path) -> None:
    """Phi-4-mini's config.json has one, of twice the context."""
    directory = edited(tiny_directory("phi3"), tmp_path / "a", lambda values: values | {"sliding_window": 2048})
    assert open_huggingface(directory).config.windows == (None,) * 3


@pytest.mark.parametrize("family", ["ministral3", "mistral"])
def test_the_text_model_within_mistral3(family: str, tiny_directory: Directory, tmp_path: Path) -> None:
    """Its config says which family it is."""

    def with_vision(values: dict[str, Any]) -> dict[str, Any]:
        return {"model_type": "mistral3", "text_config": values, "vision_config": {"model_type": "pixtral"}}

    found: ModelConfig = open_huggingface(edited(tiny_directory(family), tmp_path / "a", with_vision)).config
    assert found == open_huggingface(tiny_directory(family)).config
