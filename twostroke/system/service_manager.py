"""Telling the service manager (systemd's `Type=notify`) what state the process is in (sd_notify(3))."""

import os
import socket
from contextlib import suppress


def notify(state: str) -> bool:
    """Send a state, such as "READY=1" or "STOPPING=1", to the socket that $NOTIFY_SOCKET names.

    Returns whether it was sent: False where no service manager asked for it.
    """
    if not (address := os.environ.get("NOTIFY_SOCKET")):
        return False
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
        sender.connect("\0" + address[1:] if address.startswith("@") else address)
        sender.sendall(state.encode())
        return True
    return False
