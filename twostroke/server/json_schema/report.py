"""What becomes of a keyword that cannot be guaranteed."""

from twostroke.errors import InvalidRequest

MOST_WARNINGS = 20


class Report:
    """Raises for a strict schema; collects warnings for any other, whose keyword is then skipped."""

    def __init__(self, strict: bool) -> None:
        self.strict = strict
        self.warnings: list[str] = []

    def skip(self, path: str, keyword: str, why: str) -> None:
        """Skip a keyword.

        Args:
            path: JSON pointer of the schema that has the keyword.
            keyword: its name.
            why: what is wrong with it.

        Raises:
            InvalidRequest: the schema is strict.
        """
        where = f"{keyword!r:.60} at #{path[-200:]}/{keyword[:60]}"
        if self.strict:
            raise InvalidRequest(f"{where}: {why}: leave it out, or set strict to false")
        self.warn(f"{where} is skipped: {why}")

    def warn(self, text: str) -> None:
        """Add a warning once."""
        if text not in self.warnings and len(self.warnings) < MOST_WARNINGS:
            self.warnings.append(text)


class TooLarge(InvalidRequest):
    """A schema with too many parts."""


def pointer(path: str, *steps: str | int) -> str:
    """A JSON pointer (RFC 6901) continued."""
    return "/".join([path, *(str(step).replace("~", "~0").replace("/", "~1") for step in steps)])
