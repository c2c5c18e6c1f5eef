"""The exact bytes of each token, as a tokenizer's decoder implies them.

Two kinds of decoder are known: byte-level BPE, which spells bytes in an alphabet of its own (GPT-2), and that of
SentencePiece, which writes spaces as U+2581 and bytes without a character as <0xNN>.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tokenizers

from twostroke.errors import CheckpointError, InvalidRequest

_SENTENCEPIECE_STEPS = [
    {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP_STEP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


class TokenBytes(dict[int, bytes]):
    """The bytes of each token, read when they are first asked for. Raises InvalidRequest for a negative id."""

    def __init__(self, read: Callable[[int], bytes], vocab_size: int) -> None:
        super().__init__()
        self._read, self._vocab_size = read, vocab_size

    def __missing__(self, id: int) -> bytes:
        if id < 0:
            raise InvalidRequest(f"token ids are not negative: {id}")
        # Embeddings are often padded past the vocabulary; such an id has no text, as in transformers.
        known = self[id] = self._read(id) if id < self._vocab_size else b""
        return known


def byte_reader(backend: tokenizers.Tokenizer, where: Path) -> tuple[Callable[[int], bytes], bool]:
    """(id to bytes, whether one leading space of a text is stripped). Raises CheckpointError for other decoders."""
    decoder = backend.decoder
    state: dict[str, Any] = {"type": None} if decoder is None else json.loads(decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    added = backend.get_added_tokens_decoder()

    def byte_level(id: int) -> bytes:
        text: str = backend.id_to_token(id) or ""  # a gap among the ids of a Hugging Face tokenizer
        if id in added:
            return text.encode()  # not spelled in the byte alphabet
        try:
            return bytes(map(_BYTE_OF.__getitem__, text))
        except KeyError:
            return text.encode()

    def sentencepiece(id: int) -> bytes:
        text = backend.id_to_token(id) or ""
        if id in added and added[id].special:
            return text.encode()
        if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
            return bytes.fromhex(text[3:5])
        return text.replace("▁", " ").encode()

    if [step["type"] for step in steps] == ["ByteLevel"]:
        return byte_level, False
    if steps[:3] == _SENTENCEPIECE_STEPS and steps[3:] in ([], [_STRIP_STEP]):
        return sentencepiece, steps[3:] == [_STRIP_STEP]
    raise CheckpointError(f"{where}: a tokenizer with the decoder {json.dumps(state)} is not supported")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map of characters to bytes: printable Latin-1 maps to itself, U+0100 onwards to the other bytes."""
    itself = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(itself)]
    return {chr(byte): byte for byte in itself} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
