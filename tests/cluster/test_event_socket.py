"""What Dynamo's publisher reads at a feed is what was told, in its order, whenever it begins to listen."""

import pytest

from twostroke.cluster.index_events import DISK, POOL

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
