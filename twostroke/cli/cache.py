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
    from twostroke.kv.tiers.usage import StoreUsage

app = typer.Typer(help="Show, check and clear KV on disk or in a remote store.", no_args_is_help=True)
Where = Annotated[
    str,
    typer.Argument(
        metavar="WHERE",
        envvar="TWOSTROKE_KV_REMOTE",
        help="The directory of --kv-disk, or the URL of --kv-remote.",
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
    """Check every page and delete those that are damaged. Exits with 1 if there were any."""
    tier, place = _place(where)
    found: list[StoreUsage] = tier.verify(place)
    damaged = sum(one.damaged for one in found)
    if as_json:
        print_json(facts(where, found))
    else:
        print_table(found, f"nothing is stored in {without_password(where)}", damaged=True)
        if found:
            typer.echo(f"damaged pages, deleted: {damaged:,}" if damaged else "all pages are right")
    if damaged:
        raise typer.Exit(1)


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
    """Delete the pages of prompts, of one model or of all.

    Running processes may use the same place: what is deleted is then computed again. Pages of values that they hold
    stay.
    """
    tier, place = _place(where)
    gone: list[StoreUsage] = tier.clear(place, model)
    if as_json:
        print_json(facts(where, gone))
        return
    what = "nothing" if model is None else f"nothing of model {model}"
    print_table(gone, f"{what} is stored in {without_password(where)}")
    if gone:
        typer.echo(f"deleted: {sum(one.pages for one in gone):,} pages, {size(sum(one.bytes for one in gone))}")


def facts(where: str, holdings: "Sequence[StoreUsage]") -> dict[str, Any]:
    """All of it, for JSON."""
    models: list[dict[str, Any]] = [
        {"model": one.model, "pages": one.pages, "private_pages": one.private, "bytes": one.bytes}
        | {"damaged_pages": one.damaged}
        for one in holdings
    ]
    totals = {name: sum(one[name] for one in models) for name in ("pages", "private_pages", "bytes", "damaged_pages")}
    return {"where": without_password(where), "models": models, **totals}


def print_table(holdings: "Sequence[StoreUsage]", nothing: str, *, damaged: bool = False) -> None:
    """A row for each model; the line `nothing` if there is none."""
    if not holdings:
        typer.echo(nothing)
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, header_style="bold")
    table.add_column("model", overflow="fold")
    for name in ("pages", "of values", "size", *(("damaged",) if damaged else ())):
        table.add_column(name, justify="right", no_wrap=True)
    for one in holdings:
        row = [escape(one.model), f"{one.pages:,}", f"{one.private:,}", size(one.bytes)]
        table.add_row(*row, *((f"{one.damaged:,}",) if damaged else ()))
    Console().print(table)


def _place(where: str) -> tuple[Any, Any]:
    """The package of the tier that is meant, and the place as its functions take it. Raises InvalidRequest."""
    if "://" in where:
        from twostroke.kv.tiers import remote

        return remote, where
    directory = Path(where).expanduser()
    if not directory.is_dir():
        raise InvalidRequest(f"there is no directory {where}: give that of --kv-disk, or a URL, redis://HOST:PORT/DB")
    from twostroke.kv.tiers import disk

    return disk, directory
