"""Packages of extras: what needs one that is missing says so in one line, with the command that installs it."""

import json
import shlex
import sys
from collections.abc import Generator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from twostroke.errors import InvalidRequest


@contextmanager
def requires_extra(name: str, what: str) -> Generator[None]:
    """Around imports that need an extra of pyproject.toml.

    Raises InvalidRequest that names the extra and what needs it, if a package is missing. `what` starts the sentence.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "twostroke":  # a mistake of ours
            raise
        raise InvalidRequest(f"{what} needs {package}: {install_command(name)}") from None


def install_command(name: str) -> str:
    """The command that installs an extra for this interpreter, from where Twostroke came: a checkout or an index."""
    root = Path(__file__).parents[2]
    if (root / "setup.py").is_file():  # this is a checkout
        source = ["-e", f"{root}[{name}]"]
    else:
        with suppress(PackageNotFoundError):  # a directory that it was installed from (PEP 610)
            origin = json.loads(distribution("twostroke").read_text("direct_url.json") or "{}")
            if "dir_info" in origin:
                root = Path(unquote(urlsplit(origin["url"]).path))
        source = [f"{root}[{name}]" if (root / "setup.py").is_file() else f"twostroke[{name}]"]
    return shlex.join([sys.executable, "-m", "pip", "install", *source])
