"""A server by its URL: its connections, and whether it may be asked now."""

import logging
import os
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from redis.backoff import NoBackoff
from redis.connection import Connection, UnixDomainSocketConnection, parse_url
from redis.retry import Retry

from twostroke.errors import KVError
from twostroke.kv.tiers.remote.circuit_breaker import CircuitBreaker
from twostroke.kv.tiers.remote.connection import (
    STALL_S,
    CallTimedOut,
    RedisConnection,
    ServerUnavailable,
    with_deadline,
)
from twostroke.system.interrupts import DeferredInterrupts, Monitor

log = logging.getLogger(__name__)

CONNECT_S = 0.2
CALL_S = 0.5  # a call without pages may take this long
BATCH_KEYS = 1024  # of one call
CLOSE_S = 10.0  # seconds that closing waits for calls that are under way
MAX_CONNECTIONS = 8
FORM = "redis://[[user]:password@]host[:port][/database] (rediss:// with TLS; special characters percent-encoded)"


class CircuitOpen(Exception):
    """The server is not asked: it failed before."""


UNAVAILABLE = (CircuitOpen, ServerUnavailable, CallTimedOut)  # what a call may raise besides refusals


class ConnectionPool:
    """A bounded pool of connections to one server, behind a circuit."""

    def __init__(self, url: str, most: int = MAX_CONNECTIONS) -> None:
        """Checks the URL's form and connects to nothing. Raises KVError."""
        # where: the URL without user, password and options
        self.where, self._class, self._options = _parse(url)
        # circuit: of connecting and asking; writing: of writing alone, which a full server refuses
        self.circuit, self.writing = CircuitBreaker(), CircuitBreaker()
        self.idle: list[RedisConnection] = []
        self._changed = Monitor()
        self._most, self.in_use, self._pid, self._closed = most, 0, os.getpid(), False
        self._warned = False

    @contextmanager
    def connection(self, limit_s: float) -> Generator[RedisConnection]:
        """A connection for one call of at most `limit_s` seconds. What is unread at the end closes it.

        Ctrl-C waits for its end, since its place has to be given back. Raises one of `UNAVAILABLE`.
        """
        with DeferredInterrupts(), self._connection(limit_s) as connection:
            yield connection

    @contextmanager
    def _connection(self, limit_s: float) -> Generator[RedisConnection]:
        ticket = self.circuit.acquire()
        if ticket is None:
            raise CircuitOpen
        deadline = time.monotonic() + limit_s
        connection: RedisConnection | None = None
        taken = good = False
        try:
            taken = self._take(deadline)
            connection = self._open_connection(deadline)
            yield connection
            good = True
        except ServerUnavailable as error:
            self._tell(self.circuit.failed(ticket), error)
            raise
        except CallTimedOut as late:
            if late.heard:
                self._answered(ticket)
            raise
        finally:
            if good:
                self._answered(ticket)
            else:
                self.circuit.abandon(ticket)  # does nothing if it has been decided
            if taken:
                self._give_back(connection, good)

    def close(self) -> None:
        """Close all connections, those in use when their calls end."""
        with DeferredInterrupts(), self._changed.lock:
            self._closed = True
            self._changed.notify_all()
        self._changed.wait_for(lambda: not self.in_use, CLOSE_S)
        with DeferredInterrupts(), self._changed.lock:
            idle, self.idle = self.idle, []
        for connection in idle:
            connection.close()

    def describe(self, error: Exception) -> str:
        """The text of an error, without the password: servers repeat what they did not understand."""
        text = str(error)
        for secret in ("password", "username"):
            if self._options.get(secret):
                text = text.replace(str(self._options[secret]), "***")
        return text

    def _take(self, deadline: float) -> bool:
        """Wait for one of the places."""

        def take() -> bool:
            if self._pid != os.getpid():  # a forked process must not use the connections of its parent
                self.idle, self.in_use, self._pid = [], 0, os.getpid()
            if self._closed:
                raise CircuitOpen
            if self.in_use >= self._most:
                return False
            self.in_use += 1
            return True

        if not self._changed.wait_for(take, max(0.0, deadline - time.monotonic())):
            raise CallTimedOut
        return True

    def _open_connection(self, deadline: float) -> RedisConnection:
        """A connection that was used before, or a new one."""
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise CallTimedOut
            with self._changed.lock:
                connection = self.idle.pop() if self.idle else None
            if connection is None:
                options = self._options | {"socket_connect_timeout": min(CONNECT_S, left)}
                connection = RedisConnection(self._class(**options), deadline)
            elif not connection.idle:
                connection.close()
                continue
            connection.begin(deadline)
            return connection

    def _give_back(self, connection: RedisConnection | None, good: bool) -> None:
        with self._changed.lock:
            self.in_use -= 1
            keep = (
                connection is not None and good and connection.trusted and not connection.waiting and not self._closed
            )
            if connection is not None and keep:
                self.idle.append(connection)
            self._changed.notify_all()
        if connection is not None and not keep:
            connection.close()

    def _answered(self, ticket: int) -> None:
        if self.circuit.succeeded(ticket) and self._warned:
            self._warned = False
            log.info("%s answers again", self.where)

    def _tell(self, wait: float | None, error: Exception) -> None:
        if wait is not None:
            level = logging.DEBUG if self._warned else logging.WARNING
            text = "%s does not answer (%s): it is left alone for %.0f s, and again while that lasts"
            log.log(level, text, self.where, self.describe(error), wait)
            self._warned = True


def _parse(url: str) -> tuple[str, Any, dict[str, Any]]:
    """(URL to show, class of connections, their options). No message shows a part of a URL: it may be the password."""
    wrong = KVError(f"this is not the URL of a remote tier; its form is {FORM}")
    try:
        options: dict[str, Any] = parse_url(url)
        str(options.get("host", "")).encode("idna")
    except (ValueError, TypeError, AttributeError):
        raise wrong from None
    kind = options.pop("connection_class", Connection)
    path = url.partition("://")[2].partition("?")[0].partition("/")[2]
    if kind is UnixDomainSocketConnection:
        if not options.get("path", "").strip("/"):
            raise wrong
        where = f"unix://{options['path']}"
    else:
        host = str(options.get("host", ""))
        if not host or (path and not path.isdigit()):
            raise wrong
        scheme = url.partition("://")[0]
        shown = f"[{host}]" if ":" in host else host
        where = f"{scheme}://{shown}:{options.get('port', 6379)}/{options.get('db', 0)}"
    ours: dict[str, Any] = {
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
        "socket_timeout": STALL_S,
        "decode_responses": False,
    }
    try:
        kind(**options | ours)
    except Exception:
        raise KVError(f"an option in the URL of the remote tier {where} is unknown or wrong") from None
    return where, with_deadline(kind), options | ours
