"""Embeddings over HTTP, in each API's form: those of `LLM.embed`."""

import concurrent.futures
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ollama
import openai
import pytest

from tests.patience import PATIENCE_S
from tests.server.conftest import Serving, eventually, serving
from tests.server.long_answers import LONG
from twostroke.api.llm import LLM

TEXTS = ["the quick", "brown fox jumps over the lazy dog " * 20, "a"]


@pytest.fixture(scope="module")
def server(native_directory: Path) -> Iterator[Serving]:
    """On an exact backend, where a batch changes no bit."""
    with serving(LLM(str(native_directory), kv_bytes=16 << 20, threads=1)) as running:
        yield running


@pytest.fixture(scope="module")
def reference(native_directory: Path) -> LLM:
    return LLM(str(native_directory), kv_bytes=16 << 20, threads=1)


def floats(values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def test_openai(client: openai.OpenAI, server: Serving, reference: LLM) -> None:
    expected = reference.embed(TEXTS)
    made = client.embeddings.create(model="tiny", input=TEXTS)  # the client asks for base64
    assert np.array_equal(floats([one.embedding for one in made.data]), expected)
    assert [one.index for one in made.data] == [0, 1, 2]
    counts = [len(reference.tokenizer.encode(text)) for text in TEXTS]
    assert (made.usage.prompt_tokens, made.usage.total_tokens) == (sum(counts), sum(counts))
    plain = client.embeddings.create(model="tiny", input=TEXTS[0], encoding_format="float")
    assert np.array_equal(floats(plain.data[0].embedding), expected[0])
    ids = [reference.tokenizer.encode(text) for text in TEXTS]
    for input in (ids, ids[0]):
        tokens = client.embeddings.create(model="tiny", input=input)
        assert np.array_equal(floats([one.embedding for one in tokens.data]), expected[: len(tokens.data)])
    short = client.embeddings.create(model="tiny", input=TEXTS, dimensions=8)
    assert np.array_equal(floats([one.embedding for one in short.data]), reference.embed(TEXTS, dimensions=8))
    raw = client.embeddings.create(model="tiny", input=TEXTS, extra_body={"normalize": False, "cache_salt": "x"})
    assert np.array_equal(floats([one.embedding for one in raw.data]), reference.embed(TEXTS, normalized=False))


def test_beside_streams(client: openai.OpenAI, reference: LLM) -> None:
    """Several callers, while answers are written; a long body goes through the worker first."""
    texts = [f"{i} brown fox jumps over the lazy dog " * 3 for i in range(300)]
    expected = reference.embed(texts)
    with client.completions.create(model="tiny", prompt="the", stream=True, extra_body=LONG) as stream:
        next(iter(stream))
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(client.embeddings.create, model="tiny", input=texts[i::3]) for i in range(3)]
            for i, call in enumerate(calls):
                found = floats([one.embedding for one in call.result().data])
                assert np.array_equal(found, expected[i::3])


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": ""}, "not empty"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "not empty"),
        ({"input": [5, "a"]}, "input"),
        ({"input": ["a"] * 2049}, "2048"),
        ({"input": None}, "input"),
        ({"input": [999999]}, "token ids"),
        ({"input": "fox " * 3000}, "tokens"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "prompt_name": "query"}, "prompt_name"),
        ({"input": "a", "model": "tiny:repeat"}, "plain"),
        ({"input": "a", "messages": []}, "messages"),
    ],
)
def test_refusals(server: Serving, body: dict[str, Any], words: str) -> None:
    with server.http() as http:
        refused = http.post("/v1/embeddings", json={"model": "tiny"} | body)
        assert refused.status_code == 400
        assert words in refused.json()["error"]["message"]


def test_other_models_and_deadlines(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.InternalServerError, match="timeout"):
        client.embeddings.create(model="tiny", input=TEXTS * 50, extra_body={"timeout": 1e-9})


def test_a_client_that_leaves(server: Serving) -> None:
    """Its texts are not computed any further, and no page is lost."""
    texts = [f"{i} brown fox jumps over the lazy dog " * 30 for i in range(500)]
    with server.http() as http:
        with server.leaving({"input": texts}, "/v1/embeddings"):
            eventually(lambda: http.get("/load").json() != {"server_load": 0})
        eventually(lambda: http.get("/load").json() == {"server_load": 0} and server.pages_used == 0)


def test_ollama(server: Serving, reference: LLM) -> None:
    local = ollama.Client(host=server.url, timeout=PATIENCE_S)
    made = local.embed("tiny", TEXTS)
    assert np.array_equal(floats(made.embeddings), reference.embed(TEXTS))
    assert made.prompt_eval_count == sum(len(reference.tokenizer.encode(text)) for text in TEXTS)
    assert np.array_equal(floats(local.embed("tiny", "a").embeddings), reference.embed(["a"]))
    assert np.array_equal(floats(local.embeddings("tiny", "a").embedding), reference.embed(["a"])[0])
    short = local.embed("tiny", "a", dimensions=8)
    assert np.array_equal(floats(short.embeddings), reference.embed(["a"], dimensions=8))
    long = "fox " * 3000
    cut = reference.tokenizer.encode(long)[: reference.max_model_len]
    assert np.array_equal(floats(local.embed("tiny", long).embeddings), reference.embed([cut]))
    for call in (lambda: local.embed("tiny", long, truncate=False), lambda: local.embed("tiny", [])):
        with pytest.raises(ollama.ResponseError):
            call()
    assert "embedding" not in (local.show("tiny").capabilities or [])


def test_llama_cpp(server: Serving, reference: LLM) -> None:
    with server.http() as http:
        for path in ("/embedding", "/embeddings"):
            made = http.post(path, json={"content": TEXTS}).json()
            assert np.array_equal(floats([one["embedding"][0] for one in made]), reference.embed(TEXTS))
        raw = http.post("/embedding", json={"input": "a", "embd_normalize": -1}).json()
        expected = reference.embed(["a"], normalized=False)
        assert np.array_equal(floats(raw[0]["embedding"]), expected)
        assert http.post("/embedding", json={"content": "a", "embd_normalize": 1}).status_code == 400
