"""Receipts of the answers of a call: a field of its response, and files where the server keeps them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twostroke.api.receipts import Receipt, describable
from twostroke.engine.output import Token
from twostroke.errors import InvalidRequest
from twostroke.methods import Method
from twostroke.sampling.params import SamplingParams
from twostroke.server.async_engine import AsyncEngine
from twostroke.server.engine_requests import Prepared, require_plain


def with_receipt(params: SamplingParams, technique: Method) -> SamplingParams:
    """The parameters of an answer that gets a receipt. Raises ApiError or InvalidRequest if there can be none."""
    require_plain(technique, "a receipt is made", "receipt")
    describable(params)
    return replace(params, logprobs=params.logprobs or 0)


async def receipts_of(
    engine: AsyncEngine, prepared: Prepared, answers: Mapping[tuple[int, int], Sequence[Token]]
) -> dict[str, Any]:
    """The field `receipt` of a response, `receipts` of several answers, or why there is none.

    `answers`: the tokens by prompt and choice.
    """

    def make() -> list[dict[str, Any]]:
        made = [
            Receipt.of(engine.llm, prepared.prompts[prompt], prepared.requests[prompt], tokens)
            for (prompt, _), tokens in sorted(answers.items())
        ]
        for receipt in made if engine.settings.receipts is not None else ():
            receipt.save(Path(engine.settings.receipts or "").expanduser() / f"{receipt.name}.json")
        return [receipt.as_json() for receipt in made]

    try:
        made = await engine.run_in_thread(make)
    except (InvalidRequest, OSError) as error:
        return {"receipt": None, "receipt_error": str(error)}
    return {"receipt": made[0]} if len(made) == 1 else {"receipts": made}
