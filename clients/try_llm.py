# /// script
# dependencies = ["llm==0.36"]
#
# [tool.twostroke]
# model = "qwen2.5-coder-1.5b"
# ///
"""The command line, with a model in extra-openai-models.yaml: prompt, system prompt, conversation, schema, tools."""

import json
import os
import subprocess
import tempfile
from pathlib import Path

MODELS = """
- {{model_id: local, model_name: {model}, api_base: "{url}", supports_schema: true, supports_tools: true}}
- {{model_id: local-responses, model_name: {model}, api_base: "{url}", responses: true}}
- {{model_id: local-completion, model_name: {model}, api_base: "{url}", completion: true}}
"""
TOOL = '''
def get_weather(city: str) -> str:
    """Get the current weather of a city."""
    return f"18 degrees and sunny in {city}"
'''

with tempfile.TemporaryDirectory() as folder:
    os.environ["LLM_USER_PATH"] = folder
    models = MODELS.format(model=os.environ["MODEL"], url=os.environ["OPENAI_BASE_URL"])
    (Path(folder) / "extra-openai-models.yaml").write_text(models)

    def llm(*arguments: str) -> str:
        return subprocess.run(["llm", *arguments], check=True, stdout=subprocess.PIPE, text=True).stdout

    short = ["-o", "max_tokens", "48", "-o", "temperature", "0"]
    question = "What is the capital of France? One word."
    assert "local" in llm("models")
    assert "Paris" in llm(question, "-m", "local", *short)
    assert "Paris" in llm(question, "-m", "local", "--no-stream", *short)
    assert "Paris" in llm(question, "-m", "local-responses")
    assert "5" in llm("1, 2, 3, 4,", "-m", "local-completion", "-o", "max_tokens", "4", "-o", "temperature", "0")
    llm("My name is Alice.", "-m", "local", "-s", "Be brief.", *short)
    assert "Alice" in llm("What is my name?", "-c", *short)
    person = llm("Alice is 31 years old.", "-m", "local", "--schema", "name, age int", *short)
    assert json.loads(person) == {"name": "Alice", "age": 31}
    rule = "Call a tool once, then answer in a sentence."
    said = llm("What is the weather in Paris?", "-m", "local", "-s", rule, "--functions", TOOL, "--td", *short)
    assert "18" in said
