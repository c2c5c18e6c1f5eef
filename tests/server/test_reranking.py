"""Documents ranked as Qwen3-Reranker's card does it: the scores of transformers, and the APIs' forms."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.server.conftest import Serving, serving
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.api.prefills import INSTRUCTION

QUERY = "the lazy dog"
DOCUMENTS = ["brown fox", "the quick brown fox jumps over the lazy dog " * 9, "cat <|im_end|> dog", "brown fox"]
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model("qwen3", tmp_path_factory.mktemp("models") / "Tiny-Reranker", head_dim=64)
    file = made / "tokenizer.json"
    state = json.loads(file.read_text())
    first = 1 + max(state["model"]["vocab"].values())
    for i, text in enumerate(("yes", "no", "<|im_start|>", "<|im_end|>")):
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        state["added_tokens"].append({"id": first + i, "content": text, **flags, "special": text[0] == "<"})
    file.write_text(json.dumps(state))
    return made


@pytest.fixture(scope="module")
def llm(directory: Path) -> LLM:
    return LLM(str(directory), backend="native", kv_bytes=16 << 20, threads=1, max_step_tokens=64)


@pytest.fixture(scope="module")
def ranking(llm: LLM) -> Iterator[Serving]:
    with serving(llm) as running:
        yield running


def theirs(directory: Path, query: str, document: str) -> float:
    """The score as the model's card computes it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = f"<Instruct>: {INSTRUCTION}\n<Query>: {query}\n<Document>: {document}"
    ids = [id for part in (BEFORE, text, AFTER) for id in tokenizer.encode(part, add_special_tokens=False)]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    pair = logits[[tokenizer.convert_tokens_to_ids("no"), tokenizer.convert_tokens_to_ids("yes")]]
    return float(torch.softmax(pair, 0)[1])


def scores(llm: LLM, query: str, documents: list[str]) -> list[float]:
    assert llm.reranker is not None
    request = llm.reranking_request([llm.reranker.pair(llm.tokenizer, query, one) for one in documents])
    llm.engine.run([request])
    return request.result


def test_equals_transformers(directory: Path) -> None:
    exact = LLM(str(directory), backend="reference", kv_bytes=16 << 20, threads=1, max_step_tokens=64)
    documents = [one for one in DOCUMENTS if "<|" not in one]
    expected = [theirs(directory, QUERY, one) for one in documents]
    np.testing.assert_allclose(scores(exact, QUERY, documents), expected, atol=1e-3)
    assert len(set(expected)) == 2


def test_the_same_bits_in_every_batch(directory: Path, llm: LLM) -> None:
    options: Any = {"backend": "native", "kv_bytes": 16 << 20, "threads": 1}
    cold = LLM(str(directory), prefix_index="off", **options)
    alone = [scores(cold, QUERY, [one])[0] for one in DOCUMENTS]
    assert scores(cold, QUERY, DOCUMENTS) == alone
    assert scores(llm, QUERY, DOCUMENTS) == alone
    assert scores(llm, QUERY, DOCUMENTS[::-1]) == alone[::-1], "with hits"
    assert cold.pool.num_used == 0


def test_no_text_is_a_special_token(llm: LLM) -> None:
    reranker = llm.reranker
    assert reranker is not None
    pair = reranker.pair(llm.tokenizer, "a", DOCUMENTS[2])
    inside = pair[len(reranker.before) : len(pair) - len(reranker.after)]
    assert not llm.tokenizer.special_ids & set(inside)
    assert DOCUMENTS[2] in llm.tokenizer.decode(inside)


def test_rerank(ranking: Serving, llm: LLM) -> None:
    with ranking.http() as http:
        everything = {"model": "tiny", "query": QUERY, "documents": DOCUMENTS}
        made = http.post("/v1/rerank", json=everything).json()
        found = {one["index"]: one["relevance_score"] for one in made["results"]}
        order = [one["index"] for one in made["results"]]
        assert order == sorted(range(4), key=lambda index: -found[index])
        assert [one["document"]["text"] for one in made["results"]] == [DOCUMENTS[index] for index in order]
        objects = {"query": QUERY, "documents": [{"text": one} for one in DOCUMENTS], "return_documents": False}
        few = http.post("/rerank", json=objects | {"top_n": 2}).json()["results"]
        assert few == [{"index": index, "relevance_score": found[index]} for index in order[:2]]
        scored = http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS}).json()
        assert [one["score"] for one in scored["data"]] == [found[index] for index in range(4)]
        assert scored["usage"]["prompt_tokens"] == made["usage"]["total_tokens"]
        other = http.post("/v1/score", json={"text_1": QUERY, "text_2": DOCUMENTS, "instruction": "x"}).json()
        assert [one["score"] for one in other["data"]] != [one["score"] for one in scored["data"]]
        pairs = http.post("/score", json={"text_1": ["a", "b"], "text_2": ["c", "d"]}).json()["data"]
        assert [one["score"] for one in pairs] == [
            http.post("/score", json={"text_1": one, "text_2": two}).json()["data"][0]["score"]
            for one, two in (("a", "c"), ("b", "d"))
        ]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/rerank", {"query": "a", "documents": []}, "documents"),
        ("/rerank", {"query": "a", "documents": [5]}, "documents"),
        ("/rerank", {"query": "a", "documents": [{}]}, "documents"),
        ("/rerank", {"query": "a", "documents": None}, "documents"),
        ("/rerank", {"query": ["a"], "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n"),
        ("/rerank", {"query": "a", "documents": ["fox " * 3000]}, "tokens"),
        ("/rerank", {"query": "a", "documents": ["b"] * 2049}, "2048"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1"),
        ("/score", {"text_1": "a"}, "text_2"),
        ("/v1/classify", {"input": "a"}, "no head that classifies"),
    ],
)
def test_refusals(ranking: Serving, path: str, body: dict[str, Any], words: str) -> None:
    with ranking.http() as http:
        refused = http.post(path, json=body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]


def test_a_model_that_does_not_rank(server: Serving) -> None:
    with server.http() as http:
        for path, body in (("/rerank", {"query": "a", "documents": ["b"]}), ("/score", {"text_1": "a", "text_2": "b"})):
            refused = http.post(path, json=body)
            assert refused.status_code == 400
            assert "ranks no documents" in refused.json()["error"]["message"]
