"""`twostroke verify`, of a receipt that a server gave and kept."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from tests.methods.watching import needs_native
from tests.server.conftest import serving
from twostroke.api.llm import LLM

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "the fox"}],
    "max_tokens": 40,
    "temperature": 0.9,
    "ignore_eos": True,
    "receipt": True,
}
TEXTS = {"prompt": [[7, 8, 9], [8, 9]], "n": 2, "max_tokens": 9, "temperature": 1.0, "seed": 4, "ignore_eos": True,
         "receipt": True}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"fox": {"type": "integer", "maximum": 99}}, "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "look", "parameters": SCHEMA}}


@needs_native
def test_a_receipt_of_a_server(
    run: Callable[..., Result], tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    model, kept = str(tiny_directory("qwen3")), tmp_path / "kept"
    kept.mkdir()
    with serving(LLM(model, kv_bytes=8 << 20, threads=1), receipts=str(kept)) as server, server.http() as http:
        whole = http.post("/v1/chat/completions", json=ASKED).json()
        lines = http.post("/v1/chat/completions", json=ASKED | {"stream": True}).text.splitlines()
        refused = [
            http.post("/v1/chat/completions", json=ASKED | more).json()["error"]["message"]
            for more in ({"method": "repeat"}, {"tools": [TOOL], "stop": ["x"]})
        ]
        several = http.post("/v1/chat/completions", json=ASKED | {"n": 3, "seed": 5}).json()
        free = {"ignore_eos": False}
        texts = http.post("/v1/completions", json=TEXTS).json()
        streamed_text = http.post("/v1/completions", json=TEXTS | {"prompt": [7, 8], "n": 1, "stream": True}).text
        guided = [
            http.post("/v1/chat/completions", json=ASKED | free | more).json()
            for more in (
                {"choice": ["a fox", "a dog"]},
                {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
                {"tools": [TOOL]},
                {"tools": [TOOL], "tool_choice": "required", "n": 2},
            )
        ]
    assert "receipt" in refused[0]
    assert "a receipt has no stop strings beside tools" in refused[1]
    assert len({tuple(one["tokens"]) for one in several["receipts"]}) == 3
    [streamed] = [
        chunk for line in lines if line.startswith("data: {") and "receipt" in (chunk := json.loads(line[6:]))
    ]
    assert len(list(kept.iterdir())) == 2 + 3 + 3 + 2 + 4 + 1
    told = [json.loads(line[6:]) for line in streamed_text.splitlines() if '"receipt"' in line]
    assert len(told[0]["receipt"]["tokens"]) == 9
    assert [one["options"].get("choice") for one in texts["receipts"]] == [None, 1, None, 1]
    for number, answer in enumerate([several, texts, *guided]):
        (tmp_path / f"answer{number}").write_text(json.dumps(answer))
        told = run("verify", tmp_path / f"answer{number}", "-m", model, "--threads", 1)
        assert told.exit_code == 0, told.output
        assert told.stdout.count("the same bits") == len(answer["choices"])
    assert guided[0]["receipt"]["options"]["grammar"]["text"]
    other = several["receipts"][2] | {"options": several["receipts"][2]["options"] | {"choice": 1}}
    (tmp_path / "other").write_text(json.dumps({"receipts": [other, several["receipts"][0]]}))
    told = run("verify", tmp_path / "other", "-m", model, "--threads", 1)
    assert told.exit_code == 1
    assert told.stdout.splitlines()[0] == "receipt 0: DIFFERENT: the options were altered: their digest is another"
    assert told.stdout.splitlines()[1].startswith("receipt 1: the same bits")
    for name, value in (("answer", whole), ("stream", streamed), ("alone", whole["receipt"])):
        (tmp_path / name).write_text(json.dumps(value))
        told = run("verify", tmp_path / name, "-m", model, "--threads", 1)
        assert told.exit_code == 0, told.output
        assert told.stdout == "the same bits: 40 tokens and their log-probabilities\n"
        assert "sealed by your key" in told.stderr
    forged = whole["receipt"] | {"tokens": [1, *whole["receipt"]["tokens"][1:]]}
    (tmp_path / "forged").write_text(json.dumps(forged))
    told = run("verify", tmp_path / "forged", "-m", model, "--threads", 1, "--json")
    assert told.exit_code == 1
    assert json.loads(told.stdout)["wrong"].startswith("token 0 differs: the receipt has 1 (")
    assert "NOT sealed" in told.stderr


def test_what_cannot_be_verified(run: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "other").write_text("{}")
    for path, word in ((tmp_path / "other", "this is no receipt"), (tmp_path / "none", "there is no such file")):
        told = run("verify", path)
        assert told.exit_code == 1
        assert word in told.stderr
    assert "there is no directory" in run("serve", "--receipts", tmp_path / "none").stderr
