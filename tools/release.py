"""Checks that a tag may be released, and prints its notes: python tools/release.py v0.2.0.

The tag is `v` and the version of pyproject.toml, and the changelog has a section of this version with a date.
"""

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def notes(tag: str, version: str, changelog: str) -> str:
    """The changelog's section of a version. Exits if the tag is another version's, or the section is missing."""
    if tag != f"v{version}":
        sys.exit(f"error: the tag {tag} is not v{version}, the version in pyproject.toml")
    if re.search(r"dev|a|b|rc", version):
        sys.exit(f"error: {version} is not a final version: set it in pyproject.toml")
    found = re.search(rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d\n(.*?)(?=^## \[|\Z)", changelog, re.M | re.S)
    if found is None:
        sys.exit(f"error: CHANGELOG.md has no section '## [{version}] - DATE': rename [Unreleased]")
    return found[1].strip()


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    print(notes(sys.argv[1], project["version"], (ROOT / "CHANGELOG.md").read_text()))
