"""The prompt of a command: given as an argument, an option or a file, or piped in."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twostroke.errors import InvalidRequest

if TYPE_CHECKING:
    from twostroke.api.llm import LLM


@dataclass(frozen=True)
class PromptOptions:
    """The text of a prompt, and whether it goes through the chat template."""

    text: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="The text; without it, what is piped in.", show_default=False),
    ] = None
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", help="The text; - reads it from stdin.")] = None
    prompt_file: Annotated[Path | None, typer.Option(help="A file that holds it; - is stdin.")] = None
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--raw", help="Through the chat template, or as plain text.", show_default="--chat"),
    ] = None
    system: Annotated[str | None, typer.Option(help="A system message before the prompt.")] = None

    def read(self) -> str:
        """The text. Raises BadParameter or InvalidRequest, as `read_prompt`, and for a system message without chat."""
        text = read_prompt(self.text, self.prompt, self.prompt_file)
        if self.system is not None and self.chat is False:
            raise typer.BadParameter("a system message needs the chat template: leave out --raw", param_hint="--system")
        return text

    def tokens(self, llm: "LLM", text: str) -> list[int]:
        """Through the chat template if there is one, unless `chat` says otherwise."""
        tokenizer = llm.tokenizer
        if self.chat is False or (self.chat is None and self.system is None and tokenizer.chat_template is None):
            return tokenizer.encode(text)
        if tokenizer.chat_template is None:
            raise InvalidRequest(f"model {llm.name} has no chat template: use --raw, without --system")
        messages = [{"role": "user", "content": text}]
        if self.system is not None:
            messages.insert(0, {"role": "system", "content": self.system})
        return tokenizer.encode_chat(messages)


def read_prompt(text: str | None, prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt's text, given in one way or piped in; from stdin or a file, one newline at the end is left out,
    and the mark that some programs put before UTF-8."""
    ways, hint = [way for way in (text, prompt, prompt_file) if way is not None], "PROMPT / --prompt / --prompt-file"
    if len(ways) > 1:
        raise typer.BadParameter("give exactly one of them (- is stdin)", param_hint=hint)
    if not ways and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("give one of them, or pipe the text in", param_hint=hint)
    if not ways or str(ways[0]) == "-":
        text = sys.stdin.read().removeprefix("\ufeff").removesuffix("\n")
        if not text and not ways:
            raise typer.BadParameter("give one of them: nothing was piped in", param_hint=hint)
    elif prompt_file is None:
        text = str(ways[0])
    else:
        try:
            text = prompt_file.read_text(encoding="utf-8-sig").removesuffix("\n")
        except OSError as error:
            raise InvalidRequest(f"{prompt_file} cannot be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InvalidRequest(f"{prompt_file} is not UTF-8 text") from None
    if not text:
        raise InvalidRequest("the text is empty: give at least one character")
    return text
