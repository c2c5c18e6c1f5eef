"""Scores over HTTP: echo, max_tokens of 0, prompt_logprobs in vLLM's shape, offsets, and what lm_eval asks for."""

import codecs
import json
from typing import Any

import openai
import pytest

from tests.server.conftest import Serving
from twostroke.api.llm import LLM

PROMPTS = ["the quick brown fox", "a lazy dog é😀 你好", [5, 6, 7, 300], [9, 9]]


def post(server: Serving, **fields: Any) -> Any:
    with server.http() as http:
        answer = http.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def begins(llm: LLM, ids: list[int], skip_special: bool) -> list[int]:
    """Where each token begins, in code points: whole characters of the bytes before it."""
    data = [llm.tokenizer.token_bytes(id, skip_special=skip_special) for id in ids]
    read = codecs.getincrementaldecoder("utf-8")
    return [len(read("replace").decode(b"".join(data[:place]))) for place in range(len(ids))]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_echo(prompt: Any, server: Serving, reference: LLM) -> None:
    """The prompt, then the answer; scores are those of the engine; offsets count code points."""
    [made] = post(server, prompt=prompt, echo=True, logprobs=2, max_tokens=6)
    ids = reference.encode(prompt)
    expected = reference.generate([ids], max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=2)[0]
    text = prompt if isinstance(prompt, str) else reference.tokenizer.decode(ids, skip_special=False)
    assert made["text"] == text + expected.text
    scores = made["logprobs"]
    all_ids = [*ids, *(token.id for token in expected.tokens)]
    assert scores["tokens"] == [reference.tokenizer.token_text(id) for id in all_ids]
    assert expected.prompt_scores is not None
    values = [score and score.logprob for score in expected.prompt_scores] + [one.logprob for one in expected.tokens]
    assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is values[0] is None
    assert scores["token_logprobs"][1:] == pytest.approx(values[1:], abs=1e-3)
    for name, own, top in list(zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True))[
        1:
    ]:
        assert top[name] >= own, "the token itself is always there; of equal names, the likeliest"
        assert 1 <= len(top) <= 3
    added = int(isinstance(prompt, str) and reference.tokenizer.add_bos)
    offsets = [0] * added + begins(reference, ids[added:], False)
    offsets += [len(text) + one for one in begins(reference, [token.id for token in expected.tokens], True)]
    assert scores["text_offset"] == offsets


