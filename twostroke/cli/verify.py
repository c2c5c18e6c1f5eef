"""`twostroke verify`: whether a receipt's answer comes out again, to the bit."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer

from twostroke.cli.config import source_of
from twostroke.cli.options import JsonFlag, ModelOptions, spread
from twostroke.cli.report import note, print_json, write
from twostroke.errors import InvalidRequest


@spread
def verify(
    *,
    file: Annotated[Path, typer.Argument(help="The receipt, or the response that it came in.")],
    as_json: JsonFlag = False,
    model_options: ModelOptions,
) -> None:
    """Compute a receipt's answer again, in a few passes, and say whether all of it is the same, to the bit.

    Without --model it is the model that the receipt names. The exit status is 1 if anything is different.
    """
    from twostroke.api.receipts import Receipt
    from twostroke.api.receipts import verify as check

    if not file.is_file():
        raise InvalidRequest(f"{file} cannot be read: there is no such file")
    receipt = Receipt.load(file)
    if source_of("model") != "option":
        model_options = replace(model_options, model=receipt.model)
    with model_options.open() as llm:
        found = check(llm, receipt)
    seal = {True: "sealed by your key", False: "NOT sealed by any of your keys", None: "without a seal"}[found.sealed]
    if as_json:
        print_json({"file": str(file), "model": receipt.model, "tokens": len(receipt.tokens), **asdict(found)})
    elif found.wrong is None:
        write(f"the same bits: {len(receipt.tokens):,} tokens and their log-probabilities\n")
    else:
        write(f"DIFFERENT: {found.wrong}\n")
    took = "" if found.seconds is None else f" | computed in {found.seconds:.2f} s"
    note(f"{receipt.model} on {receipt.backend}, identity {receipt.identity[:16]} | {seal}{took}")
    if found.wrong is not None or found.sealed is False:
        raise typer.Exit(1)
