"""SentencePiece's tokenizer.model, read without its library, as the metadata of a GGUF file.

The file is a protocol buffer (sentencepiece_model.proto): pieces (text, score, type), the trainer's and the
normalizer's settings. Types of pieces have the numbers that GGUF files use.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.checkpoint import GgufTokenizerSource

BPE = 2  # of the trainer's model types
USER_DEFINED = 4  # of the types of pieces
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types


def read_sentencepiece(path: Path) -> GgufTokenizerSource:
    """Raises CheckpointError for a damaged file, and for models that are not BPE or normalize text."""
    try:
        fields = list(_fields(path.read_bytes()))
        trainer, normalizer = (_settings(fields, number) for number in (2, 3))
        pieces = [dict(_fields(value)) for number, value in fields if number == 1]
        texts = [piece[1].decode() for piece in pieces]
        scores = [struct.unpack("<f", piece.get(2, bytes(4)))[0] for piece in pieces]
        types = [piece.get(3, 1) for piece in pieces]
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    except (IndexError, KeyError, ValueError, AttributeError, TypeError, struct.error):
        raise CheckpointError(f"{path}: not a SentencePiece model, or damaged") from None
    if trainer.get(3, 1) != BPE or normalizer.get(2):
        what = "that normalizes text" if trainer.get(3, 1) == BPE else "of the Unigram kind"
        raise CheckpointError(
            f"{path}: a SentencePiece model {what} is not supported; put the tokenizer.json beside it that "
            "transformers' AutoTokenizer saves"
        )
    special = {"unknown": trainer.get(40, 0), "bos": trainer.get(41, 1), "eos": trainer.get(42, 2)}
    return GgufTokenizerSource(
        path,
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": [
                text.replace("▁", " ") if kind == USER_DEFINED else text
                for text, kind in zip(texts, types, strict=True)
            ],
            "tokenizer.ggml.scores": np.array(scores, np.float32),
            "tokenizer.ggml.token_type": np.array(types, np.int32),
            "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
            **{f"tokenizer.ggml.{name}_token_id": id for name, id in special.items() if 0 <= id < len(texts)},
        },
    )


def _settings(fields: list[tuple[int, Any]], number: int) -> dict[int, Any]:
    return {key: value for found, message in fields if found == number for key, value in _fields(message)}


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a message: integers, and bytes of everything else."""
    position = 0

    def varint() -> int:
        nonlocal position
        value, shift = 0, 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = varint()
        wire = key & 7
        if wire == VARINT:
            value = varint()
            yield key >> 3, value - (1 << 64) if value >> 63 else value
            continue
        if wire not in (FIXED64, BYTES, FIXED32):
            raise ValueError(f"wire type {wire}")
        size = varint() if wire == BYTES else 8 if wire == FIXED64 else 4
        if position + size > len(data):
            raise ValueError("a length runs past the end")
        yield key >> 3, data[position : position + size]
        position += size
