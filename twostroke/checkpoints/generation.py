"""A model's own generation defaults: how its publisher samples its answers.

They stand in a Hugging Face directory's generation_config.json, or in GGUF under `general.sampling.`. As in vLLM, the
values count whatever `do_sample` says, and are what `chat` and the server take where a client gives none.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.errors import CheckpointError
from twostroke.fields import rules
from twostroke.sampling.params import SamplingParams

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
GGUF_KEYS = {"temp": "temperature", "penalty_repeat": "repetition_penalty", **{name: name for name in FIELDS[1:4]}}


def generation_defaults(found: Mapping[str, Any], source: Path) -> dict[str, float]:
    """Those of `FIELDS` that are there and not null. Raises CheckpointError naming one that is out of range."""
    defaults = {name: found[name] for name in FIELDS if found.get(name) is not None}
    if defaults.get("top_k") == -1:  # vLLM's word for all
        defaults["top_k"] = 0
    for name, value in defaults.items():
        rule = rules(SamplingParams)[name]
        if not rule.accepts(value):
            raise CheckpointError(f"{source}: {name} must be {rule.wanted}, not {value!r:.40}: mend it or remove it")
    return defaults


def gguf_generation(metadata: Mapping[str, Any], source: Path) -> dict[str, float]:
    """Of a GGUF file's metadata. Raises CheckpointError."""
    found = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in GGUF_KEYS.items()}
    return generation_defaults(found, source)


def directory_generation(directory: Path) -> dict[str, float]:
    """Of a Hugging Face directory. Raises CheckpointError if its generation_config.json cannot be read."""
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return generation_defaults(found, path)
