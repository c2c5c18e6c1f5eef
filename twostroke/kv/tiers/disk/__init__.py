"""A tier in a directory, shared by the processes of one user, which keeps what it has when they end or are killed."""

from twostroke.kv.tiers.disk.maintenance import clear, inspect, verify
from twostroke.kv.tiers.disk.store import DiskStore

__all__ = ["DiskStore", "clear", "inspect", "verify"]
