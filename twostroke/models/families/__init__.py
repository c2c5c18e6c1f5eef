"""The families of models, one file each. Both loaders know every family listed here."""

from twostroke.models.families.family import Family
from twostroke.models.families.gemma3 import Gemma3
from twostroke.models.families.llama import Llama
from twostroke.models.families.mistral import Mistral
from twostroke.models.families.qwen2 import Qwen2
from twostroke.models.families.qwen3 import Qwen3
from twostroke.models.families.qwen3_moe import Qwen3MoE

FAMILIES: tuple[Family, ...] = (Llama(), Mistral(), Qwen2(), Qwen3(), Qwen3MoE(), Gemma3())
BY_NAME = {family.name: family for family in FAMILIES}
BY_GGUF = {family.gguf: family for family in FAMILIES if family.gguf is not None}
BY_MODEL_TYPE = {kind: family for family in FAMILIES for kind in family.model_types}

__all__ = ["BY_GGUF", "BY_MODEL_TYPE", "BY_NAME", "FAMILIES", "Family"]
