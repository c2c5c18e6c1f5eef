"""A tier in a server that speaks Redis' protocol, shared by processes and machines of one user.

The server may be down, slow, full, or answer wrongly. Then pages are misses, and an open circuit spares the wait.
"""

from twostroke.errors import InvalidRequest, KVError
from twostroke.system.extras import requires_extra

try:
    with requires_extra("redis", "a remote tier"):
        from twostroke.kv.tiers.remote.maintenance import clear, inspect, verify
        from twostroke.kv.tiers.remote.store import RedisStore
except InvalidRequest as error:
    raise KVError(str(error)) from None

__all__ = ["RedisStore", "clear", "inspect", "verify"]
