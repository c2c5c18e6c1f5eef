"""`twostroke prune`: a student cut from a model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.config import source_of
from twostroke.cli.options import JsonFlag, spread
from twostroke.cli.report import ProgressDisplay, note, print_json, progress_bar, stderr_console
from twostroke.errors import InvalidRequest
from twostroke.system.extras import requires_extra


@spread
def prune(
    model: Annotated[str, typer.Argument(help="A catalog name, a path, or a hub id.")],
    directory: Annotated[Path, typer.Argument(help="Where the student goes: a Hugging Face directory.")],
    *,
    calibration: Annotated[Path, typer.Option(help="A file of text by which channels are chosen.")],
    hidden: Annotated[float, typer.Option(help="Share of the hidden width to take away.")] = 0.25,
    intermediate: Annotated[float, typer.Option(help="Share of the intermediate width to take away.")] = 0.25,
    max_tokens: Annotated[int, typer.Option(min=32, help="Most tokens of the text to read.")] = 16384,
    distill: Annotated[int, typer.Option(min=0, metavar="STEPS", help="Then distill on the text.")] = 0,
    learning_rate: Annotated[float, typer.Option(min=1e-6, max=0.1, help="Its highest learning rate.")] = 3e-4,
    as_json: JsonFlag = False,
) -> None:
    """Cut channels that a text uses least, and keep the KV geometry: a student for overfill and refresh.

    With --distill it then learns from its teacher for some minutes, which repairs most of the damage.
    """
    from twostroke.cli.prompt import read_prompt
    from twostroke.models.checkpoints.resolve import open_checkpoint

    with requires_extra("torch", "pruning"):
        from twostroke.study import distilling
        from twostroke.study.pruning import mlp_of, prune

    if not distill and source_of("learning_rate") != "default":
        raise InvalidRequest("--learning-rate belongs to --distill: give its steps too, or leave it out")
    text = read_prompt(None, None, calibration)
    with ProgressDisplay(f"pruning {model}") as progress:
        checkpoint = open_checkpoint(model, progress=progress)
        windows = distilling.windows_of(checkpoint, text, max_tokens) if distill else []
        kept = prune(checkpoint, text, directory, hidden, intermediate, max_tokens)
    old = checkpoint.config
    facts = {"hidden_size": [old.hidden_size, kept.hidden_size]}
    facts |= {"intermediate_size": [mlp_of(old).intermediate_size, mlp_of(kept).intermediate_size]}
    learned = None
    if distill:
        quiet = not stderr_console().is_terminal
        with progress_bar(f"distilling {model}", distill) as update:

            def step(done: int, loss: float) -> None:
                update(done, f", loss {loss:.3f}")
                if quiet and done % max(1, distill // 10) == 0:
                    note(f"step {done} of {distill}, loss {loss:.3f}")

            learned = distilling.distill(
                checkpoint, directory, windows, distill, learning_rate=learning_rate, progress=step
            )
    if as_json:
        distillation = {} if learned is None else {"distillation": {"steps": distill, **asdict(learned)}}
        print_json({"model": checkpoint.name, "directory": str(directory), **facts, **distillation})
        return
    for name, (before, after) in facts.items():
        typer.echo(f"{name.replace('_', ' ')}: {before:,} to {after:,}")
    if learned is not None:
        typer.echo(f"KL to the teacher on held-out text: {learned.before:.3f} to {learned.after:.3f} nats")
        typer.echo(f"{distill} steps, {learned.tokens:,} tokens in {learned.seconds:.0f} s")
    typer.echo(f"{directory}: twostroke generate --model {model} --student {directory} --method overfill ...")
