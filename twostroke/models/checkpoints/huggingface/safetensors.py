"""Memory-mapped safetensors files, single or in shards. Headers are not trusted."""

import json
import struct
from pathlib import Path

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.huggingface.json_files import read_json
from twostroke.models.formats.tensor import RawTensor
from twostroke.system.mapped_files import MappedFile

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_HEADER = 100 << 20  # the safetensors format's own limit


def read_safetensors(path: Path) -> dict[str, RawTensor]:
    """The tensors of one file, each as one row of bytes in the mapped file; `format` is the dtype that the file states.

    The layout: 8 bytes of header length, the header in JSON (name -> dtype, shape, data_offsets), the data.
    Raises CheckpointError naming the file, and the tensor if there is one.
    """
    try:
        buffer = MappedFile(path)
        (length,) = struct.unpack_from("<Q", buffer)
        if length > min(MAX_HEADER, len(buffer) - 8):
            raise ValueError(f"a header of {length} bytes in a file of {len(buffer)}")
        header = json.loads(buffer[8 : 8 + length])
        if not isinstance(header, dict):
            raise ValueError("the header is not an object")
    except (OSError, struct.error, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None
    data = np.frombuffer(buffer, np.uint8)[8 + length :]
    tensors: dict[str, RawTensor] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        source = f"{path}: {name}"
        if not name.isprintable():  # messages that name it are one line
            raise CheckpointError(f"{path}: {name!r}: a tensor's name must be printable")
        try:
            dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{source}: its entry in the header is damaged") from None
        if not all(type(number) is int and number >= 0 for number in (*shape, start, end)) or start > end:
            raise CheckpointError(f"{source}: shape {shape} at bytes {start} to {end} is not possible")
        if end > data.size:
            raise CheckpointError(
                f"{source}: truncated: data end at byte {end}, the file's at {data.size}; get it again"
            )
        tensors[name] = RawTensor(name, str(dtype), shape, data[start:end].reshape(1, -1), source)
    return tensors


def read_all(directory: Path) -> tuple[tuple[Path, ...], dict[str, RawTensor]]:
    """The weight files of a directory and the tensors in them. Raises CheckpointError."""
    if (directory / SINGLE).is_file():
        return (directory / SINGLE,), read_safetensors(directory / SINGLE)
    index = directory / INDEX
    if not index.is_file():
        raise CheckpointError(f"{directory}: there is neither {SINGLE} nor {INDEX}; only safetensors are read")
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not all(
        isinstance(file, str) and Path(file).name == file for file in places.values()
    ):
        raise CheckpointError(f"{index}: weight_map must map tensors to files beside it")
    shards = {file: read_safetensors(directory / file) for file in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in shards[file]:
            raise CheckpointError(f"{directory / file}: {name}: the tensor is missing, though {INDEX} says it is here")
    # Like transformers, tensors that the index does not list are read too.
    tensors = {name: tensor for shard in shards.values() for name, tensor in shard.items()}
    placed = {name: shards[file][name] for name, file in places.items()}
    return tuple(directory / file for file in shards), tensors | placed
