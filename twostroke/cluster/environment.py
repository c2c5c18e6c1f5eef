"""The environment variables of Dynamo's processes."""

from collections.abc import MutableMapping
from pathlib import Path

from twostroke.system.home import home

# What Dynamo's processes listen at, each by a variable of its own.
HOSTS = ("DYN_HTTP_HOST", "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST", "DYN_SYSTEM_HOST")


def set_environment(environment: MutableMapping[str, str], host: str, discovery: Path | None = None) -> None:
    """Set the variables by which a process of Dynamo listens at `host`, and finds others without a server.

    Those that are set already stay. `discovery` is the directory that processes are found by.
    """
    for name in HOSTS:
        environment.setdefault(name, host)
    environment.setdefault("DYN_DISCOVERY_BACKEND", "file")
    environment.setdefault("DYN_FILE_KV", str(discovery or home() / "cluster" / "discovery"))
    environment.setdefault("DYN_REQUEST_PLANE", "tcp")
    environment.setdefault("HF_HUB_OFFLINE", "1")
    # A front end reads cards from the file system; over HTTP, a worker would need a port for it.
    environment.setdefault("DYN_SELF_HOST_METADATA", "0")
