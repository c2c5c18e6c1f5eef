"""The models that Twostroke fetches by name. Python packages contain their weights, so pip is enough to fetch them."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources


@dataclass(frozen=True)
class CatalogEntry:
    """One model: a single GGUF `file` of `size` bytes with that `sha256`.

    `packages` are the requirements whose wheels hold the pieces of the file, in order; in each wheel the one member
    matching the regular expression `member` is a piece. `hub` is (repository, file) of the same bytes on the model hub.
    `generation` holds the sampling defaults that the publisher documents. It applies if the file states none.
    """

    name: str
    description: str
    chat: bool  # tuned to follow a chat template; otherwise a base model that continues text
    licence: str
    file: str
    size: int
    sha256: str
    packages: tuple[str, ...]
    member: str
    hub: tuple[str, str] | None = None
    generation: Mapping[str, float] = field(default_factory=dict)


# The smallest model here that answers plain questions correctly (benchmarks/plain_questions.py, docs/log.md).
DEFAULT_MODEL = "qwen2.5-coder-1.5b"


def _read_catalog() -> dict[str, CatalogEntry]:
    """The entries of catalog.toml. There `packages` is one requirement, or with `parts` that many, numbered at `{}`."""
    found: dict[str, CatalogEntry] = {}
    text = resources.files(__package__ or "").joinpath("catalog.toml").read_text(encoding="utf-8")
    for name, keys in tomllib.loads(text).items():
        wheel, parts = keys.pop("packages"), keys.pop("parts", 1)
        packages = tuple(wheel.format(part + 1) for part in range(parts))
        hub = tuple(keys.pop("hub", ())) or None
        found[name] = CatalogEntry(name=name, packages=packages, hub=hub, **keys)
    return found


CATALOG = _read_catalog()
