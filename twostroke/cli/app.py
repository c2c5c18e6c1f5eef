"""The command `twostroke`: its subcommands, and what happens to errors."""

import errno
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from twostroke.cli import (
    bench,
    cache,
    chat,
    eval,
    explain,
    generate,
    models,
    plan,
    prune,
    report,
    serve,
    simulate,
    verify,
    worker,
)
from twostroke.cli.config import name_variables
from twostroke.cli.parsers import expand_paths
from twostroke.cli.serve_models import ServeCommand
from twostroke.errors import TwostrokeError


class ErrorHandlingGroup(TyperGroup):
    """Prints a typed error, and one of the system, as one line.

    Wrong options (exit 2), Ctrl-C (130) and closed pipes are typer's to handle.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        name_variables(self)
        expand_paths(self)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except TwostrokeError as error:
            typer.echo(f"error: {' '.join(str(error).split())}", err=True)
            raise typer.Exit(1) from None
        except OSError as error:  # a full disk, a file that cannot be written
            if error.errno == errno.EPIPE:
                raise
            report.discard_stdout()
            typer.echo(f"error: {error.strerror or error}{f': {error.filename}' if error.filename else ''}", err=True)
            raise typer.Exit(1) from None


app = typer.Typer(
    name="twostroke",
    cls=ErrorHandlingGroup,
    help="An LLM inference engine of two strokes, prefill and decode, whose KV cache is a value you hold.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
app.command()(generate.generate)
app.command()(chat.chat)
app.command()(explain.explain)
app.command()(verify.verify)
app.command(cls=ServeCommand)(serve.serve)
app.command()(worker.worker)
app.command()(plan.plan)
app.command()(simulate.simulate)
app.command()(prune.prune)
app.add_typer(models.app, name="models")
app.add_typer(cache.app, name="cache")
app.add_typer(bench.app, name="bench")
app.add_typer(eval.app, name="eval")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("twostroke"))
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """An LLM inference engine of two strokes, prefill and decode, whose KV cache is a value you hold."""
