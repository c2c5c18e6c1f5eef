"""The card of a model has its tokenizer, its template and its end tokens."""

import fcntl
import json
import shutil
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


def test_cards_of_dead_workers_are_deleted(tiny_llm: Callable[..., LLM], tmp_path: Path) -> None:
    """Who lives holds a lock, which the system takes from who has died. Older versions have none."""
    for name in ("dead", "living", "older"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "dead" / "lock").touch()
    with (tmp_path / "living" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        card = write_card(tiny_llm("qwen3"), tmp_path)
        other = write_card(tiny_llm("llama"), tmp_path)
        assert {entry.name for entry in tmp_path.iterdir()} == {"living", "older", card.name, other.name}
    write_card(tiny_llm("qwen3"), tmp_path)
    assert {entry.name for entry in tmp_path.iterdir()} == {"older", card.name, other.name}


def test_a_card_that_was_deleted_meanwhile_is_written_again(
    tiny_llm: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, flock, gone = tiny_llm("qwen3"), fcntl.flock, list[Path]()

    def slow(lock: int, how: int) -> None:
        """Another worker sweeps between the opening of a lock and its taking."""
        if how == fcntl.LOCK_SH and not gone:
            gone.extend(tmp_path.glob("*/lock"))
            shutil.rmtree(gone[0].parent)
        flock(lock, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    card = write_card(llm, tmp_path)
    assert gone == [card / "lock"]
    assert (card / "config.json").is_file()
