"""A tier in a server that speaks Redis' protocol, shared by processes and machines of one user.

The server may be down, slow, full, or answer wrongly. Then pages are misses, and an open circuit spares the wait.
"""

from twostroke.kv.tiers.remote.maintenance import clear, inspect, verify
from twostroke.kv.tiers.remote.store import RedisStore

__all__ = ["RedisStore", "clear", "inspect", "verify"]
