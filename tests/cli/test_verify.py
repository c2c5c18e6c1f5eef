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
            for more in ({"method": "repeat"}, {"n": 2})
        ]
        grammar = http.post("/v1/chat/completions", json=ASKED | {"choice": ["a"]}).json()
    assert "receipt" in refused[0]
    assert "receipt" in refused[1]
    assert grammar["receipt"] is None
    assert "without a grammar" in grammar["receipt_error"]
    [streamed] = [
        chunk for line in lines if line.startswith("data: {") and "receipt" in (chunk := json.loads(line[6:]))
    ]
    assert len(list(kept.iterdir())) == 2
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
