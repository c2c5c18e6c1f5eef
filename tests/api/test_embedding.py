"""Embeddings: those of transformers, the same bits under every schedule, and the poolings that files ask for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.api.prefills import BatchRoom
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import CheckpointError, ContextLengthExceeded, InvalidRequest
from twostroke.models.checkpoints.pooling import Pooling, directory_pooling, gguf_pooling
from twostroke.sampling.params import SamplingParams

TEXTS = ["the quick", "brown fox jumps over the lazy dog " * 12, "a", "cat the quick", "brown fox jumps over the cat"]
PREFIX = "sentence_transformers.models."


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Embedding's shape: the tokenizer ends each text with a token, and the model has no head of its own."""
    made = write_model("qwen3", tmp_path_factory.mktemp("embedding"), head_dim=64)
    write_pooling(made, "lasttoken", normalize=True)
    state = json.loads((made / "tokenizer.json").read_text())
    ids = {"id": "</s>", "ids": [1], "tokens": ["</s>"]}
    single = [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "</s>", "type_id": 0}}]
    state["post_processor"] = {
        "type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {"</s>": ids},
    }  # fmt: skip
    (made / "tokenizer.json").write_text(json.dumps(state))
    return made


def write_pooling(directory: Path, mode: str, *, normalize: bool, more: str | None = None) -> None:
    """The files of sentence-transformers."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalize else []), *([more] if more else [])]
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"{PREFIX}{kind}"}
               for i, kind in enumerate(kinds)]  # fmt: skip
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    names = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    config: dict[str, Any] = {f"pooling_mode_{name}": name == mode for name in names}
    config |= {"word_embedding_dimension": 64, "include_prompt": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    prompts = {"prompts": {"query": "fox: ", "document": ""}, "default_prompt_name": None}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(prompts))


def opened(directory: Path, **options: Any) -> LLM:
    chosen: dict[str, Any] = {"kv_bytes": 16 << 20, "threads": 1} | options
    return LLM(str(directory), **chosen)


def theirs(directory: Path, text: str, mode: str = "lasttoken") -> np.ndarray:
    """transformers' hidden states behind the last norm, pooled."""
    model = transformers.AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    with torch.no_grad():
        hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
    return {"lasttoken": hidden[-1], "mean_tokens": hidden.mean(0), "cls_token": hidden[0]}[mode].numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
@pytest.mark.parametrize("normalize", [True, False])
def test_equals_transformers(directory: Path, mode: str, normalize: bool) -> None:
    write_pooling(directory, mode, normalize=normalize)
    try:
        llm = opened(directory, backend="reference", max_step_tokens=40)
        assert llm.tokenizer.encode("a")[-1] == 1
        for text, made in zip(TEXTS, llm.embed(TEXTS), strict=True):
            expected = theirs(directory, text, mode)
            np.testing.assert_allclose(made, unit(expected) if normalize else expected, atol=1e-3)
        asked = llm.embed(["the cat"], prompt="query", dimensions=16, normalized=True)[0]
        np.testing.assert_allclose(asked, unit(theirs(directory, "fox: the cat", mode)[:16]), atol=1e-3)
    finally:
        write_pooling(directory, "lasttoken", normalize=True)


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_the_same_bits_under_every_schedule(directory: Path, mode: str) -> None:
    write_pooling(directory, mode, normalize=True)
    try:
        alone = opened(directory, backend="native")
        expected = [alone.embed([text])[0] for text in TEXTS]
    finally:
        write_pooling(directory, "lasttoken", normalize=True)
    together = alone.embed(TEXTS)
    again = alone.embed(TEXTS[::-1])[::-1]  # all but the last token is found
    for made in (together, again):
        assert np.array_equal(made, np.stack(expected))
    write_pooling(directory, mode, normalize=True)
    try:
        chunked = opened(directory, backend="native", max_step_tokens=8)
    finally:
        write_pooling(directory, "lasttoken", normalize=True)
    busy = chunked.engine.submit(chunked.request("brown fox", SamplingParams(max_tokens=400, ignore_eos=True)))
    assert np.array_equal(chunked.embed(TEXTS), np.stack(expected))
    chunked.engine.cancel(busy)


def test_a_hit_computes_the_last_token_alone(directory: Path) -> None:
    llm = opened(directory)
    tokens = [llm.embedder.encode(llm.tokenizer, TEXTS[1])]
    cold, warm = llm.embedding_request(tokens), llm.embedding_request(tokens)
    llm.engine.run([cold])
    llm.engine.run([warm])
    assert cold.cached_tokens == 0
    assert warm.cached_tokens >= len(tokens[0]) - 1 - llm.pool.page_size
    assert np.array_equal(cold.result[0], warm.result[0])
    assert not cold.events


