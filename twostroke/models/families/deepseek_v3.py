"""DeepSeek-V3, and GLM-4.7-Flash: V2's layers with sigmoids of experts, and a bias for their choice (arXiv:2412.19437).

Their files end with a layer that guesses further tokens, with copies of the embeddings and of the head.
"""

from typing import ClassVar

from twostroke.models.families.config_source import ConfigSource
from twostroke.models.families.deepseek_v2 import DeepSeekV2


class DeepSeekV3(DeepSeekV2):
    name = "deepseek_v3"
    gguf = None  # its files are those of `DeepSeekV2`
    model_types = ("deepseek_v3", "kimi_k2")
    transformers = "DeepseekV3ForCausalLM"
    defaults: ClassVar = {
        **DeepSeekV2.defaults,
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "max_position_embeddings": 4096,
    }
    guess_layers = True
    huggingface_guesser: ClassVar = {
        "norm": "shared_head.norm.weight",
        "join.projection": "eh_proj.weight",
        "join.embed_norm": "enorm.weight",
        "join.hidden_norm": "hnorm.weight",
    }

    def sigmoid(self, source: ConfigSource) -> bool:
        return True


class Glm4MoELite(DeepSeekV3):
    name = "glm4_moe_lite"
    model_types = ("glm4_moe_lite",)
    transformers = "Glm4MoeLiteForCausalLM"
    defaults: ClassVar = {
        **DeepSeekV3.defaults,
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 202752,
    }
