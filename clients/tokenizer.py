"""A catalog model's tokenizer as a directory that transformers reads, for programs that count tokens themselves."""

# pyright: reportPrivateUsage=false

import json
from pathlib import Path

from benchmarks.peer.weights import once
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer


def tokenizer_directory(model: str, work: Path) -> str:
    """The directory, made below `work` the first time."""

    def make(directory: Path) -> None:
        tokenizer = Tokenizer.from_source(open_checkpoint(model).tokenizer_source)
        facts = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": tokenizer.chat_template}
        directory.mkdir()
        tokenizer.backend.save(str(directory / "tokenizer.json"))
        (directory / "tokenizer_config.json").write_text(json.dumps({**facts, **tokenizer.special_tokens}))

    return once(work / "tokenizers" / model, make)
