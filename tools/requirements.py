"""Prints what the package needs, one requirement a line: python tools/requirements.py [EXTRA ...]."""

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def of_extras(extras: Iterable[str]) -> list[str]:
    """What these extras need beside the dependencies, also through other extras."""
    found: list[str] = []
    for requirement in (one for extra in extras for one in PROJECT["optional-dependencies"][extra]):
        name, _, inner = requirement.partition("[")
        found += of_extras(inner.rstrip("]").split(",")) if name == PROJECT["name"] else [requirement]
    return found


if __name__ == "__main__":
    print(*PROJECT["dependencies"], *of_extras(sys.argv[1:]), sep="\n")
