"""EmbeddingGemma: attention in both directions, a mean, dense layers, a length of 1; those of transformers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy
import tokenizers
import torch
import transformers

from tests.api.test_embedding import PREFIX, write_pooling
from tests.models.checkpoints.test_families_in_gguf import GEMMA2, Converted, convert
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.errors import ContextLengthExceeded, InvalidRequest
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface

TEXTS = ["a", "the quick", "brown fox jumps over the lazy dog " * 14, "cat the quick", "lazy dog and then the cat " * 4]
SIZES = ((96, 64), (48, 96))  # of the dense layers


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows reach over 12 tokens on each side, and one text is cut into several blocks of the kernels' rows."""
    made = write_model(
        "gemma3", tmp_path_factory.mktemp("both"), use_bidirectional_attention=True, max_position_embeddings=512
    )
    assert json.loads((made / "config.json").read_text())["sliding_window"] == 24
    write_pooling(made, "mean_tokens", normalize=True)
    modules = json.loads((made / "modules.json").read_text())
    generator = np.random.default_rng(0)
    for i, shape in enumerate(SIZES, 2):
        folder = made / f"{i}_Dense"
        folder.mkdir()
        weight = generator.standard_normal(shape, np.float32) * shape[1] ** -0.5
        safetensors.numpy.save_file({"linear.weight": weight}, folder / "model.safetensors")
        config: dict[str, Any] = {"in_features": shape[1], "out_features": shape[0], "bias": False}
        config["activation_function"] = "torch.nn.modules.linear.Identity"
        (folder / "config.json").write_text(json.dumps(config))
        modules.insert(i, {"idx": i, "name": str(i), "path": folder.name, "type": f"{PREFIX}Dense"})
    (made / "modules.json").write_text(json.dumps(modules))
    return made


def opened(directory: Path, **options: Any) -> LLM:
    given: dict[str, Any] = {"kv_bytes": 16 << 20, "threads": 2}
    return LLM(str(directory), **(given | options))


def theirs(directory: Path, texts: list[str]) -> np.ndarray:
    """transformers' hidden states behind the last norm, through what sentence-transformers' files list."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    assert model.config.use_bidirectional_attention
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    made: list[np.ndarray] = []
    for text in texts:
        with torch.no_grad():
            vector = model(torch.tensor([tokenizer.encode(text).ids])).last_hidden_state[0].mean(0).numpy()
        for i in (2, 3):
            vector = (
                safetensors.numpy.load_file(directory / f"{i}_Dense" / "model.safetensors")["linear.weight"] @ vector
            )
        made.append(vector / np.linalg.norm(vector))
    return np.stack(made)


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_equals_transformers(directory: Path, backend: str) -> None:
    options = {"weights": "bf16"} if backend == "native" else {}
    llm = opened(directory, backend=backend, **options)
    made, expected = llm.embed(TEXTS), theirs(directory, TEXTS)
    assert made.shape == (len(TEXTS), SIZES[-1][0])
    np.testing.assert_allclose(made, expected, atol=1e-3 if backend == "reference" else 2e-2)
    short = llm.embed(["the cat"], prompt="query", dimensions=16)[0]
    whole = theirs(directory, ["fox: the cat"])[0, :16]
    np.testing.assert_allclose(short, whole / np.linalg.norm(whole), atol=1e-3 if backend == "reference" else 2e-2)


def test_gguf(directory: Path, tmp_path: Path) -> None:
    """As llama.cpp's converter writes it, which says neither that attention looks both ways nor which layers slide."""

    def metadata(writer: gguf.GGUFWriter, values: Mapping[str, Any]) -> None:
        writer.add_sliding_window(values["sliding_window"])
        writer.add_pooling_type(gguf.PoolingType.MEAN)
        for i in (2, 3):
            dense = safetensors.numpy.load_file(directory / f"{i}_Dense" / "model.safetensors")
            writer.add_tensor(f"dense_{i}.weight", dense["linear.weight"])

    written = convert(directory, tmp_path / "a.gguf", Converted("gemma-embedding", GEMMA2, metadata=metadata))
    checkpoint = replace(open_gguf(written), tokenizer_source=open_huggingface(directory).tokenizer_source)
    made = LLM(checkpoint, backend="reference", kv_bytes=16 << 20).embed(TEXTS)
    np.testing.assert_allclose(made, theirs(directory, TEXTS), atol=1e-3)


def test_the_same_bits_alone_or_packed(directory: Path) -> None:
    llm = opened(directory, backend="native", max_step_tokens=8)
    alone = np.stack([llm.embed([text])[0] for text in TEXTS])
    assert np.array_equal(llm.embed(TEXTS), alone)
    assert np.array_equal(llm.embed(TEXTS[::-1] * 3)[: len(TEXTS)][::-1], alone)
    assert np.array_equal(opened(directory, backend="native", threads=1).embed(TEXTS), alone)
    assert not llm.engine.cached_pages(llm.pool)


def test_nothing_else_is_done(directory: Path) -> None:
    llm = opened(directory, backend="native")
    for call in (
        lambda: llm.generate(["the quick"]),
        lambda: llm.chat("the quick"),
        lambda: llm.prefill("the quick"),
        lambda: llm.score("the", "quick"),
    ):
        with pytest.raises(InvalidRequest, match="both directions"):
            call()
    with pytest.raises(ContextLengthExceeded):
        llm.embed([[5] * 513])
    assert llm.embed([[5] * 512]).shape == (1, 48)
    assert llm.embed([]).shape == (0, 48)
