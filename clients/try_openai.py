# /// script
# dependencies = ["openai==3.57.0"]
#
# [tool.twostroke]
# model = "qwen2.5-coder-0.5b"
# ///
"""Chat and completions, streamed and not, a parsed object, a tool, responses that go on, the asynchronous client."""

import asyncio
import json
import os

from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from pydantic import BaseModel, Field

MODEL = os.environ["MODEL"]
QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]
client = OpenAI()

assert client.models.retrieve(MODEL).id == MODEL
assert MODEL in [model.id for model in client.models.list()]

completion = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=4, temperature=0, logprobs=2)
assert "5" in completion.choices[0].text
assert len(completion.choices[0].logprobs.tokens) == completion.usage.completion_tokens == 4

answer = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0)
assert "Paris" in answer.choices[0].message.content
assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens

chunks = list(
    client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=16,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
)
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == answer.choices[0].message.content
assert chunks[-1].usage.total_tokens == answer.usage.total_tokens


class Person(BaseModel):
    name: str
    age: int = Field(ge=0, le=150)


class get_weather(BaseModel):
    """Get the current weather of a city."""

    city: str


told = [{"role": "user", "content": "Alice is 31 years old."}]
parsed = client.chat.completions.parse(model=MODEL, messages=told, response_format=Person, max_tokens=64, temperature=0)
assert parsed.choices[0].message.parsed == Person(name="Alice", age=31)

weather = [{"role": "user", "content": "What is the weather in Paris?"}]
tools = [pydantic_function_tool(get_weather)]
called = client.chat.completions.create(model=MODEL, messages=weather, tools=tools, max_tokens=64, temperature=0)
[call] = called.choices[0].message.tool_calls
assert called.choices[0].finish_reason == "tool_calls"
assert json.loads(call.function.arguments) == {"city": "Paris"}
result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees and sunny"}
turns = [*weather, called.choices[0].message, result]
said = client.chat.completions.create(model=MODEL, messages=turns, tools=tools, max_tokens=48, temperature=0)
assert "18" in said.choices[0].message.content

with client.chat.completions.stream(model=MODEL, messages=weather, tools=tools, max_tokens=64, temperature=0) as stream:
    final = stream.get_final_completion()
assert final.choices[0].message.tool_calls[0].function.parsed_arguments == get_weather(city="Paris")

first = client.responses.create(model=MODEL, input="My name is Alice.", max_output_tokens=16, temperature=0)
second = client.responses.create(
    model=MODEL, input="What is my name?", previous_response_id=first.id, max_output_tokens=16, temperature=0
)
assert "Alice" in second.output_text
with client.responses.stream(model=MODEL, input=QUESTION, max_output_tokens=16, temperature=0) as events:
    kinds = [event.type for event in events]
    assert "Paris" in events.get_final_response().output_text
assert (kinds[0], kinds[-1]) == ("response.created", "response.completed")
person = client.responses.parse(model=MODEL, input=told, text_format=Person, max_output_tokens=64, temperature=0)
assert person.output_parsed == Person(name="Alice", age=31)

function = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
asked = client.responses.create(model=MODEL, input=weather, tools=[function], max_output_tokens=64, temperature=0)
[item] = [item for item in asked.output if item.type == "function_call"]
assert (item.name, json.loads(item.arguments)) == ("get_weather", {"city": "Paris"})


async def several() -> list[str]:
    async with AsyncOpenAI() as session:
        ask = session.chat.completions.create
        answers = [ask(model=MODEL, messages=QUESTION, max_tokens=16, temperature=0) for _ in range(4)]
        return [answer.choices[0].message.content for answer in await asyncio.gather(*answers)]


assert asyncio.run(several()) == [answer.choices[0].message.content] * 4

for error, call in (
    (NotFoundError, lambda: client.chat.completions.create(model="gpt-unknown", messages=QUESTION)),
    (BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=[])),
):
    try:
        call()
    except error as refusal:
        assert refusal.body["message"]
    else:
        raise AssertionError(f"{error.__name__} was not raised")
