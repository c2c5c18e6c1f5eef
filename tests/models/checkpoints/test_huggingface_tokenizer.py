"""Directories whose files disagree, or that have other tokenizer files, read as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

from tests.models.checkpoints.test_tokenizer import SOURCES, train_sentencepiece
from tests.tiny import write_tokenizer
from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.checkpoint import HfTokenizerSource
from twostroke.models.checkpoints.tokenizer import Tokenizer

TEXT = "the fox<|im_start|>cat<|im_end|><tool>dog</tool> <pad>"


def write(folder: Path, **files: Any) -> Path:
    """A tiny tokenizer.json, and JSON files by their stems."""
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    for name, content in files.items():
        content = config | content if name == "tokenizer_config" else content
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def opened(folder: Path) -> Tokenizer:
    return Tokenizer.from_source(HfTokenizerSource(folder))


def theirs(folder: Path) -> Any:
    return transformers.PreTrainedTokenizerFast.from_pretrained(folder)


def token(text: str, **flags: Any) -> dict[str, Any]:
    return {"content": text, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False} | flags


CASES: dict[str, dict[str, Any]] = {
    "decoder": {"tokenizer_config": {"added_tokens_decoder": {
        "298": token("<|im_end|>", special=True), "297": token("<|im_start|>", special=True),
        "299": token("<tool>", special=False)}}},
    "decoder with other ids": {
        "tokenizer_config": {"added_tokens_decoder": {"320": token("<|im_start|>", special=True)}}},
    "added_tokens.json": {"added_tokens": {"<|im_end|>": 298, "<|im_start|>": 297, "<tool>": 299},
                          "tokenizer_config": {"additional_special_tokens": ["<|im_end|>"]}},
    "added_tokens.json beside a decoder": {"added_tokens": {"<tool>": 297},
        "tokenizer_config": {"added_tokens_decoder": {"297": token("<|im_end|>", special=True)}}},
    "special_tokens_map": {"special_tokens_map": {"eos_token": "<|im_end|>", "pad_token": token("<pad>"),
                                                  "additional_special_tokens": ["<|im_start|>", "<tool>"]}},
    "map beside a decoder": {"special_tokens_map": {"eos_token": "<|im_end|>"},
        "tokenizer_config": {"added_tokens_decoder": {"297": token("<|im_start|>", special=True)}}},
    "named in the config": {"tokenizer_config": {"eos_token": "<|im_end|>", "pad_token": "<pad>"}},
    "extra_special_tokens": {"tokenizer_config": {"extra_special_tokens": ["<tool>", "<|im_start|>"]}},
    "lstrip": {"tokenizer_config": {"added_tokens_decoder": {"297": token("<pad>", lstrip=True, special=True)}}},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_tokens_declared_in_one_file_only(case: str, tmp_path: Path) -> None:
    folder = write(tmp_path, **CASES[case])
    ours, reference = opened(folder), theirs(folder)
    assert ours.encode(TEXT) == reference(TEXT).input_ids
    assert ours.encode(TEXT, add_bos=False) == reference(TEXT, add_special_tokens=False).input_ids
    assert reference.eos_token_id in ours.eos_ids
    ids = ours.encode(TEXT)
    assert ours.decode(ids, skip_special=False) == reference.decode(ids, clean_up_tokenization_spaces=False)
    special = {id for id, one in reference.added_tokens_decoder.items() if one.special}
    assert ours.special_ids == special | ours.eos_ids


def test_another_id_than_the_stated_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    opened(write(tmp_path, **CASES["decoder with other ids"]))
    assert caplog.messages == [
        f"{tmp_path}: the token <|im_start|> has id 320 in one file and 297 in the tokenizer, which counts, "
        "as in transformers"
    ]


def test_a_tokenizer_that_is_larger_than_the_model_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    opened(write(tmp_path, config={"vocab_size": 290}))
    assert caplog.messages == [
        f"{tmp_path}: the tokenizer has 297 tokens and the model 290: a prompt that has one of the last is refused"
    ]
    caplog.clear()
    opened(write(tmp_path, config={"vocab_size": 320}))  # padded, which is common
    assert not caplog.messages


def test_eos_by_file(tmp_path: Path) -> None:
    """As `generate` of transformers takes them: generation_config.json, else config.json; and the tokenizer's."""
    both = {"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [6, 7]}}
    assert opened(write(tmp_path, **both)).eos_ids == {1, 6, 7}
    assert opened(write(tmp_path, generation_config={})).eos_ids == {1, 5}
    assert opened(write(tmp_path, config={"text_config": {"eos_token_id": [8]}})).eos_ids == {1, 8}
    for bad in (["a"], "a", [True], 1.5):
        with pytest.raises(CheckpointError, match="eos_token_id must be an id or a list of ids"):
            opened(write(tmp_path, generation_config={"eos_token_id": bad}))


def test_chat_templates_by_file(tmp_path: Path) -> None:
    folder = write(tmp_path, tokenizer_config={"chat_template": "config"})
    assert opened(folder).chat_template == theirs(folder).chat_template == "config"
    (folder / "chat_template.jinja").write_text("file")
    assert opened(folder).chat_template == theirs(folder).chat_template == "file"
    named = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    folder = write(tmp_path, tokenizer_config={"chat_template": named})
    assert opened(folder).chat_template == theirs(folder).chat_template == "file"
    (folder / "chat_template.jinja").unlink()
    assert opened(folder).chat_template == theirs(folder).chat_template["default"] == "a"
    folder = write(tmp_path, tokenizer_config={"chat_template": None}, chat_template={"chat_template": "processor"})
    assert opened(folder).chat_template == "processor"


def test_declarations_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    for decoder in ({"x": token("<a>")}, {"1": {}}, {"1": token("<a>", special="yes")}, {"1": 3}):
        with pytest.raises(CheckpointError, match="the tokenizer's files cannot be read"):
            opened(write(tmp_path, tokenizer_config={"added_tokens_decoder": decoder}))
    for name, value in (("eos_token", 7), ("bos_token", {"a": 1}), ("chat_template", 1.5), ("chat_template", [None])):
        with pytest.raises(CheckpointError, match="the tokenizer's files cannot be read"):
            opened(write(tmp_path, tokenizer_config={name: value}))
    folder = write(tmp_path)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="the tokenizer's files cannot be read"):
        opened(folder)


