# /// script
# dependencies = ["langchain-openai==1.7.4", "langchain==1.5.2"]
#
# [tool.twostroke]
# model = "qwen2.5-coder-1.5b"
# ///
"""Invoke, stream and batch; an agent with tools, streamed too; structured output by each method; completions."""

import os

from langchain.agents import create_agent
from langchain.agents.structured_output import ToolStrategy
from langchain.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

MODEL = os.environ["MODEL"]
chat = ChatOpenAI(model=MODEL, temperature=0, max_tokens=64)

answer = chat.invoke("What is the capital of France? One word.")
assert "Paris" in answer.content
assert answer.usage_metadata["output_tokens"] > 0
assert "".join(chunk.content for chunk in chat.stream("What is the capital of France? One word.")) == answer.content
assert [said.content for said in chat.batch(["What is the capital of France? One word."] * 2)] == [answer.content] * 2
assert "5" in OpenAI(model=MODEL, temperature=0, max_tokens=4).invoke("1, 2, 3, 4,")


@tool
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"18 degrees and sunny in {city}"


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


agent = create_agent(chat, tools=[get_weather, add], system_prompt="Call a tool once, then answer in a sentence.")
question = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
messages = agent.invoke(question)["messages"]
assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
assert "18" in messages[-1].content
streamed = agent.stream(question, stream_mode="messages")
assert "18" in "".join(chunk.content for chunk, facts in streamed if facts["langgraph_node"] == "model")


class Person(BaseModel):
    """A person."""

    name: str
    age: int


TOLD = "Alice is 31 years old. Answer with JSON."
for method in ("json_schema", "function_calling", "json_mode"):
    ask = TOLD + ' Its keys are "name" and "age".' if method == "json_mode" else TOLD
    assert chat.with_structured_output(Person, method=method).invoke(ask) == Person(name="Alice", age=31)

structured = create_agent(chat, tools=[], response_format=ToolStrategy(Person))
assert structured.invoke({"messages": [{"role": "user", "content": TOLD}]})["structured_response"].name == "Alice"

responses = ChatOpenAI(model=MODEL, temperature=0, max_tokens=64, use_responses_api=True)
assert "Paris" in responses.invoke("What is the capital of France? One word.").text
[call] = responses.bind_tools([get_weather]).invoke("What is the weather in Paris?").tool_calls
assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
