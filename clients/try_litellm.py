# /// script
# dependencies = ["litellm==1.110.2"]
#
# [tool.twostroke]
# model = "qwen2.5-coder-1.5b"
# ///
"""Completion through each of its providers that fits, streams, tools, a response format, text completion, responses."""

import asyncio
import json
import os

import litellm
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]
SHORT = {"messages": QUESTION, "max_tokens": 16, "temperature": 0}
OLLAMA = os.environ["OLLAMA_HOST"]
PROVIDERS = {
    f"openai/{MODEL}": {},
    f"hosted_vllm/{MODEL}": {"api_base": os.environ["OPENAI_BASE_URL"]},
    f"anthropic/{MODEL}": {"api_base": os.environ["ANTHROPIC_BASE_URL"]},
    f"ollama_chat/{MODEL}": {"api_base": OLLAMA},
    f"ollama/{MODEL}": {"api_base": OLLAMA},
}
tool = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


class Person(BaseModel):
    name: str
    age: int


for model, where in PROVIDERS.items():
    answer = litellm.completion(model, **SHORT, **where)
    assert "Paris" in answer.choices[0].message.content, model
    assert answer.usage.completion_tokens > 0, model
    chunks = [*litellm.completion(model, stream=True, **SHORT, **where)]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == answer.choices[0].message.content, model
    if not model.startswith("ollama/"):  # its provider for plain generation writes tools into the prompt
        called = litellm.completion(model, WEATHER, tools=[tool], max_tokens=64, temperature=0, **where)
        [call] = called.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Paris"}, model
        assert called.choices[0].finish_reason == "tool_calls", model
    told = [{"role": "user", "content": "Alice is 31 years old."}]
    shaped = litellm.completion(model, told, response_format=Person, max_tokens=64, temperature=0, **where)
    assert Person.model_validate_json(shaped.choices[0].message.content) == Person(name="Alice", age=31), model

made = litellm.text_completion(model=f"text-completion-openai/{MODEL}", prompt="1, 2, 3, 4,", max_tokens=4)
assert "5" in made.choices[0].text
responses = litellm.responses(model=f"openai/{MODEL}", input="What is the capital of France?", max_output_tokens=16)
assert responses.output[0].content[0].text
answer = asyncio.run(litellm.acompletion(f"openai/{MODEL}", **SHORT))
assert "Paris" in answer.choices[0].message.content
