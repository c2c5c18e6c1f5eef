"""Options that choose a technique, and the modules that techniques come from."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from twostroke.cli.parsers import parse_pairs

if TYPE_CHECKING:
    from twostroke.methods import Method

MethodModule = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FILE|MODULE",
        envvar="TWOSTROKE_METHOD_MODULES",
        help="A Python file or module with techniques of your own. May be repeated.",
        rich_help_panel="Method",
    ),
]


def load_method_modules(names: list[str] | None) -> None:
    """Register their techniques and those of installed packages. Raises InvalidRequest, one line."""
    from twostroke.methods import load_installed, load_module

    load_installed()
    for name in names or ():
        load_module(name)


@dataclass(frozen=True)
class MethodOptions:
    """Options: which technique answers."""

    method: Annotated[str, typer.Option(help="The technique, such as plain or repeat.", rich_help_panel="Method")] = (
        "plain"
    )
    method_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A parameter of it; may be repeated.", rich_help_panel="Method"),
    ] = None
    method_module: MethodModule = None

    def build(self) -> "Method":
        """Raises BadParameter for a pair of another form or twice, InvalidRequest for an unknown method or name."""
        pairs = parse_pairs(self.method_option or ())
        load_method_modules(self.method_module)
        from twostroke.methods import method_of

        return method_of(self.method, pairs)
