"""Which transport moves the pages of a pool."""

import logging
from typing import Literal

from twostroke.cluster.wire import nixl
from twostroke.cluster.wire.channel import WireError
from twostroke.cluster.wire.transport import Tcp, Transport
from twostroke.kv.pool import PagePool

log = logging.getLogger(__name__)

Choice = Literal["auto", "nixl", "tcp"]


def open_transport(choice: Choice, pool: PagePool) -> Transport:
    """The transport of a pool: NIXL where it is installed, else TCP, which it says once in the log.

    Args:
        choice: "auto", "nixl" or "tcp".
        pool: whose pages move.

    Raises WireError: NIXL was asked for, and cannot be used.
    """
    if choice == "tcp":
        return Tcp()
    if (reason := nixl.unavailable(pool)) is None:
        return nixl.Nixl(pool)
    if choice == "nixl":
        raise WireError(f"NIXL cannot be used: {reason}")
    log.warning("pages go over plain TCP: %s", reason)
    return Tcp()
