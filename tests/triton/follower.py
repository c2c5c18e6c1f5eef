"""A rank other than 0 in tests, which may be in Triton's interpreter."""

from tests.triton import interpreter
from twostroke.backends.torch_follower import main

__all__ = ["interpreter", "main"]
