"""The card of a model has its tokenizer, its template and its end tokens."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from twostroke.api.llm import LLM
from twostroke.cluster.model_card import write_card
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.checkpoint import HfTokenizerSource
from twostroke.models.checkpoints.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "the quick brown fox"}]


def test_a_card_is_the_model_to_the_front_end(tiny_llm: Callable[..., LLM], family: str, tmp_path: Path) -> None:
    llm = tiny_llm(family)
    card = write_card(llm, tmp_path)
    read = Tokenizer.from_source(HfTokenizerSource(card))
    assert list(read.encode_chat(MESSAGES)) == list(llm.chat_prompt(MESSAGES))
    assert read.eos_ids == llm.tokenizer.eos_ids
    config = json.loads((card / "config.json").read_text())
    assert config["vocab_size"] == llm.config.vocab_size
    assert write_card(llm, tmp_path) == card, "every worker of the model has the same"
    assert [entry.name for entry in tmp_path.iterdir()] == [card.name]


def test_a_gguf_files_card_tokenizes_as_the_file(smollm: LLM, tmp_path: Path) -> None:
    read = Tokenizer.from_source(HfTokenizerSource(write_card(smollm, tmp_path)))
    assert list(read.encode_chat(MESSAGES)) == list(smollm.chat_prompt(MESSAGES))


def test_a_model_without_a_chat_template_has_no_card(
    tiny_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    with pytest.raises(InvalidRequest, match="chat template"):
        write_card(tiny_llm(), tmp_path)
