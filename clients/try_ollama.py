# /// script
# dependencies = ["ollama==0.6.3"]
#
# [tool.twostroke]
# model = "qwen2.5-coder-1.5b"
# ///
"""Chat and generate, streamed and not, a Python function as tool, a format, list and show, the asynchronous client."""

import asyncio
import os

from ollama import AsyncClient, ResponseError, chat, generate, list, show
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
SHORT = {"temperature": 0, "num_predict": 48}
QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]

assert MODEL in [model.model for model in list().models]
assert show(MODEL).capabilities

answer = chat(MODEL, QUESTION, options=SHORT)
assert "Paris" in answer.message.content
assert answer.done
assert answer.eval_count > 0
chunks = [*chat(MODEL, QUESTION, options=SHORT, stream=True)]
assert "".join(chunk.message.content or "" for chunk in chunks) == answer.message.content
assert [chunk.done for chunk in chunks] == [False] * (len(chunks) - 1) + [True]

made = generate(MODEL, "What is the capital of France? One word.", options=SHORT)
assert made.response == answer.message.content
assert "".join(part.response for part in generate(MODEL, "Count to 5.", options=SHORT, stream=True))


def get_weather(city: str) -> str:
    """Get the current weather of a city.

    Args:
        city: The name of the city
    """
    return f"18 degrees and sunny in {city}"


turns = [{"role": "user", "content": "What is the weather in Paris?"}]
called = chat(MODEL, turns, tools=[get_weather], options=SHORT)
[call] = called.message.tool_calls
assert (call.function.name, call.function.arguments) == ("get_weather", {"city": "Paris"})
turns += [
    called.message,
    {"role": "tool", "tool_name": "get_weather", "content": get_weather(**call.function.arguments)},
]
said = chat(
    MODEL, [{"role": "system", "content": "Call a tool once, then answer in a sentence."}, *turns], options=SHORT
)
assert "18" in said.message.content


class Person(BaseModel):
    name: str
    age: int


told = [{"role": "user", "content": "Alice is 31 years old."}]
person = chat(MODEL, told, format=Person.model_json_schema(), options=SHORT)
assert Person.model_validate_json(person.message.content) == Person(name="Alice", age=31)


async def several() -> str:
    return "".join(
        [part.message.content async for part in await AsyncClient().chat(MODEL, QUESTION, options=SHORT, stream=True)]
    )


assert asyncio.run(several()) == answer.message.content

try:
    chat("unknown", QUESTION)
except ResponseError as refusal:
    assert refusal.status_code == 404
else:
    raise AssertionError("an unknown model answered")
