"""Code between two texts over HTTP, in each API's form: the answer is that of the prompt made by hand."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.models.checkpoints.test_infill import QWEN
from tests.patience import PATIENCE_S
from tests.server.conftest import Serving, serving
from tests.tiny import write_model
from twostroke.api.llm import LLM

PREFIX, SUFFIX = "the quick ", " fox jumps"
SAMPLED: Any = {"max_tokens": 12, "temperature": 0.7, "seed": 3}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = write_model("llama", tmp_path_factory.mktemp("infill"))
    file = made / "tokenizer.json"
    state = json.loads(file.read_text())
    first = 1 + max(state["model"]["vocab"].values())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    state["added_tokens"] += [{"id": first + i, "content": text, **flags} for i, text in enumerate(QWEN)]
    file.write_text(json.dumps(state))
    return made


@pytest.fixture(scope="module")
def coder(directory: Path) -> Iterator[Serving]:
    with serving(LLM(str(directory), kv_bytes=16 << 20, threads=1)) as running:
        yield running


@pytest.fixture(scope="module")
def local(directory: Path) -> LLM:
    return LLM(str(directory), kv_bytes=16 << 20, threads=1)


def ends_of(llm: LLM) -> list[int]:
    assert llm.tokenizer.infill is not None
    return sorted(llm.tokenizer.infill.ends)


def expected(llm: LLM, *texts: Any, **sampling: Any) -> Any:
    prompt = llm.tokenizer.encode_infill(*texts)
    return llm.generate([prompt], stop_token_ids=ends_of(llm), **(SAMPLED | sampling))[0]


def test_completions(coder: Serving, local: LLM) -> None:
    whole = expected(local, PREFIX, SUFFIX)
    made = coder.client.completions.create(model="tiny", prompt=PREFIX, suffix=SUFFIX, logprobs=2, **SAMPLED)
    assert made.choices[0].text == whole.text != ""
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(local.tokenizer.encode_infill(PREFIX, SUFFIX))
    assert made.choices[0].logprobs is not None
    assert len(made.choices[0].logprobs.tokens or []) == made.usage.completion_tokens
    ids = local.tokenizer.encode(PREFIX, add_bos=False)
    several = coder.client.completions.create(model="tiny", prompt=[PREFIX, "x"], suffix=SUFFIX, n=2, **SAMPLED)
    assert several.choices[0].text == whole.text
    assert several.choices[2].text == expected(local, "x", SUFFIX).text
    assert coder.client.completions.create(model="tiny", prompt=ids, suffix=SUFFIX, **SAMPLED).choices[0].text == (
        whole.text
    )
    parts = coder.client.completions.create(model="tiny", prompt=PREFIX, suffix=SUFFIX, stream=True, **SAMPLED)
    assert "".join(part.choices[0].text for part in parts) == whole.text


def test_tokens_of_the_form_end_an_answer(coder: Serving, local: LLM) -> None:
    """They have no text in it. Without a suffix they are tokens like others."""
    for id in ends_of(local):
        asked: Any = {"model": "tiny", "prompt": PREFIX, **SAMPLED, "logit_bias": {str(id): 100}}
        made = coder.client.completions.create(**asked, suffix=SUFFIX)
        assert (made.choices[0].text, made.choices[0].finish_reason) == ("", "stop")
        assert coder.client.completions.create(**asked).choices[0].finish_reason == "length"
        ignoring = coder.client.completions.create(**asked, suffix=SUFFIX, extra_body={"ignore_eos": True})
        assert ignoring.choices[0].finish_reason == "length"


def test_what_cannot_be_combined(coder: Serving) -> None:
    for field, value in {"echo": True, "context": "x", "truncate_prompt_tokens": 5}.items():
        body = {field: value}
        with pytest.raises(openai.APIStatusError) as refused:
            coder.client.completions.create(model="tiny", prompt="a", suffix="b", max_tokens=3, extra_body=body)
        assert refused.value.status_code in (400, 404)
    with pytest.raises(openai.BadRequestError, match="tokens"):
        coder.client.completions.create(model="tiny", prompt="a ", suffix="the " * 3000, max_tokens=3)


def test_infill(coder: Serving, local: LLM) -> None:
    asked = {"input_prefix": PREFIX, "input_suffix": SUFFIX, "n_predict": 12, "temperature": 0.7, "seed": 3}
    asked |= {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    files = [{"filename": "a.py", "text": "dog"}, {"text": "cat"}]
    with coder.http() as http:
        plain = http.post("/infill", json=asked).json()
        assert plain["content"] == expected(local, PREFIX, SUFFIX).text != ""
        assert (plain["stop"], plain["stop_type"]) == (True, "limit")
        assert plain["timings"]["predicted_n"] == plain["tokens_predicted"] == 12
        more = http.post("/infill", json=asked | {"prompt": "brown", "input_extra": files}).json()
        pairs = [("a.py", "dog"), ("tmp", "cat")]
        assert more["content"] == expected(local, f"{PREFIX}brown", SUFFIX, pairs).text
        many = http.post("/infill", json=asked | {"input_extra": [{"text": "cat " * 4000}, *files]}).json()
        assert many["content"] == expected(local, PREFIX, SUFFIX, pairs).text, "the first file has no room"
        lines = http.post("/infill", json=asked | {"stream": True, "samplers": ["top_k"], "t_max_predict_ms": 1})
        events = [json.loads(line[6:]) for line in lines.text.split("\n\n") if line]
        assert "".join(event["content"] for event in events) == plain["content"]
        assert [event["stop"] for event in events] == [False] * (len(events) - 1) + [True]
        warmed = http.post("/infill", json=asked | {"n_predict": 0}).json()
        assert (warmed["content"], warmed["stop_type"]) == ("", "limit")
        word = http.post("/infill", json=asked | {"stop": [plain["content"][3:5]]}).json()
        assert (word["stop_type"], word["stopping_word"]) == ("word", plain["content"][3:5])
        for wrong in ({"n": 2}, {"input_extra": [5]}, {"input_prefix": 5}, {"suffix": "x"}, {"model": "other"}):
            assert 400 <= http.post("/infill", json=asked | wrong).status_code < 500
        assert http.post("/infill", json={}).status_code == 200, "an empty file"


def test_ollama(coder: Serving, local: LLM) -> None:
    client = ollama.Client(host=coder.url, timeout=PATIENCE_S)
    options = {"num_predict": 12, "temperature": 0.7, "seed": 3, "top_k": 0, "top_p": 1.0}
    whole = expected(local, PREFIX, SUFFIX).text
    assert client.generate("tiny", PREFIX, suffix=SUFFIX, options=options).response == whole
    parts = client.generate("tiny", PREFIX, suffix=SUFFIX, system="x", options=options, stream=True)
    assert "".join(part.response or "" for part in parts) == whole
    assert client.generate("tiny", "", suffix=SUFFIX, options=options).response == expected(local, "", SUFFIX).text
    assert "insert" in (client.show("tiny").capabilities or [])
    with pytest.raises(ollama.ResponseError, match="leave out raw"):
        client.generate("tiny", PREFIX, suffix=SUFFIX, raw=True)


def test_a_model_without_the_tokens(server: Serving) -> None:
    with server.http() as http:
        calls: dict[str, dict[str, Any]] = {
            "/infill": {"input_prefix": "a"},
            "/v1/completions": {"model": "tiny", "prompt": "a", "suffix": "b"},
            "/api/generate": {"model": "tiny", "prompt": "a", "suffix": "b"},
        }
        for path, body in calls.items():
            for stream in (False, True):
                refused: httpx.Response = http.post(path, json=body | {"stream": stream})
                assert refused.status_code == 400
                assert "no tokens for fill-in-the-middle" in refused.text
        assert "insert" not in http.post("/api/show", json={"model": "tiny"}).json()["capabilities"]
