"""Ollama's `pull` and `delete` with models of a catalog, which come from a function in place of the network."""

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import ollama
import pytest

from tests.patience import PATIENCE_S
from tests.server.conftest import client_of, eventually
from tests.server.long_answers import LONG
from tests.server.test_models import complete, source_of, states
from tests.tiny import write_model
from twostroke.models.checkpoints import fetch as module
from twostroke.models.checkpoints.catalog import CATALOG, CatalogEntry
from twostroke.models.checkpoints.fetch import fetch, is_fetched, model_path
from twostroke.models.checkpoints.progress import Progress
from twostroke.server.lifecycle import http_server
from twostroke.server.models.app import create_models_app
from twostroke.server.models.source import ModelSource
from twostroke.server.settings import Settings

CONTENT = b"the weights of a model" * 1000
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Shop:
    """Where models come from. Nothing arrives while `open` is not set, and wrong bytes while `damaged`."""

    directory: Path
    open: threading.Event = field(default_factory=threading.Event)
    damaged: bool = False
    fetched: int = 0

    def pieces(self, entry: CatalogEntry, parts: Path, report: Progress) -> list[Path]:
        self.fetched += 1
        report("downloading", 7, entry.size)
        assert self.open.wait(PATIENCE_S)
        (parts / "piece").write_bytes(CONTENT[::-1] if self.damaged else CONTENT)
        return [parts / "piece"]

    def source(self, name: str, progress: Progress) -> ModelSource:
        path = fetch(CATALOG[name], progress=progress)
        return replace(source_of(self.directory), name=name, path=path)


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Shop:
    (tmp_path / "a").mkdir()
    made = Shop(write_model("llama", tmp_path / "a", head_dim=64, num_attention_heads=2, num_hidden_layers=1))
    made.open.set()
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    for name in ("far", "near"):
        entry = CatalogEntry(name, "", False, "none", "x.gguf", len(CONTENT), DIGEST, (), "")
        monkeypatch.setitem(CATALOG, name, entry)
    monkeypatch.setattr(module, "_from_packages", made.pieces)
    return made


@pytest.fixture
def serve(shop: Shop) -> Callable[..., Any]:
    def serving(*sources: ModelSource, allowed: bool = True, **settings: Any) -> Any:
        chosen = Settings(grace_s=0.5, **settings)
        app = create_models_app(
            sources or [source_of(shop.directory)], None, chosen, None, shop.source if allowed else None
        )
        return client_of(http_server(app, chosen, "127.0.0.1", 0))

    return serving


def listed(client: httpx.Client) -> list[str]:
    return [one["name"] for one in client.get("/api/tags").json()["models"]]


def delete(client: httpx.Client, name: str) -> httpx.Response:
    return client.request("DELETE", "/api/delete", json={"model": name})


def test_a_model_comes_and_goes(shop: Shop, serve: Callable[..., Any]) -> None:
    with serve() as client:
        local = ollama.Client(host=str(client.base_url))
        shop.open.clear()
        seen: list[Any] = []
        for status in local.pull("far:latest", stream=True):
            seen.append(status)
            shop.open.set()
        assert [one.status for one in (seen[0], *seen[-2:])] == ["pulling manifest", "writing manifest", "success"]
        assert all(one.digest == f"sha256:{DIGEST}" and one.total == len(CONTENT) for one in seen if one.completed)
        assert listed(client) == ["a", "far"]
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "far"]
        text = complete(client, "far")["choices"][0]["text"]
        assert text == complete(client, "a")["choices"][0]["text"]
        assert {one.model for one in local.ps().models} == {"a", "far"}
        assert local.show("far").details is not None
        assert local.pull("far").status == "success"
        assert shop.fetched == 1
        local.delete("far")
        assert not is_fetched(CATALOG["far"])
        assert not model_path(CATALOG["far"]).exists()
        assert listed(client) == [one.model for one in local.ps().models] == ["a"]
        assert client.post("/v1/completions", json={"model": "far", "prompt": "x"}).status_code == 404
        assert client.get("/metrics").status_code == 200
        assert local.pull("far").status == "success"
        assert complete(client, "far")["choices"][0]["text"] == text


