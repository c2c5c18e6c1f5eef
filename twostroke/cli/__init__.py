"""The command line: one file per command, and what they share in `app`, `options` and `report`.

Nothing here imports numpy at the top of a file, so that `twostroke --help` stays quick.
"""

import sys
from io import TextIOWrapper


def main() -> None:
    """What the command `twostroke` runs."""
    from twostroke.cli.app import app

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks is replaced
    app()
