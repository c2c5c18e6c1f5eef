"""Pages of prompts on their way into a server: written in order, and kept alive while they are used."""

import time
from collections.abc import Iterator, Sequence

from twostroke.kv.tiers.counters import TierCounters
from twostroke.kv.tiers.names import PageName
from twostroke.kv.tiers.remote.connection import Command, ErrorReply, RedisConnection, accepted
from twostroke.kv.tiers.remote.connection_pool import BATCH_KEYS
from twostroke.kv.tiers.remote.format import RemotePageFormat

BATCH_BYTES = 8 << 20  # under way at once


class PromptPages:
    """Writes pages of prompts. `ttl_s`: they are deleted this long after their last use."""

    def __init__(self, counters: TierCounters, ttl_s: float) -> None:
        self._counters, self._ttl_s = counters, ttl_s
        self._announced: dict[str, float] = {}  # when each namespace's model was last told

    def put(
        self,
        connection: RedisConnection,
        page_format: RemotePageFormat,
        names: Sequence[PageName],
        pages: Sequence[memoryview],
    ) -> int:
        """Write the pages that are missing, in order. Returns how many leading ones are there. Raises ErrorReply."""
        first = names[0]
        parents = [PageName(first.parent, b"", first.number - 1, b"")] if first.number else []
        there = self.stay(connection, page_format, [*parents, *names])
        if parents and not there.pop(0):
            return 0
        self.announce(connection, page_format)
        missing = [i for i, known in enumerate(there) if not known]
        for start, stop in batches(len(missing), page_format.namespace.page_bytes):
            began, some = time.perf_counter(), missing[start:stop]
            for i in some:  # one by one, since a value is a copy of its page
                connection.send([self._command(page_format, names[i], pages[i])])
            replies = [connection.reply() for _ in some]
            refused = [isinstance(reply, ErrorReply) for reply in replies]
            new = refused.index(True) if True in refused else len(some)
            written = sum(reply == b"OK" for reply in replies[:new])
            self._counters.moved(
                "out", written, written * page_format.namespace.page_bytes, time.perf_counter() - began
            )
            if new < len(some):
                orphans = [i for i, reply in zip(some[new:], replies[new:], strict=True) if reply == b"OK"]
                if orphans:  # a page is there only with its parent
                    connection.replies([("DEL", page_format.key(names[i])) for i in orphans])
                raise ErrorReply(str(replies[new]), some[new])
        return len(names)

    def _command(self, page_format: RemotePageFormat, name: PageName, page: memoryview) -> Command:
        return "SET", page_format.key(name), page_format.value(name, page), "NX", "PX", self._milliseconds(name)

    def _milliseconds(self, name: PageName) -> int:
        """How long a page stays after its last use."""
        return round(1e3 * max(self._ttl_s / 2, self._ttl_s - name.number))

    def stay(self, connection: RedisConnection, page_format: RemotePageFormat, names: Sequence[PageName]) -> list[bool]:
        """Let pages live on. Returns which of them are there. Raises ErrorReply."""
        commands = [("PEXPIRE", key, self._milliseconds(name)) for name in names for key in page_format.keys(name)]
        replies, each = accepted(connection.replies(commands)), 1 + len(page_format.others)
        return [1 in replies[i : i + each] for i in range(0, len(replies), each)]

    def announce(self, connection: RedisConnection, page_format: RemotePageFormat) -> None:
        """Name the model, for people, now and then."""
        now = time.monotonic()
        if now - self._announced.get(page_format.scope, float("-inf")) > self._ttl_s / 4:
            connection.replies(
                [("SET", page_format.about_key, page_format.about_value, "PX", round(1e3 * self._ttl_s))]
            )
            self._announced[page_format.scope] = now


def batches(count: int, page_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges of pages that are under way together."""
    most = max(1, min(BATCH_BYTES // page_bytes, BATCH_KEYS))
    return ((start, min(start + most, count)) for start in range(0, count, most))
