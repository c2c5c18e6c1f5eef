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
