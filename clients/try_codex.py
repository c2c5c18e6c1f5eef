# /// script
# dependencies = []
#
# [tool.twostroke]
# model = "qwen2.5-coder-1.5b"
# name = "Codex CLI (request shapes)"
# ///
"""Requests as its documentation describes them: a turn with all kinds of tools, one with their results."""

import json

from replay import replay

for what, answer in replay("codex"):
    assert answer[0]["type"] == "response.created"
    assert answer[-1]["type"] == "response.completed"
    assert answer[-1]["response"]["usage"]["total_tokens"] > 0
    done = [event["item"] for event in answer if event["type"] == "response.output_item.done"]
    assert done == answer[-1]["response"]["output"]
    if what == "turn":
        [call] = [item for item in done if item["type"] == "function_call"]
        assert call["name"] == "exec_command"
        assert json.loads(call["arguments"])["cmd"].startswith("ls")
    else:
        assert "notes.txt" in done[-1]["content"][0]["text"]
