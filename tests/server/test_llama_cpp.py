"""llama.cpp's and vLLM's small routes: facts about the server, tokens, and a conversation as text."""

from typing import Any

import pytest

from tests.server.conftest import Serving, eventually
from tests.server.long_answers import LONG
from twostroke.api.llm import LLM

MESSAGES: Any = [{"role": "system", "content": "be quick"}, {"role": "user", "content": "the fox?"}]


def test_facts(server: Serving, reference: LLM) -> None:
    with server.http() as http:
        props = http.get("/props").json()
        assert props["default_generation_settings"]["n_ctx"] == reference.max_model_len
        assert props["chat_template"] == reference.tokenizer.chat_template
        assert (props["bos_token"], props["eos_token"], props["model_alias"]) == ("<s>", "</s>", "tiny")
        slots = http.get("/slots").json()
        assert len(slots) == props["total_slots"]
        assert not any(slot["is_processing"] for slot in slots)
        assert http.get("/ping").status_code == http.post("/ping").status_code == 200


def test_load(server: Serving) -> None:
    with server.http() as http:
        assert http.get("/load").json() == {"server_load": 0}
        with http.stream("POST", "/v1/completions", json={"prompt": "the", "stream": True, "n": 2} | LONG) as running:
            lines = running.iter_lines()  # a dropped iterator closes the connection
            assert next(lines).startswith("data: ")
            with server.http() as other:
                assert other.get("/load").json() == {"server_load": 2}
                assert [slot["is_processing"] for slot in other.get("/slots").json()[:3]] == [True, True, False]
        eventually(lambda: http.get("/load").json() == {"server_load": 0})


def test_apply_template(server: Serving, reference: LLM) -> None:
    with server.http() as http:
        made = http.post("/apply-template", json={"messages": MESSAGES}).json()["prompt"]
        assert made == reference.tokenizer.chat(MESSAGES, add_generation_prompt=True)
        bare = http.post("/apply-template", json={"messages": MESSAGES, "add_generation_prompt": False}).json()
        assert made == bare["prompt"] + "[assistant]"
        for wrong in ({}, {"messages": []}, {"messages": MESSAGES, "model": "other"}, {"messages": [{"role": "x"}]}):
            assert 400 <= http.post("/apply-template", json=wrong).status_code < 500


@pytest.mark.parametrize("text", ["the quick fox", "", "</s>a", "\u00e4\u2603"])
def test_tokens(server: Serving, reference: LLM, text: str) -> None:
    encode = reference.tokenizer.encode
    with server.http() as http:

        def tokens(**fields: Any) -> Any:
            return http.post("/tokenize", json=fields).json()["tokens"]

        assert tokens(content=text) == encode(text, add_bos=False)
        assert tokens(content=text, add_special=True) == tokens(prompt=text) == encode(text)
        plain = encode(text, add_bos=False, parse_special=False)
        assert tokens(content=text, parse_special=False) == plain
        pieces = tokens(content=text, with_pieces=True)
        assert [one["id"] for one in pieces] == encode(text, add_bos=False)
        data = [one["piece"].encode() if isinstance(one["piece"], str) else bytes(one["piece"]) for one in pieces]
        assert b"".join(data).decode() == text
        back = http.post("/detokenize", json={"tokens": plain}).json()
        assert back["content"] == back["prompt"] == text
        assert http.post("/tokenize", json={"content": text, "prompt": f"{text}x"}).status_code == 400


def test_completion(server: Serving, reference: LLM) -> None:
    asked: Any = {"temperature": 0.9, "seed": 2, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    expected = reference.generate(["the quick"], max_tokens=9, temperature=0.9, seed=2)[0].text
    with server.http() as http:
        for prompt in ("the quick", ["the quick"], reference.tokenizer.encode("the quick")):
            made = http.post("/completion", json={"prompt": prompt, "n_predict": 9} | asked).json()
            assert (made["content"], made["tokens_predicted"]) == (expected, 9)
        own = reference.generate(["a"], max_tokens=9, seed=2, temperature=0.8, top_k=40, top_p=0.95, min_p=0.05)[0].text
        assert http.post("/completion", json={"prompt": "a", "n_predict": 9, "seed": 2}).json()["content"] == own
        for wrong in ({}, {"prompt": ["a", "b"]}, {"prompt": ""}, {"prompt": "a", "n": 2}, {"prompt": "fox " * 3000}):
            assert http.post("/completion", json=wrong).status_code == 400
