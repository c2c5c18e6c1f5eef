"""A file without a name, to be shared with other processes by its descriptor."""

import os
from tempfile import TemporaryFile


def anonymous_file(name: str) -> int:
    """The descriptor of an empty one: in memory on Linux, whose lists of open files show `name`; else on disk."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with TemporaryFile() as file:
        return os.dup(file.fileno())
