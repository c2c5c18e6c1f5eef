"""What needs a package of an extra says so in one line."""

from collections.abc import Generator
from contextlib import contextmanager

from twostroke.errors import InvalidRequest


@contextmanager
def extra(name: str, what: str) -> Generator[None]:
    """Around imports that need an extra of pyproject.toml.

    Raises InvalidRequest that names the extra and what needs it, if a package is missing. `what` starts the sentence.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "twostroke":  # a mistake of ours
            raise
        raise InvalidRequest(f"{what} needs {package}: pip install 'twostroke[{name}]'") from None
