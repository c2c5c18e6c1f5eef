"""Names that somebody may have meant."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The hint "did you mean ...? " for an unknown name, or nothing if no known one is like it."""
    close = get_close_matches(name.lower(), list(known), n=3, cutoff=0.4)
    return f"did you mean {', '.join(close)}? " if close else ""
