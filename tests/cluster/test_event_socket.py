"""What Dynamo's publisher reads at the socket is what was told, in its order, whenever it begins to listen."""

import os
import tempfile
from contextlib import closing
from pathlib import Path

import pytest

from twostroke.cluster.router_events import DISK, POOL

zmq = pytest.importorskip("zmq", reason="needs pyzmq, as telling a router does: make test-cluster")
msgspec = pytest.importorskip("msgspec", reason="needs msgspec, as telling a router does: make test-cluster")


def test_events_arrive_in_order() -> None:
    from twostroke.cluster.event_socket import MAX_EVENTS, EventSocket

    first, second = b"\x01" + bytes(7), b"\xff" * 8
    feed, context = EventSocket(), zmq.Context()
    socket = context.socket(zmq.SUB)
    try:
        feed.stored(POOL, [1, 2, 3, 4], [first, second], None)  # before anybody listens
        socket.connect(feed.endpoint)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        for _ in range(MAX_EVENTS):
            feed.stored(DISK, [5, 6], [second], first)
        feed.removed(DISK, [first])
        events: list[dict[str, object]] = []
        while len(events) < MAX_EVENTS + 2:
            assert socket.poll(10_000)
            topic, number, batch = socket.recv_multipart()
            assert (topic, len(number)) == (b"", 8)
            events += msgspec.msgpack.decode(batch)[1]
    finally:
        socket.close(0)
        feed.close()
        context.term()
    whole = {"type": "BlockStored", "block_size": 2, "lora_id": None}
    numbers = [1, (1 << 64) - 1]
    pool = {"block_hashes": numbers, "parent_block_hash": None, "token_ids": [1, 2, 3, 4], "medium": "GPU"}
    disk = {"block_hashes": numbers[1:], "parent_block_hash": 1, "token_ids": [5, 6], "medium": "DISK"}
    assert events[0] == whole | pool
    assert events[1:-1] == [whole | disk] * MAX_EVENTS
    assert events[-1] == {"type": "BlockRemoved", "block_hashes": [1], "medium": "DISK"}


def test_a_feed_that_nobody_reads_ends() -> None:
    from twostroke.cluster.event_socket import EventSocket

    feed = EventSocket()
    feed.removed(POOL, [bytes(8)])
    feed.close()


def test_folders_of_processes_that_have_died_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from twostroke.cluster.event_socket import EventSocket

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead, other = tmp_path / "twostroke-events-dead", tmp_path / "another-program"
    for folder in (dead, other):
        folder.mkdir()
        (folder / "events").touch()
        os.utime(folder, (0, 0))
    living = EventSocket()
    os.utime(living.endpoint.removeprefix("ipc://").removesuffix("/events"), (0, 0))
    with closing(living), closing(EventSocket()):
        assert not dead.exists()
        assert other.exists()
        assert len(list(tmp_path.glob("twostroke-events-*"))) == 2
    assert not list(tmp_path.glob("twostroke-events-*"))


def test_events_that_nobody_takes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are dropped together, and routers forget what they knew, as parents may be among them."""
    from twostroke.cluster.event_socket import EventSocket

    monkeypatch.setattr("twostroke.cluster.event_socket.MAX_WAITING", 10)
    with closing(EventSocket()) as events:
        for number in range(25):
            events.removed("GPU", [number.to_bytes(8, "little")])
        reader = zmq.Context.instance().socket(zmq.SUB)
        reader.connect(events.endpoint)
        reader.setsockopt(zmq.SUBSCRIBE, b"")
        found: list[str] = []
        while len(found) < 7:
            assert reader.poll(10_000)
            _, _, batch = reader.recv_multipart()
            found += [event["type"] for event in msgspec.msgpack.decode(batch)[1]]
        reader.close()
    assert found == ["AllBlocksCleared", *["BlockRemoved"] * 6]
