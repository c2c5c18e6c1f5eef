# /// script
# dependencies = ["anthropic==2.14.0"]
#
# [tool.twostroke]
# model = "qwen2.5-coder-1.5b"
# ///
"""Messages, streamed and not, a system prompt, tools and results, count_tokens, models, the asynchronous client."""

import asyncio
import os

from anthropic import Anthropic, AsyncAnthropic, BadRequestError

MODEL = os.environ["MODEL"]
GREEDY = {"temperature": 0}
QUESTION = [{"role": "user", "content": "What is the capital of France? One word."}]
client = Anthropic()

assert MODEL in [model.id for model in client.models.list()]

message = client.messages.create(model=MODEL, max_tokens=16, messages=QUESTION, extra_body=GREEDY)
assert (message.role, message.stop_reason, message.content[0].type) == ("assistant", "end_turn", "text")
assert "Paris" in message.content[0].text
assert client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens > 0
again = client.messages.create(model=MODEL, max_tokens=16, messages=QUESTION, extra_body=GREEDY)
assert again.content == message.content
assert again.usage.cache_read_input_tokens > 0

with client.messages.stream(model=MODEL, max_tokens=16, messages=QUESTION, extra_body=GREEDY) as stream:
    assert "".join(stream.text_stream) == message.content[0].text
    assert stream.get_final_message().stop_reason == "end_turn"

short = client.messages.create(
    model=MODEL,
    max_tokens=8,
    system=[{"type": "text", "text": "Answer in French.", "cache_control": {"type": "ephemeral"}}],
    messages=[{"role": "user", "content": [{"type": "text", "text": "Tell me a long story."}]}],
    stop_sequences=["never written"],
)
assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 8)

tools = [
    {
        "name": "get_weather",
        "description": "Get the current weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]
weather = [{"role": "user", "content": "What is the weather in Paris?"}]
fields = {"model": MODEL, "max_tokens": 64, "tools": tools, "extra_body": GREEDY}
called = client.messages.create(messages=weather, **fields)
[use] = [block for block in called.content if block.type == "tool_use"]
assert (called.stop_reason, use.name, use.input) == ("tool_use", "get_weather", {"city": "Paris"})
with client.messages.stream(messages=weather, **fields) as stream:
    [use] = [block for block in stream.get_final_message().content if block.type == "tool_use"]
assert use.input == {"city": "Paris"}
result = [{"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "18 degrees and sunny"}]}]
turns = [*weather, {"role": "assistant", "content": called.content}, {"role": "user", "content": result}]
said = client.messages.create(messages=turns, system="Call a tool once, then answer in a sentence.", **fields)
assert "18" in said.content[0].text
forced = client.messages.create(messages=QUESTION, tool_choice={"type": "tool", "name": "get_weather"}, **fields)
assert forced.content[0].name == "get_weather"


async def several() -> list[str]:
    async with AsyncAnthropic() as session:
        ask = session.messages.create
        answers = [ask(model=MODEL, max_tokens=16, messages=QUESTION, extra_body=GREEDY) for _ in range(3)]
        return [answer.content[0].text for answer in await asyncio.gather(*answers)]


assert asyncio.run(several()) == [message.content[0].text] * 3

try:
    client.messages.create(model=MODEL, max_tokens=16, messages=[])
except BadRequestError as refusal:
    assert refusal.body["error"]["type"] == "invalid_request_error"
else:
    raise AssertionError("a request without messages was answered")
