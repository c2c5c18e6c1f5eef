"""A disk that is full soon: no file may grow beyond some bytes."""

import resource
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def short_files(most: int) -> Generator[None]:
    """Until the end of the block writing more to a file of this process is an error of the system."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
