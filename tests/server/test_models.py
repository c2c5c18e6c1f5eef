"""Several models in one server: loaded when they are asked for, and gone when memory is wanted or nobody calls."""

import asyncio
import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.peer.processes import tree
from tests.server.conftest import client_of, eventually
from tests.server.wire import open_llm, open_slow
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.resolve import open_path
from twostroke.server.engine_process.launch import launch_of
from twostroke.server.engine_process.link import LinkOpener
from twostroke.server.engine_process.messages import OpenOptions
from twostroke.server.lifecycle import http_server
from twostroke.server.models.app import create_models_app
from twostroke.server.models.dispatcher import AskedModel, seconds_of
from twostroke.server.models.settings import SharingSettings
from twostroke.server.models.source import ModelSource
from twostroke.server.settings import Settings

PROMPT = "Tell me of rivers and of the sea, and of all the hills between them. " * 4


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny models by their names."""
    made: dict[str, Path] = {}
    for name, layers in (("a", 2), ("b", 3), ("c", 1)):
        directory = tmp_path_factory.mktemp("models") / name
        directory.mkdir()
        made[name] = write_model("llama", directory, head_dim=64, num_attention_heads=2, num_hidden_layers=layers)
    return made


def source_of(directory: Path, opener: Callable[..., LLM] = open_llm, **options: Any) -> ModelSource:
    arguments = {"model": str(directory), "kv_bytes": 16 << 20, "threads": 1, **options}
    return ModelSource.of(open_path(directory), launch_of(OpenOptions(opener, arguments)), 16 << 20)


@contextlib.contextmanager
def serving_models(
    sources: list[ModelSource], settings: dict[str, Any] | None = None, **sharing: Any
) -> Generator[httpx.Client]:
    chosen = Settings(grace_s=0.5, **(settings or {}))
    server = http_server(create_models_app(sources, SharingSettings(**sharing), chosen), chosen, "127.0.0.1", 0)
    with client_of(server) as client:
        yield client


def complete(client: httpx.Client, model: str | None, tokens: int = 8, **more: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, **more}
    answer = client.post("/v1/completions", json=body if model is None else body | {"model": model})
    assert answer.status_code == 200, answer.text
    return answer.json()


def states(client: httpx.Client) -> dict[str, str]:
    return client.get("/health").json()["models"]


def test_each_answers_and_the_oldest_leaves(directories: dict[str, Path]) -> None:
    with serving_models([source_of(directories[name]) for name in "abc"], max_loaded=2) as client:
        eventually(lambda: states(client) == {"a": "loaded", "b": "unloaded", "c": "unloaded"})
        first = {name: complete(client, name)["choices"][0]["text"] for name in "ab"}
        assert first["a"] != first["b"]
        assert complete(client, None)["choices"][0]["text"] == first["a"]
        complete(client, "c")  # b was not used for longest
        assert states(client) == {"a": "loaded", "b": "unloaded", "c": "loaded"}
        assert complete(client, "b:latest")["choices"][0]["text"] == first["b"]
        assert states(client) == {"a": "unloaded", "b": "loaded", "c": "loaded"}
        assert complete(client, "a:repeat")["model"] == "a:repeat"
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a", "b", "c"]
        assert client.get("/v1/models/b:latest").json()["root"] == "b"
        unknown = client.post("/v1/completions", json={"model": "d", "prompt": "x"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert client.post("/api/chat", json={"model": "d", "messages": []}).json()["error"].startswith("there is no")
        assert client.get("/v1/models/d").status_code == 404
        assert client.get("/no/such/path").json()["error"]["code"] == "path_not_found"
        assert client.get("/v1/completions").status_code == 405


def test_a_conversation_is_found_after_a_reload(directories: dict[str, Path], tmp_path: Path) -> None:
    sources = [source_of(directories[name], open_slow, kv_disk=str(tmp_path)) for name in "ab"]
    with serving_models(sources, max_loaded=1) as client:
        cold = complete(client, "a")
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        complete(client, "b")
        assert states(client) == {"a": "unloaded", "b": "loaded"}
        again = complete(client, "a")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        assert again["choices"][0]["text"] == cold["choices"][0]["text"]


def test_a_stream_is_never_cut(directories: dict[str, Path]) -> None:
    with serving_models([source_of(directories[name]) for name in "ab"], max_loaded=1) as client:
        whole = complete(client, "a", 400)["choices"][0]["text"]
        found: list[str] = []
        other: list[dict[str, Any]] = []
        body = {"model": "a", "prompt": PROMPT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
        with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as stream:
            thread = None
            for line in stream.iter_lines():
                if line.startswith("data: {"):
                    found += [one["text"] for one in json.loads(line[6:])["choices"]]
                    if thread is None:
                        thread = threading.Thread(target=lambda: other.append(complete(client, "b")))
                        thread.start()
        assert thread is not None
        thread.join()
        assert "".join(found) == whole
        assert len(other) == 1
        assert states(client) == {"a": "unloaded", "b": "loaded"}


def test_a_model_that_fails_to_load(directories: dict[str, Path], tmp_path: Path) -> None:
    broken = source_of(directories["b"], model=str(tmp_path / "none"))
    with serving_models([source_of(directories["a"]), broken]) as client:
        for _ in range(2):
            answer = client.post("/v1/completions", json={"model": "b", "prompt": "x"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "model_not_loaded"
            assert "cannot be loaded" in answer.json()["error"]["message"]
        complete(client, "a")


def test_keep_alive(directories: dict[str, Path]) -> None:
    with serving_models([source_of(directories[name]) for name in "ab"], unload_after_s=-1) as client:
        empty: dict[str, Any] = {"model": "b", "messages": []}
        for path, known in (("/api/chat", "message"), ("/api/generate", "response")):  # one that is not loaded stays so
            left = client.post(path, json={"model": "b:latest", "keep_alive": 0}).json()
            assert (left["model"], left["done_reason"], known in left) == ("b:latest", "unload", True)
        assert states(client)["b"] == "unloaded"
        assert client.post("/api/chat", json=empty).json()["done_reason"] == "load"
        assert [one["name"] for one in client.get("/api/ps").json()["models"]] == ["a", "b"]
        assert client.post("/api/chat", json=empty | {"keep_alive": 0}).json()["done_reason"] == "unload"
        eventually(lambda: states(client)["b"] == "unloaded")
        assert [one["name"] for one in client.get("/api/ps").json()["models"]] == ["a"]
        assert client.post("/api/show", json={"model": "b"}).status_code == 200
        assert states(client)["b"] == "unloaded"
        assert [one["name"] for one in client.get("/api/tags").json()["models"]] == ["a", "b"]
        complete(client, "b")
        assert states(client)["b"] == "loaded"
        client.post("/api/chat", json=empty | {"keep_alive": "20ms"})
        eventually(lambda: states(client)["b"] == "unloaded")
        assert client.post("/api/chat", json=empty | {"keep_alive": 10**400}).json()["done_reason"] == "load"
        for wrong in ("soon", "", True, [1]):
            refused = client.post("/api/chat", json=empty | {"keep_alive": wrong})
            assert refused.status_code == 400
            assert "keep_alive" in refused.json()["error"]


def test_a_model_whose_engine_dies_is_loading(directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A call waits for it, and gets the answer of an undisturbed run."""
    with serving_models([source_of(directories["a"])]) as client, ThreadPoolExecutor(1) as threads:
        expected = complete(client, "a")["choices"][0]["text"]
        back, opens = threading.Event(), LinkOpener.open
        monkeypatch.setattr(LinkOpener, "open", lambda opener: (back.wait(), opens(opener))[1])
        try:
            for pid in tree(os.getpid()):
                if b"server.engine_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)  # a spare process too, if there is one
            eventually(lambda: states(client) == {"a": "loading"})
            waiting = threads.submit(complete, client, "a")
        finally:
            back.set()
        assert waiting.result()["choices"][0]["text"] == expected
        assert states(client) == {"a": "loaded"}


