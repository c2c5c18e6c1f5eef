"""Files without a name, on Linux and where there is no memory for them."""

import mmap
import os

import pytest

from twostroke.system.anonymous_file import anonymous_file


@pytest.mark.parametrize("linux", [True, False])
def test_two_maps_of_a_file_see_each_other(linux: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not linux:
        monkeypatch.delattr(os, "memfd_create", raising=False)
    file = anonymous_file("a test")
    os.ftruncate(file, 64)
    mine, theirs = (mmap.mmap(file, 64) for _ in range(2))
    mine[7] = 5
    assert (theirs[7], theirs[8]) == (5, 0)
    os.close(file)
