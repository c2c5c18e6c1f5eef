"""A benchmark that lacks an extra says so before it measures anything."""

from collections.abc import Generator
from contextlib import contextmanager

from twostroke.errors import InvalidRequest
from twostroke.system.extras import requires_extra


@contextmanager
def needs(name: str) -> Generator[None]:
    """Around imports of an extra's packages: exits with one line if one is missing."""
    try:
        with requires_extra(name, "this benchmark"):
            yield
    except InvalidRequest as error:
        raise SystemExit(f"error: {error}") from None
