"""Weights and config.json that disagree, against what transformers makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.models.checkpoints.test_gguf import VOCAB, make_weights
from tests.models.checkpoints.test_gguf import write as write_gguf
from tests.models.test_against_transformers import all_logits, assert_close, tokens
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface


def change(folder: Path, config: dict[str, Any], **weights: torch.Tensor | None) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    state = load_file(folder / "model.safetensors")
    state |= {name.replace("__", "."): value for name, value in weights.items() if value is not None}
    kept = {name: value for name, value in state.items() if weights.get(name.replace(".", "__"), 0) is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_as_transformers(folder: Path) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokens(20, 290, seed=5)
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0].numpy()
    llm = LLM(str(folder), backend="reference", kv_bytes=16 << 20, threads=1)
    assert_close(all_logits(llm, ids), expected)


def test_two_heads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """tie_word_embeddings with a head that differs from the embedding: both are used."""
    folder = write_model("llama", tmp_path)
    head = torch.randn(384, 64, generator=torch.Generator().manual_seed(1))
    change(folder, {}, lm_head__weight=head)
    assert not open_huggingface(folder).config.tied
    assert "lm_head.weight is not the embedding: both are used" in caplog.text
    assert_as_transformers(folder)


def test_a_head_that_is_the_embedding_is_tied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write_model("llama", tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert open_huggingface(change(folder, {}, lm_head__weight=embedding.clone())).config.tied
    assert not caplog.messages
    change(folder, {}, model__embed_tokens__weight=None)
    assert open_huggingface(folder).config.tied, "the head alone"
    assert_as_transformers(folder)


def test_further_layers_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = change(write_model("qwen2", tmp_path), {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2})
    assert open_huggingface(folder).config.num_layers == 2
    assert "num_hidden_layers is 2, and the files have further layers" in caplog.text
    assert_as_transformers(folder)


def test_a_single_file_comes_before_an_index(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path)
    state = load_file(folder / "model.safetensors")
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    save_file(other, folder / "model-00001-of-00001.safetensors", metadata={"format": "pt"})
    save_file(other, folder / "consolidated.safetensors", metadata={"format": "pt"})
    index = {"weight_map": dict.fromkeys(state, "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_as_transformers(folder)


def test_tensors_that_the_index_leaves_out_are_read(tmp_path: Path) -> None:
    folder = write_model("llama", tmp_path)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    listed = {"model.norm.weight": "model-00001-of-00001.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": listed}))
    assert_as_transformers(folder)


def test_another_vocabulary_than_the_embeddings_is_refused(tmp_path: Path) -> None:
    folder = change(write_model("llama", tmp_path), {"vocab_size": 400})
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight: shape \(384, 64\) where embed must have"):
        open_huggingface(folder)


def test_a_gguf_with_more_tokens_than_rows_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    weights = make_weights("llama")
    for name in ("token_embd.weight", "output.weight"):
        weights[name] = weights[name][:-3]
    open_gguf(write_gguf(tmp_path / "a.gguf", weights=weights))
    assert f"the tokenizer has {VOCAB} tokens and the embedding {VOCAB - 3} rows" in caplog.text
