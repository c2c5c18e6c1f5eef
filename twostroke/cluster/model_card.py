"""The directory by which Dynamo's front end knows a model: its config, its tokenizer, its chat template.

It is written from what is open, so it is the same for GGUF files and directories, and for every worker of a model.
"""

import hashlib
import json
import os
import tempfile
from pathlib import Path

from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.models.families import BY_NAME
from twostroke.system.home import home


def write_card(llm: LLM, folder: Path | None = None) -> Path:
    """The model's directory, written below `folder` (that of this user's data) unless it is there.

    Raises InvalidRequest for a model without a chat template, which the front end cannot serve.
    """
    if llm.tokenizer.chat_template is None:
        raise InvalidRequest(f"{llm.name} has no chat template, and Dynamo's front end serves no model without one")
    folder = folder or home() / "cluster" / "cards"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary) / "card"
        made.mkdir()
        llm.tokenizer.save(made)
        (made / "config.json").write_text(json.dumps(_config(llm), indent=2) + "\n")
        digest = hashlib.blake2b(digest_size=8)
        for file in sorted(made.iterdir()):
            digest.update(file.name.encode() + b"\n" + file.read_bytes())
        card = folder / digest.hexdigest()
        if not card.is_dir():
            try:
                os.rename(made, card)
            except OSError:  # another worker was sooner
                if not card.is_dir():
                    raise
    return card


def identity(llm: LLM) -> str:
    """Hex digest of all that an answer's tokens depend on: weights, kernels' variant, KV dtype, page size, companions.

    A draft is left out: it only guesses tokens.
    """
    parts = sorted((role, model.id) for role, model in llm.engine.models.items() if role != "draft")
    return hashlib.blake2b(repr((parts, llm.max_model_len)).encode(), digest_size=16).hexdigest()


def _config(llm: LLM) -> dict[str, object]:
    """What the front end reads of config.json, and the identity: it refuses workers with another card than the first.

    It compares prefill workers with each other, and decode workers with each other: a student has a card of its own.
    """
    config, family = llm.config, BY_NAME[llm.config.architecture]
    return {
        "architectures": [family.transformers],
        "model_type": family.model_types[0],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.max_position,
        "bos_token_id": llm.tokenizer.bos_id,
        "eos_token_id": sorted(llm.tokenizer.eos_ids),
        "twostroke_identity": identity(llm),
    }
