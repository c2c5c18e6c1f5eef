"""Opens the checkpoint that a user names: by catalog name, path, or hub id."""

import os
import re
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path

from twostroke.errors import CheckpointError, UnknownModel
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.fetch import fetch
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.gguf.split_files import cut, sets
from twostroke.models.checkpoints.hub import hub_snapshot
from twostroke.models.checkpoints.huggingface.directory import open_huggingface
from twostroke.models.checkpoints.progress import Progress

HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*(?<!\.gguf))(?::([^:]+))?")


def open_checkpoint(name_or_path: str, *, progress: Progress | None = None) -> Checkpoint:
    """Opens a model, fetching it first if necessary.

    `name_or_path` is a catalog name; a path to a .gguf file or to a directory with config.json and safetensors; or a
    hub id, `org/name`, `org/name:file.gguf` or `org/name:Q4_K_M`. Catalog names come first, then existing paths, then
    hub ids.
    `progress(stage, done, total)` reports downloads, in bytes. Raises UnknownModel if the name is none of these,
    FetchError if a download fails, other CheckpointErrors if the files cannot be used.
    """
    entry = CATALOG.get(name_or_path)
    if entry is not None:
        checkpoint = open_gguf(fetch(entry, progress=progress), name=entry.name)
        return replace(checkpoint, generation=checkpoint.generation or entry.generation)
    path = Path(name_or_path).expanduser()
    if name_or_path and os.path.exists(path):  # Path.exists would raise on names too long for a file
        return open_path(path)
    if "/" not in name_or_path and path.suffix != ".gguf":
        raise _unknown(name_or_path)
    hub_id = HUB_ID.fullmatch(name_or_path)
    if hub_id is None:
        raise UnknownModel(f"{name_or_path}: there is no such file or directory")
    return open_path(hub_snapshot(hub_id[1], hub_id[2], progress), name=name_or_path)


def open_path(path: Path, name: str | None = None) -> Checkpoint:
    """Opens a GGUF file, a Hugging Face directory, or a directory that holds one GGUF model and no safetensors."""
    if path.is_file():
        return open_gguf(path, name)
    # Repositories of GGUF files often have the model's config.json too.
    if not (path / "config.json").is_file() or (any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))):
        files = [str(file.relative_to(path)) for pattern in ("*.gguf", "*/*.gguf") for file in path.glob(pattern)]
        found = sets(files)
        if len(found) == 1:
            (parts,) = found.values()
            return open_gguf(path / parts[0], name)
        if found:
            raise CheckpointError(f"{path}: name one of its models: {', '.join(found)}")
        for file in sorted(path.glob("*.gguf?*")):
            if (pieces := cut(file)) is not None:
                raise pieces
        raise CheckpointError(f"{path}: holds neither a config.json nor a GGUF file")
    return open_huggingface(path, name)


def _unknown(name: str) -> UnknownModel:
    close = get_close_matches(name.lower(), CATALOG, n=2, cutoff=0.5)
    hint = f"did you mean {' or '.join(close)}? " if close else ""
    return UnknownModel(
        f"unknown model {name!r}: {hint}the catalog has {', '.join(CATALOG)}; a path or a hub id (org/name) also works"
    )
