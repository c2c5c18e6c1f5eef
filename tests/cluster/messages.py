"""Messages as Dynamo 1.6.1's front end sends them."""

from collections.abc import Sequence
from typing import Any


def message(tokens: Sequence[int], annotations: Sequence[str] = (), **stated: Any) -> dict[str, Any]:
    """A request with every field that the front end writes; `stated` are those that a client gave."""
    groups: dict[str, dict[str, Any]] = {
        "stop_conditions": dict.fromkeys(
            [
                "max_tokens", "stop", "stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden",
                "min_tokens", "ignore_eos", "max_thinking_tokens",
            ]
        ),
        "sampling_options": dict.fromkeys(
            [
                "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p",
                "top_k", "min_p", "use_beam_search", "length_penalty", "seed", "include_stop_str_in_output",
                "guided_decoding",
            ]
        ),
        "output_options": dict.fromkeys(
            ["logprobs", "prompt_logprobs", "skip_special_tokens", "formatted_prompt", "return_tokens_as_token_ids"]
        ),
    }  # fmt: skip
    made: dict[str, Any] = {"model": "m", "token_ids": list(tokens), "annotations": list(annotations), "routing": {}}
    for name, value in stated.items():
        group = next((group for group in groups.values() if name in group), made)
        group[name] = value
    return made | groups