def test_watching_loads_nothing(directories: dict[str, Path]) -> None:
    """A watcher of a model that is not loaded gets its events once somebody has called it."""
    with serving_models([source_of(directories[name]) for name in "ab"]) as client:
        with pytest.raises(httpx.ReadTimeout), client.stream("GET", "/watch?model=b", timeout=1):
            pass
        assert states(client)["b"] == "unloaded"
        caller = threading.Timer(0.1, complete, (client, "b"))
        caller.start()
        with client.stream("GET", "/watch?model=b") as watching:
            assert next(watching.iter_lines()) == "event: hello"
        caller.join()
        client.post("/api/chat", json={"model": "b", "keep_alive": 0})
        eventually(lambda: states(client)["b"] == "unloaded")


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(0, 0), (30, 30), (1.5, 1.5), (-1, float("inf")), ("5m", 300), ("1h30m", 5400), ("-1", float("inf")), ("90", 90)],
)
def test_durations(value: Any, seconds: float) -> None:
    assert seconds_of(value) == seconds


TOOLS = [{"type": "function", "function": {"name": "look"}}]


@pytest.mark.parametrize("padding", [0, 20_000])  # a long body is not read where its name can be told without
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"model": "a", "tools": TOOLS}, "a"),
        ({"tools": TOOLS, "model": "a"}, "a"),
        ({"model": "a[1m]", "tools": TOOLS}, "a[1m]"),
        ({"model": None, "tools": TOOLS}, None),
        ({"metadata": {"model": "b"}, "tools": TOOLS}, None),
        ({"model": "a", "metadata": {"model": "b"}}, "a"),
        ({"model": "a", "response_format": json.loads("[" * 500 + "]" * 500)}, "a"),
        ({"tools": TOOLS}, None),
    ],
)
def test_the_name_is_that_which_the_routes_read(
    fields: dict[str, Any], name: str | None, encoding: str, padding: int
) -> None:
    for body in (fields | {"user": "x" * padding}, {"user": "x" * padding} | fields):
        scope = {"path": "/v1/chat/completions"}
        assert asyncio.run(AskedModel.of(scope, json.dumps(body).encode(encoding))) == AskedModel(name)


