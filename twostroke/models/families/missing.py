"""What families lack that are known and not described yet, for the line that refuses them."""

MLA = "latent attention (MLA) with scales of layers and of embeddings, or beside images"
KEY_DECAY = "a decay for each number of a key (Kimi Delta Attention)"
BOTH_WAYS = "attention in both directions, which encoders of texts have"

# `general.architecture` of GGUF files and `model_type` of config.json -> what is missing.
MISSING = (
    dict.fromkeys(("minicpm3", "deepseek2-ocr"), MLA)
    | dict.fromkeys(("kimi-linear", "kimi_linear"), KEY_DECAY)
    | dict.fromkeys(("bert", "modern-bert", "modernbert", "nomic-bert", "nomic_bert"), BOTH_WAYS)
    | dict.fromkeys(("xlm-roberta", "roberta"), BOTH_WAYS)
)


def reason(architecture: object, known: str) -> str:
    """Why no model of an architecture can be opened: what it would take, or which ones can be."""
    if isinstance(architecture, str) and architecture in MISSING:
        return f"is not supported: it has {MISSING[architecture]}"
    return f"is not supported, only {known}"
