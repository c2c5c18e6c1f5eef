"""The secret that both sides of a transfer must know.

By default it is made from the user's key (`system.key`), so processes of one user on one machine need no configuration.
Several machines share the key's file, or get a secret of their own. Who knows it is trusted completely: such a process
may read every value that is offered, and what it sends is believed to be canonical for the model that it names.
"""

import hashlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from twostroke.errors import KVError
from twostroke.system.user_key import user_keys

VARIABLE = "TWOSTROKE_WIRE_SECRET"
MIN_CHARACTERS = 16  # characters: whoever sees a handshake can try guesses
NONCE_BYTES = 32
MAC_BYTES = 32
VERSION = 5  # of all that goes over the wire, and of handles: both sides must have the same
MAGIC = b"2SWIRE%d\n"

Secrets = list[bytes]
Clock = Callable[[], float]  # seconds; never goes backwards


def shared_secrets(given: str | None = None) -> Secrets:
    """The secrets, of which the first proves this side, and any may prove the other.

    They are those given, else those of the environment (`TWOSTROKE_WIRE_SECRET`), each separated by commas, else made
    from the user's keys. Raises KVError: one is too short, or there is no key that can be used.
    """
    given = given if given is not None else os.environ.get(VARIABLE)
    if given is None:
        if not (keys := user_keys(make=True)):
            raise KVError(f"the wire needs a secret, and this user's key cannot be used: set {VARIABLE}")
        return [_derived(key, b"user's key") for key in keys]
    words = [word.strip() for word in given.split(",")]
    if min(map(len, words)) < MIN_CHARACTERS:
        raise KVError(f"the wire's secret is too short: give at least {MIN_CHARACTERS} random characters")
    return [_derived(hashlib.blake2b(word.encode()).digest(), b"given") for word in words]


@dataclass(frozen=True)
class ChannelKeys:
    """The keys of one connection: for messages from this side, and to it."""

    outwards: bytes
    inwards: bytes


def connect(connection: socket.socket, known: Secrets, limit_s: float, now: Clock) -> ChannelKeys:
    """Prove to the other side that this one knows its secret, and let it prove the same.

    Raises KVError: the other side knows none of ours. OSError: the connection fails.
    """
    mine, until = secrets.token_bytes(NONCE_BYTES), now() + limit_s
    connection.sendall(MAGIC % VERSION + mine)
    theirs, proof = _greeting(connection, until, now), _exactly(connection, MAC_BYTES, until, now)
    proven = (one for one in known if hmac.compare_digest(proof, _derived(one, b"accepts" + mine + theirs)))
    if (secret := next(proven, None)) is None:
        raise KVError("the other side of the wire has another secret: give both the same")
    connection.sendall(_derived(secret, b"connects" + mine + theirs))
    return _keys(secret, mine + theirs, connects=True)


def accept(connection: socket.socket, known: Secrets, limit_s: float, now: Clock) -> ChannelKeys:
    """The other side of `connect`. Raises the same errors."""
    secret, mine, until = known[0], secrets.token_bytes(NONCE_BYTES), now() + limit_s
    try:
        theirs = _greeting(connection, until, now)
    except KVError:
        connection.sendall(MAGIC % VERSION + mine)  # so that the other side can say the same
        raise
    connection.sendall(MAGIC % VERSION + mine + _derived(secret, b"accepts" + theirs + mine))
    if not hmac.compare_digest(
        _exactly(connection, MAC_BYTES, until, now), _derived(secret, b"connects" + theirs + mine)
    ):
        raise KVError("the other side of the wire has another secret: give both the same")
    return _keys(secret, theirs + mine, connects=False)


def _greeting(connection: socket.socket, until: float, now: Clock) -> bytes:
    own = MAGIC % VERSION
    magic, nonce = (_exactly(connection, count, until, now) for count in (len(own), NONCE_BYTES))
    if magic != own:
        raise KVError(f"the other side of the wire has another version than this one ({VERSION}), or is no Twostroke")
    return nonce


def _exactly(connection: socket.socket, count: int, until: float, now: Clock) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(max(0.001, until - now()))
        if not (more := connection.recv(count - len(data))):
            raise ConnectionError("the other side of the wire has closed the connection: its secret may be another")
        data += more
    return bytes(data)


def _keys(secret: bytes, nonces: bytes, connects: bool) -> ChannelKeys:
    there, back = _derived(secret, b"there" + nonces), _derived(secret, b"back" + nonces)
    return ChannelKeys(there, back) if connects else ChannelKeys(back, there)


def _derived(secret: bytes, what: bytes) -> bytes:
    return hashlib.blake2b(what, key=secret[:64], digest_size=MAC_BYTES, person=b"twostroke-wire").digest()
