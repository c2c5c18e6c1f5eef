"""Models over tiers, which must not hang."""

import faulthandler
from collections.abc import Iterator

import pytest

from tests.engine.tiered import Opener


@pytest.fixture
def opener(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opener]:
    """Opens models over tiers. A test that hangs ends the run, and shows where every thread is."""
    faulthandler.dump_traceback_later(120, exit=True)
    opener = Opener(monkeypatch)
    yield opener
    opener.close()
    faulthandler.cancel_dump_traceback_later()