def test_long_bodies_and_metrics(directories: dict[str, Path]) -> None:
    with serving_models([source_of(directories[name]) for name in "ab"]) as client:
        for model in "ab":
            long = {"model": model, "prompt": "x", "max_tokens": 2, "metadata": {"note": "y" * 20_000}}
            assert client.post("/v1/completions", json=long).json()["model"] == model
        nested = {"metadata": {"model": "d", "note": "y" * 20_000}, "model": "b", "prompt": "x", "max_tokens": 2}
        assert client.post("/v1/completions", json=nested).json()["model"] == "b"
        text = client.get("/metrics").text
        assert 'twostroke_model_loaded{model="b"} 1.0' in text
        assert 'twostroke_finished_requests_total{model="b",outcome="done"} 2.0' in text
        assert text.count("# TYPE process_resident_memory_bytes ") == 1


def test_metrics_of_a_model_that_has_left(directories: dict[str, Path]) -> None:
    """Before anybody has read its numbers, and after."""
    with serving_models([source_of(directories[name]) for name in "ab"], max_loaded=1) as client:
        for model, other in ("ab", "ba"):
            complete(client, model)
            complete(client, other)
            assert states(client)[model] == "unloaded"
            answer = client.get("/metrics")
            assert answer.status_code == 200
            assert f'twostroke_model_loaded{{model="{model}"}} 0.0' in answer.text
            assert f'twostroke_kv_pages{{model="{other}",state="free"}}' in answer.text


def test_the_description_has_all_routes(directories: dict[str, Path]) -> None:
    with serving_models([source_of(directories["a"])]) as client:
        paths = client.get("/openapi.json").json()["paths"]
        assert {"/v1/chat/completions", "/v1/models", "/api/chat", "/metrics"} <= paths.keys()
        page = client.get("/docs").text
        assert "/v1/chat/completions" in page
        assert "<script" not in page


def test_keys_and_names(directories: dict[str, Path], tmp_path: Path) -> None:
    sources = [source_of(directories["a"]), source_of(directories["b"])]
    keys = tmp_path / "keys.toml"
    keys.write_text('[ann]\nkey = "secret-of-ann"\nmodels = ["a"]\n')
    keys.chmod(0o600)
    with serving_models(sources, {"api_key_file": str(keys)}) as client:
        client.headers["authorization"] = "Bearer secret-of-ann"
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["a"]
        assert client.post("/v1/completions", json={"model": "b", "prompt": "x"}).status_code == 403
        assert states(client)["b"] == "unloaded"
        complete(client, "a")
    with pytest.raises(InvalidRequest, match="two models"):
        create_models_app([sources[0], sources[0]])