@pytest.mark.parametrize("prefix", [False, True])
def test_a_sentencepiece_model_alone(prefix: bool, tmp_path: Path) -> None:
    import sentencepiece

    model = train_sentencepiece(prefix)
    (tmp_path / "tokenizer.model").write_bytes(model)
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(model)
    tokenizer = opened(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.add_bos) == (1, {2}, True)
    for text in SOURCES:
        plain = text.replace("\n", " ").replace("<b>", "").replace("</b>", "")
        assert tokenizer.encode(plain) == [1, *processor.EncodeAsIds(plain)]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": True}))
    assert opened(tmp_path).encode("ab") == [*processor.EncodeAsIds("ab"), 2]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 1200}))
    assert opened(tmp_path).encode("<|im_end|>", add_bos=False) == [1200]


def test_sentencepiece_models_that_are_damaged_or_of_another_kind(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.model"
    good = train_sentencepiece(False)
    for damaged in (good[:-3], b"\xff" * 40, b"PK\x03\x04" + good):
        path.write_bytes(damaged)
        with pytest.raises(
            CheckpointError, match=r"tokenizer\.model: (not a SentencePiece model, or damaged|the token)"
        ):
            opened(tmp_path)
    import io

    import sentencepiece

    unigram = io.BytesIO()
    lines = [f"the {i} fox jumps over {i * 7} dogs" for i in range(100)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=unigram, vocab_size=50, minloglevel=2, hard_vocab_limit=False
    )
    path.write_bytes(unigram.getvalue())
    with pytest.raises(CheckpointError, match="of the Unigram kind is not supported; put the tokenizer"):
        opened(tmp_path)


@pytest.mark.parametrize("kind", ["Qwen2Tokenizer", "GPT2Tokenizer", "GPT2TokenizerFast"])
def test_vocabulary_and_merges_alone(kind: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())["model"]
    vocabulary = dict(state["vocab"])
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    merges = "#version: 0.2\n" + "\n".join(map(" ".join, state["merges"])) + "\n"
    (tmp_path / "merges.txt").write_text(merges)
    (tmp_path / "tokenizer.json").unlink()
    config = {"tokenizer_class": kind, "eos_token": "<|im_end|>", "bos_token": None,
              "added_tokens_decoder": {"297": token("<|im_end|>", special=True)}}  # fmt: skip
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = opened(tmp_path)
    plain = tokenizers.Tokenizer(models.BPE(vocabulary, [tuple(merge) for merge in state["merges"]]))
    if "Qwen2" in kind:
        reference = transformers.Qwen2Tokenizer.from_pretrained(tmp_path)
        expected = reference("The the 123 fox'S  dog<|im_end|>").input_ids
    else:
        plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        expected = [*plain.encode("The the 123 fox'S  dog").ids, 297]
    assert ours.encode("The the 123 fox'S  dog<|im_end|>") == expected
    assert ours.eos_ids == {297}
    config["tokenizer_class"] = "BloomTokenizer"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="BloomTokenizer does not tell how text is split"):
        opened(tmp_path)
