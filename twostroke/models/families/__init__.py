"""The families of models, those of one kin in a file. Both loaders know every family listed here."""

from twostroke.models.families.deepseek import DeepSeekV2, DeepSeekV3, Glm4MoELite
from twostroke.models.families.falcon_h1 import FalconH1
from twostroke.models.families.family import Family
from twostroke.models.families.gemma import Gemma2, Gemma3, GemmaEmbedding
from twostroke.models.families.gemma4 import Gemma4, Gemma4Unified
from twostroke.models.families.glm4 import Glm, Glm4
from twostroke.models.families.gpt_oss import GptOss
from twostroke.models.families.granite import Granite, GraniteHybrid
from twostroke.models.families.lfm2 import Lfm2, Lfm2MoE
from twostroke.models.families.llama import Llama, SmolLM3
from twostroke.models.families.mistral import Ministral3, Mistral, Mixtral
from twostroke.models.families.nemotron_h import NemotronH, NemotronHMoE
from twostroke.models.families.olmo import Olmo2, Olmo3
from twostroke.models.families.phi3 import Phi3
from twostroke.models.families.qwen import Qwen2, Qwen2MoE, Qwen3, Qwen3MoE
from twostroke.models.families.qwen3_5 import Qwen3_5, Qwen3_5MoE, Qwen3Next

FAMILIES: tuple[Family, ...] = (
    *(Llama(), Mistral(), Ministral3(), Mixtral(), Qwen2(), Qwen2MoE(), Qwen3(), Qwen3MoE(), Qwen3_5(), SmolLM3()),
    *(Gemma2(), Gemma3(), Gemma4(), GptOss(), Granite(), GraniteHybrid(), Olmo2(), Olmo3(), Phi3(), Glm(), Glm4()),
    *(GemmaEmbedding(), Gemma4Unified(), Lfm2(), Lfm2MoE(), Qwen3_5MoE(), Qwen3Next()),
    *(DeepSeekV2(), DeepSeekV3(), Glm4MoELite(), FalconH1(), NemotronH(), NemotronHMoE()),
)
BY_NAME = {family.name: family for family in FAMILIES}
BY_GGUF = {family.gguf: family for family in FAMILIES if family.gguf is not None}
BY_MODEL_TYPE = {kind: family for family in FAMILIES for kind in family.model_types}

__all__ = ["BY_GGUF", "BY_MODEL_TYPE", "BY_NAME", "FAMILIES", "Family"]
