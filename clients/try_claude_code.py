# /// script
# dependencies = []
#
# [tool.twostroke]
# model = "qwen2.5-coder-1.5b"
# name = "Claude Code (request shapes)"
# ///
"""Requests in its shapes, by hand: quota, count_tokens, a JSON title, a turn with tools, one with their results."""

import json

from replay import replay

for what, answer in replay("claude_code"):
    if what == "quota":
        assert answer[0]["usage"]["output_tokens"] == 1
        continue
    if what == "count":
        assert answer[0]["input_tokens"] > 50
        continue
    kinds = [event["type"] for event in answer if event["type"] != "ping"]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"]), what
    starts = [event["content_block"] for event in answer if event["type"] == "content_block_start"]
    deltas = [event["delta"] for event in answer if event["type"] == "content_block_delta"]
    text = "".join(delta.get("text", "") for delta in deltas)
    reason = answer[-2]["delta"]["stop_reason"]
    if what == "title":
        assert set(json.loads(text)) == {"title"}
    elif what == "turn":
        assert (reason, starts[-1]["name"]) == ("tool_use", "Read")
        assert json.loads("".join(delta.get("partial_json", "") for delta in deltas))["file_path"] == "/tmp/notes.txt"
    else:
        assert reason in ("end_turn", "tool_use", "max_tokens")
        assert starts