def test_what_is_not_ours_is_refused(shop: Shop, serve: Callable[..., Any]) -> None:
    sources = [shop.source("near", lambda *_: None), source_of(shop.directory), shop.source("far", lambda *_: None)]
    with serve(*sources, replace(sources[2], name="again")) as client:
        for name, status, reason in (
            ("near", 400, "is the default model"),
            ("a", 400, "delete "),
            ("far", 409, "has the file of again"),
            ("none", 404, "there is no model"),
            ("", 404, "there is no model"),
        ):
            refused = delete(client, name)
            assert (refused.status_code, reason in refused.json()["error"]) == (status, True), refused.text
        assert delete(client, "x" * 10_000).status_code == 404
        assert client.request("DELETE", "/api/delete", json={"model": 5}).status_code == 400
        refused = client.post("/api/pull", json={"model": "org/model"})
        assert (refused.status_code, "the catalog" in refused.json()["error"]) == (404, True)
        assert model_path(CATALOG["far"]).exists()
        assert listed(client) == ["near", "a", "far", "again"]


def test_a_model_in_use_stays(shop: Shop, serve: Callable[..., Any]) -> None:
    with serve(source_of(shop.directory), shop.source("far", lambda *_: None)) as client:
        body = {"model": "far", "prompt": "x", "stream": True, **LONG}
        with client.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # a dropped iterator closes the connection
            next(lines)
            refused = delete(client, "far")
            assert (refused.status_code, "1 calls use the model far" in refused.json()["error"]) == (409, True)
        eventually(lambda: delete(client, "far").status_code == 200)
        assert states(client).keys() == {"a"}


def test_downloads_that_fail_or_are_left(shop: Shop, serve: Callable[..., Any]) -> None:
    """Two clients share one; one goes on without its client; a failed one is told, and may be tried again."""
    with serve() as client:
        shop.open.clear()
        with client.stream("POST", "/api/pull", json={"model": "far"}) as stream:
            assert "pulling manifest" in next(stream.iter_lines())
        assert client.post("/api/chat", json={"model": "far", "messages": []}).status_code == 404
        with client.stream("POST", "/api/pull", json={"name": "far"}) as stream:
            lines = stream.iter_lines()
            assert "pulling manifest" in next(lines)
            assert '"completed":7' in next(lines)
            shop.open.set()
            assert list(lines)[-1] == '{"status":"success"}'
        assert shop.fetched == 1
        shop.damaged = True
        lines = client.post("/api/pull", json={"model": "near"}).text.splitlines()
        assert "has the wrong sha256" in lines[-1]
        failed = client.post("/api/pull", json={"model": "near", "stream": False})
        assert (failed.status_code, list(failed.json())) == (502, ["error"])
        assert listed(client) == ["a", "far"]
        shop.damaged = False
        assert client.post("/api/pull", json={"model": "near", "stream": False}).json() == {"status": "success"}
        assert listed(client) == ["a", "far", "near"]


def test_only_the_operator_allows_it(shop: Shop, serve: Callable[..., Any], tmp_path: Path) -> None:
    far = shop.source("far", lambda *_: None)
    with serve(source_of(shop.directory), far, allowed=False) as client:
        assert "--manage-models" in delete(client, "far").json()["error"]
        assert client.post("/api/pull", json={"model": "near"}).status_code == 404
        assert client.post("/api/pull", json={"model": "far"}).json() == {"status": "success"}
    keys = tmp_path / "keys.toml"
    keys.write_text('[ann]\nkey = "secret-of-ann"\n[root]\nkey = "secret-of-root"\nadmin = true\n')
    keys.chmod(0o600)
    with serve(source_of(shop.directory), far, api_key_file=str(keys)) as client:
        client.headers["authorization"] = "Bearer secret-of-ann"
        assert delete(client, "far").status_code == 403
        assert client.post("/api/pull", json={"model": "near"}).status_code == 403
        assert client.post("/api/pull", json={"model": "far"}).status_code == 200
        client.headers["authorization"] = "Bearer secret-of-root"
        assert delete(client, "far").status_code == 200
