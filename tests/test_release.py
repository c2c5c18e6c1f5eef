"""The tools of a release and of the line budget."""

from collections import Counter

import pytest

from tools import release, sizes

CHANGELOG = """# Changelog

## [Unreleased]

## [0.2.0] - 2026-12-01

### Added
- One thing.

## [0.1.0] - 2026-11-25

- The first.
"""


def test_the_notes_of_a_version() -> None:
    assert release.notes("v0.2.0", "0.2.0", CHANGELOG) == "### Added\n- One thing."
    assert release.notes("v0.1.0", "0.1.0", CHANGELOG) == "- The first."


@pytest.mark.parametrize(
    ("tag", "version", "message"),
    [
        ("v0.2.1", "0.2.0", "is not v0.2.0"),
        ("v0.2.0.dev0", "0.2.0.dev0", "is not a final version"),
        ("v0.3.0", "0.3.0", "has no section"),
    ],
)
def test_what_is_not_released(tag: str, version: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        release.notes(tag, version, CHANGELOG)


def test_lines_by_room() -> None:
    assert sizes.room("twostroke/kv/tiers/disk/files.py") == "kv/tiers"
    assert sizes.room("twostroke/engine/lane.py") == "engine"
    assert sizes.room("twostroke/fields.py") == "."
    now = Counter({"engine": sizes.BUDGET, "kv": 5})
    lines = sizes.table(now, Counter({"engine": sizes.BUDGET, "gone": 3}))
    assert [line.split() for line in lines[:-1]] == [
        ["engine", "50,000"], ["kv", "5", "+5"], ["gone", "0", "-3"], ["twostroke", "50,005", "+2"],
    ]  # fmt: skip
    assert lines[-1] == "5 lines OVER the budget of 50,000"
