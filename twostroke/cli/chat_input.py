"""What a user types in a chat: lines, several lines at once, a text from an editor, and the history of all chats."""

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from twostroke.cli.report import note
from twostroke.errors import InvalidRequest
from twostroke.system.home import home

MARK = '"""'  # begins and ends several lines
HISTORY = 1000  # questions that are kept


class ChatInput:
    """Iterating yields what the user says, without white space around it, until the input ends.

    On a terminal a text that is pasted is one question, whatever lines it has, and arrow keys find the questions of
    earlier chats, which are kept in `home()/chat-history`.
    """

    def __init__(self, interactive: bool, prompt: str = "> ") -> None:
        """`prompt` is written to stdout where a person types."""
        self.interactive, self._prompt = interactive, prompt
        self._readline: Any = None

    def __iter__(self) -> Iterator[str]:
        if self.interactive:
            self._begin_history()
        while (line := self._line(self._prompt)) is not None:
            text = line.strip()
            if text.startswith(MARK):
                text = self._several(text.removeprefix(MARK))
            if text:
                self._remember(text)
                yield text

    def _line(self, prompt: str) -> str | None:
        """The next line; None at the end."""
        if not self.interactive:
            return sys.stdin.readline() or None
        while True:
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                note("Ctrl-D or /quit leaves")

    def _several(self, text: str) -> str:
        """Lines until one ends with the mark, or the input ends."""
        lines = [text]
        while not lines[-1].rstrip().endswith(MARK):
            if (line := self._line("| " if self._prompt else "")) is None:
                return "\n".join(lines).strip()
            lines.append(line.removesuffix("\n"))
        return "\n".join(lines).rstrip().removesuffix(MARK).strip()

    def _begin_history(self) -> None:
        self._readline = import_module("readline")  # line editing and history for input()
        self._readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off
        self._readline.set_auto_history(False)
        self._readline.set_history_length(HISTORY)
        with contextlib.suppress(OSError):
            self._readline.read_history_file(_history())

    def _remember(self, text: str) -> None:
        if self._readline is None:
            return
        self._readline.add_history(text.replace("\n", " "))  # a file of history has lines
        with contextlib.suppress(OSError):  # a home that cannot be written: this chat has its own history
            path = _history()
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._readline.append_history_file(1, path)


def _history() -> Path:
    return home() / "chat-history"


def edited(text: str) -> str:
    """A text after the user has changed it in an editor ($VISUAL, $EDITOR, else vi).

    Raises InvalidRequest if the editor cannot be run or fails.
    """
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "question.md"
        path.write_text(text, encoding="utf-8")
        try:
            subprocess.run([*shlex.split(editor), str(path)], check=True)
        except (OSError, ValueError, subprocess.CalledProcessError) as error:
            raise InvalidRequest(f"the editor {editor!r} failed ({error}): set VISUAL or EDITOR to another") from None
        return path.read_text(encoding="utf-8-sig", errors="replace").strip()
