"""Two versions of Twostroke beside each other: neither misreads the other, and every request is answered.

One side's version is raised by one: of the wire, of a takeover's pointer, of pages on disk and in Redis, and of files.
"""

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.wire.pairs import SECRET, SOON_S
from tests.kv.tiers.asking import find, read, write
from tests.kv.tiers.pages import prompt
from tests.kv.tiers.redis_server import BINARY, RedisServer
from twostroke.api.conversation import Conversation
from twostroke.api.conversation import file as conversation_file
from twostroke.api.llm import LLM
from twostroke.cluster import migration
from twostroke.cluster.dynamo_request import DynamoRequest
from twostroke.cluster.migration import MigrationState, PointerVersionMismatch, read_pointer
from twostroke.cluster.roles import HANDLE, READY, DecodeRole
from twostroke.cluster.wire import secret
from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.handle import ValueHandle
from twostroke.errors import CorruptFile, InvalidRequest, KVError
from twostroke.kv import stream
from twostroke.kv.cache import KVCache
from twostroke.kv.tiers import page_format
from twostroke.kv.tiers.disk import DiskStore, directory
from twostroke.kv.tiers.remote import RedisStore
from twostroke.kv.tiers.remote import format as remote_format
from twostroke.methods import Plain
from twostroke.sampling.params import SamplingParams

PROMPT = list(range(5, 65))
PREFILLS = """
import sys
from tests.cluster.wire.prefilling import main
from twostroke.cluster.wire import secret
secret.VERSION += {}
main(*sys.argv[1:])
"""


