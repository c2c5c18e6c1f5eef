"""The directory of this user's data: fetched models, and the key that seals saved values."""

import os
from pathlib import Path


def home() -> Path:
    """$TWOSTROKE_HOME, else $XDG_CACHE_HOME/twostroke, else ~/.cache/twostroke."""
    if own := os.environ.get("TWOSTROKE_HOME"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "twostroke"
