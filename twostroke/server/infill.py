"""Fill-in-the-middle over HTTP, the same for every API: the prompt, and what ends an answer."""

from collections.abc import Sequence
from dataclasses import replace

from twostroke.api.llm import LLM
from twostroke.models.checkpoints.infill import NO_INFILL
from twostroke.sampling.params import SamplingParams
from twostroke.server.engine_requests import check_size
from twostroke.server.errors import ApiError


def infill_prompt(
    llm: LLM, prefix: str | Sequence[int], suffix: str, extra: Sequence[tuple[str, str]] = (), most: int | None = None
) -> list[int]:
    """The prompt for what stands between two texts (`Tokenizer.encode_infill`). Takes long: off the event loop.

    Raises ApiError if the model has no tokens for it, or if the texts are certainly too long.
    """
    if llm.tokenizer.infill is None:
        raise ApiError(400, NO_INFILL, param="suffix", code="no_infill")
    for text in (prefix, suffix):
        if isinstance(text, str):
            check_size(llm, text)
    return llm.tokenizer.encode_infill(prefix, suffix, extra, most)


def infill_ends(llm: LLM, params: SamplingParams) -> SamplingParams:
    """The parameters of an answer that the tokens of fill-in-the-middle end as well."""
    infill = llm.tokenizer.infill
    if infill is None or params.ignore_eos:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, *sorted(infill.ends)))