def test_pages_are_free_behind_a_batch(directory: Path) -> None:
    """More texts than the pool holds at once."""
    llm = opened(directory, kv_bytes=1 << 20, prefix_index="off")
    texts = [f"{i} brown fox jumps over the lazy dog " * 4 for i in range(80)]
    assert sum(len(llm.tokenizer.encode(text)) for text in texts) > llm.pool.max_entries
    made = llm.embed(texts)
    assert made.shape == (80, 64)
    assert np.array_equal(made[7], llm.embed([texts[7]])[0])
    assert llm.pool.num_used == 0


def test_batches() -> None:
    inputs = [[0] * n for n in (5, 20, 1, 1, 90, 3)]
    sizes = [[len(one) for one in batch] for batch in BatchRoom(30, 64, 16).batches(inputs)]
    assert sizes == [[5, 20, 1], [1], [90], [3]]
    assert list(BatchRoom(30, 64, 16).batches([])) == []


def test_refusals(directory: Path) -> None:
    llm = opened(directory)
    assert llm.embed([]).shape == (0, 64)
    for wrong in ([[]], [[5, 999999]], ["\ud800"], [[1, "a"]]):
        with pytest.raises(InvalidRequest):
            llm.embed(wrong)  # pyright: ignore[reportArgumentType]
    options: Any
    for options in ({"prompt": "nothing"}, {"dimensions": 0}, {"dimensions": 65}):
        with pytest.raises(InvalidRequest, match="must be"):
            llm.embed(["a"], **options)
    with pytest.raises(ContextLengthExceeded, match="the text has 3003 tokens"):
        llm.embed(["fox " * 3000])
    cut = llm.embedder.encode(llm.tokenizer, "fox " * 3000, most=llm.max_model_len)
    assert (len(cut), cut[-1]) == (llm.max_model_len, 1)
    assert llm.embed([cut]).shape == (1, 64), "a text may fill the context"

    def both() -> Program:
        yield Prefill([3, 4], hidden=1, logits="all")

    request = llm.prefill_request([3])
    request.make_program = both
    with pytest.raises(InvalidRequest, match="leave one out"):
        llm.engine.run([request])


def test_models_without_files(tiny_directory: Callable[[str], Path]) -> None:
    """A model that generates: its last token's hidden state, of length 1."""
    path = tiny_directory("qwen3")
    made = opened(path, backend="reference").embed(["the quick fox"])[0]
    np.testing.assert_allclose(made, unit(theirs(path, "the quick fox")), atol=1e-3)


def test_every_family(tiny_directory: Callable[[str], Path], family: str) -> None:
    path = tiny_directory(family)
    llm = opened(path, backend="reference")
    ids = llm.tokenizer.encode("brown fox jumps over the lazy dog " * 3)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0, -1].numpy()
    np.testing.assert_allclose(llm.embed([ids])[0], unit(expected), atol=1e-3)


def test_what_files_ask_for(tmp_path: Path) -> None:
    assert directory_pooling(tmp_path) == Pooling()
    write_pooling(tmp_path, "mean_tokens", normalize=False)
    found = directory_pooling(tmp_path)
    assert (found.mode, found.normalized, found.stated, found.refusal) == ("mean", False, True, None)
    assert found.prompts == {"query": "fox: ", "document": ""}
    unsupported = (("max_tokens", None, "max_tokens"), ("lasttoken", "CNN", "a module CNN"))
    for mode, more, words in (*unsupported, ("cls_token", "Dense", "Identity")):
        write_pooling(tmp_path, mode, normalize=False, more=more)
        assert words in (directory_pooling(tmp_path).refusal or "")
    for text in ("{", "[5]", "{}"):
        (tmp_path / "modules.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"modules\.json"):
            directory_pooling(tmp_path)


@pytest.mark.parametrize(("kind", "mode"), [(None, "last"), (0, "last"), (1, "mean"), (2, "cls"), (3, "last")])
def test_what_a_gguf_file_asks_for(kind: int | None, mode: str) -> None:
    found = gguf_pooling({"general.architecture": "qwen3", "qwen3.pooling_type": kind})
    assert (found.mode, found.stated, found.refusal) == (mode, kind is not None, None)
    assert "ranks" in (gguf_pooling({"general.architecture": "x", "x.pooling_type": 4}).refusal or "")
