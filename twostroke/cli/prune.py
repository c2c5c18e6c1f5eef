"""`twostroke prune`: a student cut from a model."""

from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.options import JsonFlag
from twostroke.cli.report import Loading, print_json


def prune(
    model: Annotated[str, typer.Argument(help="A catalog name, a path, or a hub id.")],
    directory: Annotated[Path, typer.Argument(help="Where the student goes: a Hugging Face directory.")],
    *,
    calibration: Annotated[Path, typer.Option(help="A file of text by which channels are chosen.")],
    hidden: Annotated[float, typer.Option(help="Share of the hidden width to take away.")] = 0.25,
    intermediate: Annotated[float, typer.Option(help="Share of the intermediate width to take away.")] = 0.25,
    max_tokens: Annotated[int, typer.Option(min=32, help="Most tokens of the text to read.")] = 16384,
    as_json: JsonFlag = False,
) -> None:
    """Cut channels that a text uses least, and keep the KV geometry: a student for overfill and refresh."""
    from twostroke.checkpoints.resolve import open_checkpoint
    from twostroke.cli.generate import read_prompt
    from twostroke.pruning import prune

    text = read_prompt(None, calibration)
    with Loading(f"pruning {model}") as progress:
        checkpoint = open_checkpoint(model, progress=progress)
        kept = prune(checkpoint, text, directory, hidden, intermediate, max_tokens)
    old = checkpoint.config
    facts = {"hidden_size": [old.hidden_size, kept.hidden_size]}
    facts |= {"intermediate_size": [old.intermediate_size, kept.intermediate_size]}
    if as_json:
        print_json({"model": checkpoint.name, "directory": str(directory), **facts})
        return
    for name, (before, after) in facts.items():
        typer.echo(f"{name.replace('_', ' ')}: {before:,} to {after:,}")
    typer.echo(f"{directory}: twostroke generate --model {model} --student {directory} --method overfill ...")
