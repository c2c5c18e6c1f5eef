"""A rank other than 0 in tests, which may be in Triton's interpreter."""

import tests.triton.interpreter  # noqa: F401
from twostroke.backends.triton.follower import main

__all__ = ["main"]
