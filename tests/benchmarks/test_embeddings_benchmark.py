"""benchmarks/embeddings.py on a tiny model, and environments that every checkout shares."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.embeddings import batches, measure
from benchmarks.peer import environments
from benchmarks.peer.engines import ENGINES
from benchmarks.server_process import ServerFailed
from tests.server.conftest import serving
from twostroke.api.llm import LLM


def test_texts_have_their_lengths_and_are_new_in_each_round() -> None:
    made = list(batches(10, 20, 8, 0))
    assert [len(one) for one in made] == [8, 8, 4]
    assert {len(text.split()) for one in made for text in one} == {10}
    assert made == list(batches(10, 20, 8, 0)) != list(batches(10, 20, 8, 1))
    mixed = [len(text.split()) for one in batches(0, 400, 400, 0) for text in one]
    assert 10 <= min(mixed) < 15
    assert 350 < max(mixed) <= 500


def test_a_server_is_measured(tiny_directory: Callable[[str], Path]) -> None:
    llm = LLM(str(tiny_directory("llama")), kv_bytes=4 << 20, threads=1)
    with serving(llm) as running:
        server: Any = SimpleNamespace(url=running.url, name="ours")
        seconds, tokens, rows = measure(server, list(batches(10, 5, 2, 0)))
        assert (len(rows), seconds > 0, tokens >= 50) == (5, True, True)
        assert np.allclose((rows * rows).sum(1), 1, atol=1e-5)
        with pytest.raises(ServerFailed, match="ours"):
            measure(server, [[""]])


def test_environments_do_not_depend_on_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another checkout has made is not made again; one of other requirements is."""
    engine = ENGINES["llama.cpp"]
    monkeypatch.setattr(environments, "run", lambda *_: None)
    (tmp_path / "llama.cpp").mkdir()
    environments.ensure_environment(engine, tmp_path)
    marker = tmp_path / "llama.cpp" / "installed"
    there = marker.read_text().replace("benchmarks/peer/", "/elsewhere/benchmarks/peer/")
    marker.write_text(there)
    environments.ensure_environment(engine, tmp_path)
    assert marker.read_text() == there
    marker.write_text(there.replace("python", "other"))
    environments.ensure_environment(engine, tmp_path)
    assert marker.read_text() == there.replace("/elsewhere/", "")
