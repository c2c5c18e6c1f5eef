"""`twostroke cache`: what this user's KV tiers hold, on disk and in a remote store."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from twostroke.cli.options import JsonFlag, spread
from twostroke.cli.parsers import without_password
from twostroke.cli.report import print_json, size
from twostroke.errors import InvalidRequest

if TYPE_CHECKING:
    from twostroke.kv.tiers.store import StoreUsage

UNCHECKED = 3  # exit status: nothing is known to be damaged, and not all could be checked
COUNTS = ("pages", "private_pages", "bytes", "damaged_pages", "unchecked_pages", "left_pages")

app = typer.Typer(help="Show, check and clear KV on disk or in a remote store.", no_args_is_help=True)
Where = Annotated[
    str,
    typer.Argument(
        metavar="WHERE", envvar="TWOSTROKE_KV_REMOTE", help="The directory of --kv-disk, or the URL of --kv-remote."
    ),
]


@app.command()
@spread
def show(where: Where, *, as_json: JsonFlag = False) -> None:
    """What is there, by model."""
    tier, place = _place(where)
    found: list[StoreUsage] = tier.inspect(place)
    if as_json:
        print_json(facts(where, found))
    else:
        print_table(found, f"nothing is stored in {without_password(where)}")


@app.command()
@spread
def verify(where: Where, *, as_json: JsonFlag = False) -> None:
    """Check every page and delete those that are damaged.

    Exits with 1 if there were any, else with 3 if some could not be checked.
    """
    tier, place = _place(where)
    found: list[StoreUsage] = tier.verify(place)
    damaged, left, unchecked = (sum(getattr(one, name) for one in found) for name in ("damaged", "left", "unchecked"))
    if as_json:
        print_json(facts(where, found))
    else:
        print_table(found, f"nothing is stored in {without_password(where)}", checked=True)
        if damaged > left:
            typer.echo(f"damaged pages, deleted: {damaged - left:,}")
        _tell_left(left)
        if unchecked:
            typer.echo(f"pages that could not be checked: {unchecked:,} (of another key, or unreadable)")
        elif found and not damaged:
            typer.echo("all pages are right")
    if damaged or unchecked:
        raise typer.Exit(1 if damaged else UNCHECKED)


@app.command()
@spread
def clear(
    where: Where,
    *,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only pages of this model.", show_default="all")
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Delete the pages of prompts, of one model or of all. Exits with 1 if some could not be deleted.

    Running processes may use the same place: what is deleted is then computed again. Pages of values that they hold
    stay.
    """
    tier, place = _place(where)
    gone: list[StoreUsage] = tier.clear(place, model)
    left = sum(one.left for one in gone)
    if as_json:
        print_json(facts(where, gone))
    else:
        what = "nothing" if model is None else f"nothing of model {model}"
        print_table(gone, f"{what} is stored in {without_password(where)}")
        if gone:
            typer.echo(f"deleted: {sum(one.pages for one in gone):,} pages, {size(sum(one.bytes for one in gone))}")
        _tell_left(left)
    if left:
        raise typer.Exit(1)


def _tell_left(left: int) -> None:
    if left:
        typer.echo(f"could not be deleted, and are still there: {left:,}")


def facts(where: str, holdings: "Sequence[StoreUsage]") -> dict[str, Any]:
    """All of it, for JSON."""
    models: list[dict[str, Any]] = [
        {"model": one.model, "pages": one.pages, "private_pages": one.private, "bytes": one.bytes}
        | {"damaged_pages": one.damaged, "unchecked_pages": one.unchecked, "left_pages": one.left}
        for one in holdings
    ]
    totals = {name: sum(one[name] for one in models) for name in COUNTS}
    return {"where": without_password(where), "models": models, **totals}


def print_table(holdings: "Sequence[StoreUsage]", nothing: str, *, checked: bool = False) -> None:
    """A row for each model; the line `nothing` if there is none."""
    if not holdings:
        typer.echo(nothing)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("model", overflow="fold")
    for name in ("pages", "of values", "size", *(("damaged", "unchecked") if checked else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for one in holdings:
        row = [escape(one.model), f"{one.pages:,}", f"{one.private:,}", size(one.bytes)]
        table.add_row(*row, *((f"{one.damaged:,}", f"{one.unchecked:,}") if checked else ()))
    Console().print(table)


def _place(where: str) -> tuple[Any, Any]:
    """The package of the tier that is meant, and the place as its functions take it. Raises InvalidRequest."""
    if "://" in where:
        from twostroke.kv.tiers import remote

        return remote, where
    directory = Path(where).expanduser()
    if not where or not directory.is_dir():
        raise InvalidRequest(f"there is no directory {where}: give that of --kv-disk, or a URL, redis://HOST:PORT/DB")
    from twostroke.kv.tiers import disk

    return disk, directory
