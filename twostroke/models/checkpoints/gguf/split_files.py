"""GGUF models in several files, as llama.cpp's llama-gguf-split writes them: NAME-00001-of-00003.gguf and so on.

Every part is a GGUF file with `split.no` (from 0), `split.count` and `split.tensors.count` (of all parts together). The
first has the model's metadata. Older models were cut into pieces that are no GGUF files; users join those themselves.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twostroke.errors import CheckpointError

if TYPE_CHECKING:  # importing numpy would slow down every command
    from twostroke.models.formats.tensor import RawTensor

PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
# NAME.gguf-split-a, NAME.gguf.part1of2, NAME.gguf.00001 and the like.
PIECE = re.compile(r"(?P<name>.+\.gguf)[-._]?(split|part)?[-._]?([a-z]|a[a-z]|\d{1,5}(-?of-?\d{1,5})?)", re.IGNORECASE)
MAX_FILES = 99_999  # the number has five digits


def set_name(path: Path) -> str:
    """A file's stem; a part's without its number."""
    part = PART.fullmatch(path.name)
    return part["name"] if part else path.stem


def sets(names: Iterable[str]) -> dict[str, list[str]]:
    """The models among GGUF files: the name of the first file of each -> the names of all its parts.

    Vision projectors (mmproj) are no models. `names` may have folders; missing parts are not filled in.
    """
    found: dict[str, list[str]] = {}
    for name in sorted(names):
        base = name.rpartition("/")[2]
        if not name.endswith(".gguf") or base.startswith("mmproj"):
            continue
        part = PART.fullmatch(base)
        key = name if part is None else f"{name[: -len(base)]}{part['name']}-00001-of-{part['count']}.gguf"
        found.setdefault(key, []).append(name)
    return found


def parts_of(path: Path, metadata: Mapping[str, Any]) -> tuple[Path, ...]:
    """The files of the set that a file with this metadata belongs to. Raises CheckpointError for a missing one."""
    count = metadata.get("split.count", 0)
    if type(count) is not int or not 0 <= count <= MAX_FILES:
        raise CheckpointError(f"{path}: split.count must be a number of files, not {count!r:.40}")
    if count < 2:
        return (path,)
    named = PART.fullmatch(path.name)
    if named is None or int(named["count"]) != count:
        raise CheckpointError(
            f"{path}: a part of a model in {count} files; name them NAME-00001-of-{count:05}.gguf and so on"
        )
    paths = tuple(path.with_name(f"{named['name']}-{i + 1:05}-of-{count:05}.gguf") for i in range(count))
    if missing := [part for part in paths if not part.is_file()]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{missing[0]}: this part of a model in {count} files is missing{more}: get it")
    return paths


def joined(
    parts: "Sequence[tuple[Path, Mapping[str, Any], Mapping[str, RawTensor]]]",
) -> "tuple[dict[str, Any], dict[str, RawTensor]]":
    """The metadata and tensors of all parts, which are (path, metadata, tensors) in order.

    Raises CheckpointError if one belongs to another model or is out of its place.
    """
    first, metadata, _ = parts[0]
    tensors: dict[str, RawTensor] = {}
    for number, (path, own, held) in enumerate(parts):
        if own.get("split.no") != number or own.get("split.count") != len(parts):
            stated = f"part {own.get('split.no')!r:.20} of {own.get('split.count')!r:.20}, counted from 0"
            raise CheckpointError(f"{path}: it states that it is {stated}: a file of another model, or renamed")
        keys = ("split.tensors.count", "general.architecture", "general.name")
        if foreign := [key for key in keys if key in own and own[key] != metadata.get(key)]:
            raise CheckpointError(f"{path}: {foreign[0]} differs from that of {first.name}: a part of another model")
        if twice := tensors.keys() & held.keys():
            raise CheckpointError(f"{path}: the tensor {min(twice)} is in an earlier part too: a part of another model")
        tensors |= held
    total = metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"{first}: the {len(parts)} parts have {len(tensors)} tensors in all, not {total}: one is of another model"
        )
    return {key: value for key, value in metadata.items() if not key.startswith("split.")}, tensors


def cut(path: Path) -> CheckpointError | None:
    """An error that says how to join the pieces of a file; None if the path is not named like a piece."""
    piece = PIECE.fullmatch(path.name)
    if piece is None:
        return None
    whole = piece["name"]
    return CheckpointError(
        f"{path}: a piece of a file that was cut into several; join all of them in order first: "
        f"cat {whole}?* > {whole} (in {path.parent})"
    )
