"""Classes of texts: those of transformers, the same bits in any company, and vLLM's form over HTTP."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from tests.server.conftest import asgi
from tests.tiny import COMMON, FAMILIES, write_tokenizer
from twostroke.api.llm import LLM
from twostroke.errors import ContextLengthExceeded, InvalidRequest

TEXTS = ["the quick", "brown fox jumps over the lazy dog " * 12, "a", "cat the quick"]
KINDS = ["llama", "qwen2", "qwen3", "mistral", "gemma3"]


def write(family: str, directory: Path, labels: int = 3, **config: Any) -> Path:
    """A random model with a head for classes."""
    kind, changes = FAMILIES[family]
    name = f"{kind}Text" if kind == "Gemma3" else kind
    sizes = COMMON | changes | {"head_dim": 64, "num_attention_heads": 2, "num_labels": labels} | config
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForSequenceClassification")(getattr(transformers, f"{name}Config")(**sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn(parameter.shape) * (0.2 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
            )
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def opened(directory: Path, **options: Any) -> LLM:
    chosen: dict[str, Any] = {"kv_bytes": 16 << 20, "threads": 1, "backend": "native"} | options
    return LLM(str(directory), **chosen)


def logits(directory: Path, text: str) -> torch.Tensor:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    ids = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text).ids
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0]


@pytest.mark.parametrize("family", KINDS)
def test_equals_transformers(family: str, tmp_path: Path) -> None:
    directory = write(family, tmp_path)
    llm = opened(directory, backend="reference", max_step_tokens=40)
    for text, made in zip(TEXTS, llm.classify(TEXTS), strict=True):
        expected = torch.softmax(logits(directory, text), 0).numpy()
        np.testing.assert_allclose(list(made.scores.values()), expected, atol=1e-4)
        assert made.label == f"LABEL_{expected.argmax()}"


@pytest.mark.parametrize(
    ("config", "activation"),
    [
        ({"problem_type": "multi_label_classification"}, torch.sigmoid),
        ({"problem_type": "regression"}, lambda x: x),
        ({"labels": 1}, torch.sigmoid),
        ({"id2label": {0: "bad", 1: "good"}, "labels": 2}, lambda x: torch.softmax(x, 0)),
    ],
)
def test_what_makes_scores(config: dict[str, Any], activation: Any, tmp_path: Path) -> None:
    directory = write("qwen3", tmp_path, **config)
    made = opened(directory, backend="reference").classify(["the lazy dog"])[0]
    expected = activation(logits(directory, "the lazy dog")).numpy()
    np.testing.assert_allclose(list(made.scores.values()), expected, atol=1e-4)
    if "id2label" in config:
        assert list(made.scores) == ["bad", "good"]


def test_the_same_bits_in_any_company(tmp_path: Path) -> None:
    directory = write("qwen3", tmp_path)
    llm = opened(directory)
    alone = [llm.classify([text])[0] for text in TEXTS]
    assert llm.classify(TEXTS) == alone
    assert opened(directory, max_step_tokens=8).classify(TEXTS[::-1])[::-1] == alone


def test_refusals(tmp_path: Path) -> None:
    llm = opened(write("qwen3", tmp_path))
    with pytest.raises(InvalidRequest, match="not empty"):
        llm.classify([""])
    with pytest.raises(ContextLengthExceeded):
        llm.classify(["fox " * 3000])
    assert llm.classify([]) == []


def test_over_http(tmp_path: Path) -> None:
    """A text, several, token ids; and what is wrong."""
    llm = opened(write("qwen3", tmp_path))
    expected = llm.classify(TEXTS)

    async def check() -> None:
        async with asgi(llm) as http:
            for path in ("/classify", "/v1/classify"):
                answer = (await http.post(path, json={"model": "tiny", "input": TEXTS})).json()
                assert [one["label"] for one in answer["data"]] == [one.label for one in expected]
                assert [one["probs"] for one in answer["data"]] == [list(one.scores.values()) for one in expected]
                assert answer["usage"]["prompt_tokens"] == answer["usage"]["total_tokens"] > 0
            ids = llm.tokenizer.encode(TEXTS[0])
            for one in (TEXTS[0], ids, [ids]):
                answer = (await http.post("/classify", json={"input": one})).json()
                assert answer["data"][0]["probs"] == list(expected[0].scores.values())
            for wrong in ("", [], [""], None, 5, ["fox " * 3000], [[10**9]], {"a": 1}):
                refused = await http.post("/classify", json={"input": wrong})
                assert refused.status_code == 400, wrong
                assert refused.json()["error"]["message"]

    asyncio.run(check())
