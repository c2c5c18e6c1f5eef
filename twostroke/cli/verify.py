"""`twostroke verify`: whether a receipt's answer comes out again, to the bit."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twostroke.cli.config import source_of
from twostroke.cli.options import JsonFlag, ModelOptions, spread
from twostroke.cli.parsers import require_file
from twostroke.cli.report import note, print_json, write

if TYPE_CHECKING:
    from twostroke.api.receipt_check import ReceiptCheck
    from twostroke.api.receipts import Receipt


@spread
def verify(
    *,
    file: Annotated[Path, typer.Argument(help="The receipt, or the response that it came in, with all that it has.")],
    as_json: JsonFlag = False,
    model_options: ModelOptions,
) -> None:
    """Compute a receipt's answer again, in a few passes, and say whether all of it is the same, to the bit.

    Without --model it is the model that the receipt names. The exit status is 1 if anything is different.
    """
    from twostroke.api.receipt_check import verify as check
    from twostroke.api.receipts import Receipt
    from twostroke.server.grammar import Grammars

    require_file(file)
    receipts = Receipt.load_all(file)
    if source_of("model") != "option":
        model_options = replace(model_options, model=receipts[0].model)
    with model_options.open() as llm:
        remake = Grammars(llm.tokenizer, llm.config.vocab_size).remake
        checks = [check(llm, receipt, remake) for receipt in receipts]
    several = len(receipts) > 1
    facts = [
        {"file": str(file), "model": receipt.model, "tokens": len(receipt.tokens), **asdict(found)}
        for receipt, found in zip(receipts, checks, strict=True)
    ]
    if as_json:
        print_json({"receipts": facts} if several else facts[0])
    for number, (receipt, found) in enumerate(zip(receipts, checks, strict=True)):
        _tell(f"receipt {number}: " if several else "", receipt, found, silent=as_json)
    if any(found.wrong is not None or found.sealed is False for found in checks):
        raise typer.Exit(1)


def _tell(which: str, receipt: "Receipt", found: "ReceiptCheck", silent: bool) -> None:
    seal = {True: "sealed by your key", False: "NOT sealed by any of your keys", None: "without a seal"}[found.sealed]
    same = f"the same bits: {len(receipt.tokens):,} tokens and their log-probabilities"
    if not silent:
        write(f"{which}{same if found.wrong is None else f'DIFFERENT: {found.wrong}'}\n")
    took = "" if found.seconds is None else f" | computed in {found.seconds:.2f} s"
    note(f"{which}{receipt.model} on {receipt.backend}, identity {receipt.identity[:16]} | {seal}{took}")
