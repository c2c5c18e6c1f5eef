"""Which transport moves the pages of a pool."""

import logging
from typing import Literal

from twostroke.kv.pool import PagePool
from twostroke.wire.channel import WireError
from twostroke.wire.tcp import Tcp
from twostroke.wire.transport import Transport

log = logging.getLogger(__name__)

Choice = Literal["auto", "nixl", "tcp"]


def open_transport(choice: Choice, pool: PagePool) -> Transport:
    """The transport of a pool: NIXL where it is installed, else TCP, which it says once in the log.

    Raises WireError: NIXL was asked for, and cannot be used.
    """
    if choice == "nixl":
        raise WireError("NIXL cannot be used yet")
    if choice == "auto":
        log.warning("pages go over plain TCP")
    return Tcp()
