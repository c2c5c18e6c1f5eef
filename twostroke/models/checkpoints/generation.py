"""A model's generation defaults: the sampling parameters that its publisher recommends.

A Hugging Face directory states them in generation_config.json, a GGUF file under `general.sampling.`. As in vLLM, they
apply regardless of `do_sample`: `chat` and the server use them for parameters that a client leaves out.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from twostroke.errors import CheckpointError
from twostroke.fields import rules
from twostroke.models.checkpoints.huggingface.json_files import read_optional
from twostroke.sampling.params import SamplingParams

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
GGUF_KEYS = {"temp": "temperature", "penalty_repeat": "repetition_penalty", **{name: name for name in FIELDS[1:4]}}


def generation_defaults(found: Mapping[str, Any], source: Path) -> dict[str, float]:
    """Pick the `FIELDS` that are present and not null. Raises CheckpointError naming one that is out of range."""
    defaults = {name: found[name] for name in FIELDS if found.get(name) is not None}
    if defaults.get("top_k") == -1:  # vLLM's value for no limit
        defaults["top_k"] = 0
    for name, value in defaults.items():
        rule = rules(SamplingParams)[name]
        if not rule.accepts(value):
            raise CheckpointError(f"{source}: {name} must be {rule.wanted}, not {value!r:.40}: correct it or remove it")
    return defaults


def gguf_generation(metadata: Mapping[str, Any], source: Path) -> dict[str, float]:
    """The defaults in a GGUF file's metadata. Raises CheckpointError."""
    found = {ours: metadata.get(f"general.sampling.{theirs}") for theirs, ours in GGUF_KEYS.items()}
    return generation_defaults(found, source)


def directory_generation(directory: Path) -> dict[str, float]:
    """The defaults of a Hugging Face directory. Raises CheckpointError if its generation_config.json is unreadable."""
    path = directory / "generation_config.json"
    return generation_defaults(read_optional(path), path)
