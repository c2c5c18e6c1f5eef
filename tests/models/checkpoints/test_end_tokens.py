"""Tokens that end answers, in files that type them as text or state another EOS."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from tests.models.checkpoints.test_tokenizer import gguf_of
from tests.tiny import write_model, write_tokenizer
from twostroke.api.llm import LLM
from twostroke.models.checkpoints.checkpoint import HfTokenizerSource
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


@pytest.fixture(scope="module")
def source() -> Any:
    return open_checkpoint("smollm2-135m").tokenizer_source


@pytest.mark.parametrize("kind", [1, 4])
def test_an_end_of_turn_typed_as_text_ends_the_answer(kind: int, source: Any, caplog: pytest.LogCaptureFixture) -> None:
    types = np.array(source.metadata["tokenizer.ggml.token_type"])
    end = list(source.metadata["tokenizer.ggml.tokens"]).index("<|im_end|>")
    types[end] = kind
    tokenizer = Tokenizer.from_source(gguf_of(source, token_type=types, eos_token_id=0))
    assert end in tokenizer.eos_ids
    assert tokenizer.encode("a<|im_end|>b") == [*tokenizer.encode("a"), end, *tokenizer.encode("b")]
    assert tokenizer.decode([end]) == ""
    assert caplog.messages == [
        f"{source.path}: <|im_end|> typed as text; it ends answers here, as a special token does"
    ]


@pytest.mark.parametrize("key", ["eot_token_id", "eom_token_id"])
def test_eot_and_eom_of_the_metadata_end_answers(key: str, source: Any) -> None:
    assert 9 in Tokenizer.from_source(gguf_of(source, **{key: 9})).eos_ids


def directory(folder: Path, tokens: list[str], template: str, special: bool = False, **generation: Any) -> Tokenizer:
    write_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([tokenizers.AddedToken(text, special=special) for text in tokens])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text()) | {"chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return Tokenizer.from_source(HfTokenizerSource(folder))


@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHATML, "<|im_end|>"),
        (CHATML.replace("<|im_end|>", "<my_end>"), "<my_end>"),  # known from the template alone
        (CHATML.replace("<|im_end|>", " <my_end>"), "<my_end>"),
    ],
)
def test_what_the_template_writes_after_an_answer_ends_it(template: str, end: str, tmp_path: Path) -> None:
    tokenizer = directory(tmp_path, ["<|im_start|>", end], template)
    id = tokenizer.encode(end)
    assert tokenizer.eos_ids == {1, *id}
    assert tokenizer.decode(id) == ""
    assert tokenizer.decode(tokenizer.encode("<|im_start|>")) == "<|im_start|>"


def test_templates_that_say_nothing_of_it(tmp_path: Path) -> None:
    for template in ("{{ raise_exception('no') }}", "{{ bos_token }}{{ messages[0].content }}", "{% if %}", ""):
        assert directory(tmp_path, ["<x>"], template).eos_ids == {1}


def test_harmonys_end_of_a_message_is_not_the_end_of_a_turn(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|start|>{{ m.content }}<|end|>{% endfor %}"
    tokenizer = directory(tmp_path, ["<|end|>", "<|return|>", "<|call|>", "<|start|>"], template, special=True)
    assert tokenizer.eos_ids == {1, *tokenizer.encode("<|return|><|call|>")}
    (tmp_path / "other").mkdir()
    alone = directory(tmp_path / "other", ["<|end|>", "<|start|>"], template, special=True)
    assert alone.eos_ids == {1, *alone.encode("<|end|>")}


def test_all_of_generation_configs_eos_end_answers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = directory(tmp_path, ["<|x|>"], CHATML, eos_token_id=[1, 5, 297])
    assert tokenizer.eos_ids == {1, 5, 297}
    assert tokenizer.decode([297]) == ""
    assert tokenizer.token_bytes(5) != b"", "ordinary text stays text"


def test_the_answer_ends_there(tmp_path: Path) -> None:
    """An answer whose first token is <|im_end|> is empty, though a directory has it as ordinary vocabulary."""
    write_model("llama", tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    state = json.loads(backend.to_str())
    vocabulary = state["model"]["vocab"]
    (word,) = (text for text, id in vocabulary.items() if id == 290)
    used = [pair for pair in state["model"]["merges"] if word not in ("".join(pair), *pair)]
    state["model"]["merges"] = used
    del vocabulary[word]
    vocabulary["<|im_end|>"] = 290
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    llm = LLM(str(tmp_path), kv_bytes=16 << 20, threads=1)
    tokens = list(llm.decode(llm.prefill("fox"), max_tokens=5, logit_bias={290: 100.0}))
    assert [token.text for token in tokens] == [""]
    assert tokens[-1].finish_reason == "stop"