def test_echo_with_several_prompts_and_choices(server: Serving) -> None:
    fields: Any = {"temperature": 1.0, "seed": 3, "logprobs": 1, "max_tokens": 4}
    plain = post(server, prompt=["the", "a dog"], n=2, **fields)
    made = post(server, prompt=["the", "a dog"], n=2, echo=True, **fields)
    assert [one["index"] for one in made] == [0, 1, 2, 3]
    for before, after in zip(plain, made, strict=True):
        prompt = ["the", "a dog"][before["index"] // 2]
        assert after["text"] == prompt + before["text"]
        count = len(before["logprobs"]["tokens"])
        assert after["logprobs"]["tokens"][-count:] == before["logprobs"]["tokens"]
        assert [one + len(prompt) for one in before["logprobs"]["text_offset"]] == after["logprobs"]["text_offset"][
            -count:
        ]


@pytest.mark.parametrize("most", [0, 4])
@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_echoes(most: int, logprobs: int | None, client: openai.OpenAI, server: Serving) -> None:
    fields: Any = {"prompt": ["the", "a dog"], "n": 2, "echo": True, "logprobs": logprobs, "max_tokens": most}
    whole = post(server, **fields)
    texts, offsets, reasons = [""] * 4, [[] for _ in range(4)], [""] * 4
    extra: Any = {"ignore_eos": True}
    for chunk in client.completions.create(model="tiny", stream=True, temperature=0, extra_body=extra, **fields):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            offsets[choice.index] += (choice.logprobs and choice.logprobs.text_offset) or []
            assert not reasons[choice.index], "nothing follows the end"
            reasons[choice.index] = choice.finish_reason or ""
    assert texts == [choice["text"] for choice in whole]
    assert reasons == ["length"] * 4
    assert offsets == [choice["logprobs"]["text_offset"] if logprobs else [] for choice in whole]


def test_max_tokens_of_0(server: Serving) -> None:
    with server.http() as http:
        body = http.post("/v1/completions", json={"prompt": "the quick", "max_tokens": 0}).json()
    assert body["choices"][0]["text"] == ""
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 0
    [scored] = post(server, prompt="the quick", max_tokens=0, echo=True, logprobs=0)
    [more] = post(server, prompt="the quick", max_tokens=1, echo=True, logprobs=0)
    assert scored["logprobs"]["token_logprobs"] == pytest.approx(more["logprobs"]["token_logprobs"][:-1], abs=1e-4)


@pytest.mark.parametrize("stop", ["stop", "late"])
def test_offsets_when_a_stop_string_holds_text_back(stop: str, server: Serving) -> None:
    """A token whose text is held back still has its own place in the text."""
    [whole] = post(server, prompt="the", max_tokens=12, logprobs=0)
    tokens, offsets = whole["logprobs"]["tokens"], whole["logprobs"]["text_offset"]
    text = whole["text"]
    # Either a string that is found across several tokens, or one whose beginning is and which never ends.
    wanted = text[offsets[5] : offsets[9] + 1] if stop == "stop" else text[offsets[5] : offsets[9]] + "\x00"
    for stream in (False, True):
        with server.http() as http:
            body = {"prompt": "the", "max_tokens": 12, "logprobs": 0, "temperature": 0, "ignore_eos": True}
            answer = http.post("/v1/completions", json={**body, "stop": [wanted], "stream": stream})
        lines = answer.text.splitlines() if stream else [f"data: {answer.text}"]
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        made = [offset for event in events for offset in event["choices"][0]["logprobs"]["text_offset"]]
        assert made == offsets[: len(made)]
        assert len(made) == (len(tokens) if stop == "late" else 10)


def test_token_ids_as_tokens(server: Serving, reference: LLM) -> None:
    [made] = post(server, prompt=[5, 6], echo=True, logprobs=1, max_tokens=2, return_tokens_as_token_ids=True)
    assert made["logprobs"]["tokens"][:2] == ["token_id:5", "token_id:6"]
    assert all(name.startswith("token_id:") for name in made["logprobs"]["top_logprobs"][1])


def test_prompt_logprobs_have_the_shape_of_vllm(server: Serving, reference: LLM) -> None:
    ids = reference.encode("the quick brown fox")
    expected = reference.generate([ids], max_tokens=1, prompt_logprobs=2)[0].prompt_scores
    assert expected is not None
    [made] = post(server, prompt="the quick brown fox", prompt_logprobs=2, max_tokens=1)
    check(made["prompt_logprobs"], ids, expected, reference)
    messages = [{"role": "user", "content": "the quick brown fox"}]
    ids = reference.tokenizer.encode_chat(messages)
    expected = reference.generate([ids], max_tokens=1, prompt_logprobs=2)[0].prompt_scores
    with server.http() as http:
        answer = http.post(
            "/v1/chat/completions", json={"messages": messages, "prompt_logprobs": 2, "max_tokens": 1}
        ).json()
    check(answer["prompt_logprobs"], ids, expected, reference)


def check(made: Any, ids: list[int], expected: Any, llm: LLM) -> None:
    assert made[0] is None
    for id, entry, score in zip(ids[1:], made[1:], expected[1:], strict=True):
        own = entry[str(id)]
        assert own["rank"] == score.rank
        assert own["logprob"] == pytest.approx(score.logprob, abs=1e-3)
        assert own["decoded_token"] == llm.tokenizer.token_text(id)
        assert sorted(one["rank"] for one in entry.values())[:2] == [1, 2]
        assert len(entry) == (2 if score.rank <= 2 else 3)


def test_what_is_refused(server: Serving) -> None:
    with server.http() as http:
        for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}, {"max_tokens": 0}):
            answer = http.post("/v1/completions", json={"prompt": "the", "method": "repeat", **fields})
            assert answer.status_code == 400
            assert "method repeat" in answer.json()["error"]["message"]


def test_tokenizer_info(server: Serving, reference: LLM) -> None:
    """What lm_eval's remote tokenizer reads; its ids come from /tokenize."""
    with server.http() as http:
        info = http.get("/tokenizer_info").json()
        assert info["chat_template"] == reference.tokenizer.chat_template
        assert {name: info[name] for name in reference.tokenizer.special_tokens} == reference.tokenizer.special_tokens
        ids = http.post("/tokenize", json={"prompt": info["eos_token"], "add_special_tokens": False}).json()["tokens"]
    assert len(ids) == 1
    assert ids[0] in reference.tokenizer.eos_ids


def test_as_lm_eval_reads_it(server: Serving, reference: LLM) -> None:
    """The payload and the reading of lm_eval 0.4.13's `local-completions`, for both greedy and other continuations."""
    context = reference.encode("the quick")
    greedy = [token.id for token in reference.generate([context], max_tokens=3, ignore_eos=True)[0].tokens]
    for continuation, expected in ((greedy, True), ([7, 8, 9], False)):
        payload: Any = {"prompt": [context + continuation], "temperature": 0, "max_tokens": 1, "logprobs": 1}
        [choice] = post(server, **payload, seed=1234, echo=True)
        values = choice["logprobs"]["token_logprobs"][len(context) : -1]
        tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
        score = reference.score(context, continuation)
        assert sum(values) == pytest.approx(score.sum, abs=1e-3)
        assert all(value == max(top.values()) for value, top in zip(values, tops, strict=True)) == expected
        assert score.greedy == expected