@contextmanager
def prefill_process(model: Path, raised: int) -> Generator[dict[str, Any]]:
    """The handle of a value that a process has computed, whose version of the wire is higher by `raised`."""
    command = [sys.executable, "-c", PREFILLS.format(raised), str(model), "tcp", json.dumps(PROMPT)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            handle, done = json.loads(process.stdout.readline()), False
            while not done:
                process.stdin.write("\n")
                process.stdin.flush()
                done = json.loads(process.stdout.readline())["done"]
            yield handle
        finally:
            process.kill()


@pytest.mark.parametrize(("theirs", "own"), [(0, 0), (1, 0), (0, 1)])
def test_the_wire(
    theirs: int,
    own: int,
    tiny_llm: Callable[..., LLM],
    tiny_directory: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A value of another version is refused by its handle, and by the connection; the prompt is computed then."""
    llm = tiny_llm("qwen3", weights="bf16", kv_bytes=4 << 20, prefix_index="off")
    asked = DynamoRequest(PROMPT, [], SamplingParams(max_tokens=12, temperature=1.0, seed=3), Plain())
    alone = asked.request(llm)
    llm.engine.run([alone])
    monkeypatch.setenv(secret.VARIABLE, SECRET)
    now = secret.VERSION
    monkeypatch.setattr(secret, "VERSION", now + own)
    with prefill_process(tiny_directory("qwen3"), theirs) as handle, closing(DecodeRole(llm)) as role:
        if theirs != own:
            unversioned = ValueHandle(**{name: value for name, value in handle.items() if name != "version"})
            with pytest.raises(WireError, match="has another version than this one"):
                role.receiver.receive(unversioned).result(SOON_S)
        with caplog.at_level(logging.INFO):
            request = role.request(asked, {HANDLE: handle, READY: 0.0})
            llm.engine.run([request])
    assert list(request.events) == list(alone.events)
    logged = [record.message for record in caplog.records if "value" in record.message]
    refused = (
        f"a value did not come: the value's handle has version {now + theirs} of the wire, and this side {now + own}"
    )
    assert len(logged) == 1
    assert logged[0] == refused if theirs != own else logged[0].startswith("a value of 60 entries came")


def test_a_handle_without_a_version_is_of_the_first_one() -> None:
    handle = ValueHandle("localhost", 5, "a", "b")
    stated = handle.to_json()
    assert stated.pop("version") == secret.VERSION
    with pytest.raises(WireError, match=f"has version 3 of the wire, and this side {secret.VERSION}"):
        ValueHandle.from_json(stated)


def test_a_takeovers_pointer(monkeypatch: pytest.MonkeyPatch) -> None:
    state = MigrationState(len(PROMPT), 10, 2, "89abcdef")
    own = state.pointer(PROMPT)
    monkeypatch.setattr(migration, "VERSION", 2)
    later = state.pointer(PROMPT)
    assert read_pointer([*PROMPT, 9], later) == state
    with pytest.raises(PointerVersionMismatch, match=r"has version 1, and this worker 2$"):
        read_pointer([*PROMPT, 9], own)
    monkeypatch.undo()
    assert own["span_id"] == f"89abcdef{len(PROMPT):08x}", "that of workers that knew no versions"
    assert read_pointer([*PROMPT, 9], own) == state
    with pytest.raises(PointerVersionMismatch, match=r"has version 2, and this worker 1$"):
        read_pointer([*PROMPT, 9], later)
    with pytest.raises(InvalidRequest):  # of another prompt: it may be anybody's
        read_pointer([9, *PROMPT], later)


@contextmanager
def raised_pages(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    with monkeypatch.context() as patched:
        patched.setattr(page_format, "VERSION", 2)
        patched.setattr(remote_format, "PREFIX", "twostroke:2:")
        yield


@pytest.mark.parametrize("tier", ["disk", "remote"])
def test_pages(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Two versions share a store: neither finds the other's pages, nor deletes them."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    one = prompt(3)
    with ExitStack() as stack:
        if tier == "disk":
            open_one = lambda: DiskStore.open(tmp_path / "disk", 100 << 20)  # noqa: E731
        else:
            if BINARY is None:
                pytest.skip("no redis-server: apt-get install redis-server")
            url = stack.enter_context(RedisServer(tmp_path)).url
            open_one = lambda: RedisStore.open(url)  # noqa: E731
        stores: list[Any] = [stack.enter_context(closing(open_one())) for _ in range(2)]
        assert write(stores[0], one) == 3
        with raised_pages(monkeypatch):
            assert find(stores[1], one) == read(stores[1], one) == 0
            assert write(stores[1], one[:2]) == 2
            assert find(stores[1], one) == read(stores[1], one) == 2
        assert find(stores[0], one) == read(stores[0], one) == 3
        assert [store.counters.read().reasons for store in stores] == [{}, {}]
    assert caplog.records == []


def test_a_page_of_another_version_in_the_place_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    one = prompt(1)
    opened: list[Any] = [DiskStore.open(tmp_path / "disk", 100 << 20) for _ in range(2)]
    with closing(opened[0]) as store, closing(opened[1]) as later:
        assert write(store, one) == 1
        with raised_pages(monkeypatch):
            assert write(later, one) == 1
        paths = [two._directory.path(two._page_format(one.namespace), one.names[0].key) for two in (later, store)]
        shutil.copyfile(*paths)
        assert read(store, one) == 0
        assert store.counters.read().reasons == {"corrupt": 1}
    assert len(caplog.records) == 1


def test_a_directory_of_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    with monkeypatch.context() as patched:
        patched.setattr(directory, "FORMAT", f"twostroke pages {directory.VERSION + 1}\n")
        DiskStore.open(tmp_path / "disk", 100 << 20).close()
    with pytest.raises(KVError, match="written by another version of Twostroke: delete it, or choose another"):
        DiskStore.open(tmp_path / "disk", 100 << 20)


def test_files(tmp_path: Path, tiny_llm: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """A value and a conversation that a later version has saved are refused in one line, which says so."""
    llm = tiny_llm("qwen3")
    value, chat = llm.prefill(PROMPT), Conversation(llm)
    with monkeypatch.context() as patched:
        patched.setattr(stream, "MAGIC", b"twostroke-kv-5\n\0")
        value.save(tmp_path / "value")
        patched.setattr(conversation_file, "MAGIC", b"twostroke-conversation-3\n")
        chat.save(tmp_path / "chat")
    with pytest.raises(CorruptFile, match="value: this KV cache was saved by a later version of Twostroke: load it"):
        KVCache.load(tmp_path / "value", llm)
    with pytest.raises(CorruptFile, match="chat: this conversation was saved by a later version of Twostroke: load it"):
        Conversation.load(tmp_path / "chat", llm)
    value.save(tmp_path / "value")
    assert KVCache.load(tmp_path / "value", llm).entries().tobytes() == value.entries().tobytes()
