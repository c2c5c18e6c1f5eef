"""The tokenizer that a GGUF file's metadata describes, as a `tokenizers.Tokenizer` without a post-processor.

The ids before and after each prompt, the ids that end an answer, and the chat templates are told beside it.
"""

import logging
from enum import IntEnum
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, normalizers
from tokenizers.models import BPE

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.checkpoint import GgufTokenizerSource
from twostroke.models.checkpoints.pre_tokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer

log = logging.getLogger(__name__)


class TokenType(IntEnum):
    """The values of `tokenizer.ggml.token_type`; a token of any type can be decoded."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# llama.cpp's other kinds, for messages.
OTHER_MODELS = {
    "bert": "WordPiece, of encoders",
    "t5": "Unigram",
    "rwkv": "RWKV's",
    "plamo2": "PLaMo 2's",
    "none": "the file has no tokenizer",
    "no_vocab": "the file has no tokenizer",
}


def read_gguf(source: GgufTokenizerSource) -> dict[str, Any]:
    """The arguments of `checkpoints.tokenizer.Tokenizer`.

    Raises CheckpointError for a kind that is not supported, or for ids outside the vocabulary.
    """
    meta, backend = source.metadata, build_backend(source)
    tokens = meta["tokenizer.ggml.tokens"]
    ids: dict[str, int] = {}
    for name in ("bos", "eos", "eot", "eom", "unk", "pad"):
        key = {"unk": "unknown", "pad": "padding"}.get(name, name)
        index = meta.get(f"tokenizer.ggml.{key}_token_id", _default_id(source, name))
        if index is not None and not 0 <= index < len(tokens):
            raise CheckpointError(f"{source.path}: tokenizer.ggml.{key}_token_id {index} is outside the vocabulary")
        if index is not None:
            ids[name] = index
    prefix = [ids["bos"]] if "bos" in ids and _adds_bos(source) else []
    suffix = [ids["eos"]] if "eos" in ids and meta.get("tokenizer.ggml.add_eos_token") else []
    named = "tokenizer.chat_template."
    templates = {key.removeprefix(named): text for key, text in meta.items() if key.startswith(named)}
    if "tokenizer.chat_template" in meta:
        templates["default"] = meta["tokenizer.chat_template"]
    return {
        "backend": backend,
        "where": source.path,
        "special_tokens": {f"{name}_token": tokens[ids[name]] for name in ("bos", "eos", "unk", "pad") if name in ids},
        "eos_ids": [ids[name] for name in ("eos", "eot", "eom") if name in ids],
        "affixes": (prefix, suffix),
        "templates": templates,
        "infill": _infill(source, len(tokens)),
    }


def _infill(source: GgufTokenizerSource, size: int) -> dict[str, int]:
    """The stated ids for fill-in-the-middle; those of the first three had other names before."""
    found: dict[str, int] = {}
    for name, old in (("pre", "prefix"), ("suf", "suffix"), ("mid", "middle"), ("pad", ""), ("rep", ""), ("sep", "")):
        for key in (f"tokenizer.ggml.fim_{name}_token_id", f"tokenizer.ggml.{old}_token_id"):
            id = source.metadata.get(key) if name not in found else None
            if id is not None and not 0 <= id < size:
                raise CheckpointError(f"{source.path}: {key} {id} is outside the vocabulary")
            if id is not None:
                found[name] = int(id)
    return found


def build_backend(source: GgufTokenizerSource) -> Tokenizer:
    """The tokenizer that `tokenizer.ggml.*` describe. Raises CheckpointError for a kind that is not supported."""
    model = source.metadata.get("tokenizer.ggml.model")
    if model == "gpt2":
        return _byte_level_bpe(source)
    if model == "llama":
        return _sentencepiece_bpe(source)
    what = OTHER_MODELS.get(str(model))
    what = f" ({what})" if what else ""
    raise CheckpointError(
        f"{source.path}: tokenizer.ggml.model is {model!r:.40}{what}; Twostroke knows 'gpt2' and 'llama'"
    )


def _adds_bos(source: GgufTokenizerSource) -> bool:
    """Whether a prompt begins with BOS, as the file states it, else the default of its kind of tokenizer."""
    stated = source.metadata.get("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    return source.metadata["tokenizer.ggml.model"] == "llama" or _pre_tokenizer(source).add_bos


def _default_id(source: GgufTokenizerSource, name: str) -> int | None:
    """The id of a special token where a file does not state it: SentencePiece's own, if it is a control token."""
    index = {"bos": 1, "eos": 2}.get(name)
    types = source.metadata.get("tokenizer.ggml.token_type", ())
    if source.metadata["tokenizer.ggml.model"] != "llama" or index is None or len(types) <= index:
        return None
    return index if types[index] == TokenType.CONTROL else None


def _pre_tokenizer(source: GgufTokenizerSource) -> PreTokenizer:
    return PRE_TOKENIZERS.get(str(source.metadata.get("tokenizer.ggml.pre")), DEFAULT)


def _warn_of_default(source: GgufTokenizerSource) -> None:
    """One line for a file whose splits are unknown, so that its tokens may be others than in training."""
    name = source.metadata.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        what = "is missing" if name is None else f"is {name!r:.60}, which is unknown"
        log.warning(
            "%s: tokenizer.ggml.pre %s: text is split as llama.cpp does by default, maybe not as in training; "
            "convert the model again for a file that names it",
            source.path, what,
        )  # fmt: skip


def _byte_level_bpe(source: GgufTokenizerSource) -> Tokenizer:
    pre = _pre_tokenizer(source)
    _warn_of_default(source)
    tokens, types = _vocabulary(source)
    try:
        merges = [(left, right) for left, right in (merge.split(" ") for merge in _required(source, "merges"))]
    except ValueError:
        raise CheckpointError(f"{source.path}: an entry of tokenizer.ggml.merges is not a pair of tokens") from None
    backend = _bpe(source, tokens, merges, ignore_merges=pre.ignore_merges)
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre.build()
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, tokens, types, normalized=False)
    return backend


def _sentencepiece_bpe(source: GgufTokenizerSource) -> Tokenizer:
    tokens, types = _vocabulary(source)
    scores = np.asarray(_required(source, "scores"), np.float32)
    unknown = source.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if len(scores) != len(tokens) or not 0 <= unknown < len(tokens):
        raise CheckpointError(f"{source.path}: tokenizer.ggml.scores or .unknown_token_id does not fit the vocabulary")
    merges = _merges_by_score(tokens, types, scores)
    backend = _bpe(source, tokens, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True)
    spaces, back = normalizers.Replace(" ", "▁"), [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    prefix = bool(source.metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    backend.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if prefix else back)
    # SentencePiece matches user-defined symbols in normalized text, where a space and a literal "▁" are equal. With a
    # space prefix this is not possible: the normalizer would put the prefix before the symbols' text too.
    _add_tokens(backend, tokens, types, normalized=not prefix)
    return backend


def _merges_by_score(tokens: list[str], types: list[int], scores: np.ndarray) -> list[tuple[str, str]]:
    """Merge rules equivalent to SentencePiece, which joins the neighbours whose joint piece has the highest score.

    Every split of a piece into two pieces becomes a rule, in descending order of the piece's score. The order among
    the splits of one piece has no effect: merges inside a piece's span proceed as if the piece were alone, so only one
    of its splits is ever applied. Distinct pieces of equal score are ordered by id here, from left to right in
    SentencePiece; its trainer makes no such pieces.
    """
    normal = {token for token, kind in zip(tokens, types, strict=True) if kind == TokenType.NORMAL}
    merges: list[tuple[str, str]] = []
    for index in np.argsort(-scores, kind="stable").tolist():
        if types[index] == TokenType.NORMAL:
            piece = tokens[index]
            for cut in range(1, len(piece)):
                if (left := piece[:cut]) in normal and (right := piece[cut:]) in normal:
                    merges.append((left, right))
    return merges


def _bpe(source: GgufTokenizerSource, tokens: list[str], merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(f"{source.path}: tokenizer.ggml.tokens has {len(tokens) - len(vocabulary)} duplicates")
    try:
        return Tokenizer(BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{source.path}: the tokenizer's merges do not fit its vocabulary: {error}") from None


def _add_tokens(backend: Tokenizer, tokens: list[str], types: list[int], *, normalized: bool) -> None:
    """Add tokens that are matched whole in the text; control tokens only if special tokens are parsed."""
    typed = list(zip(tokens, types, strict=True))
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text, t in typed if t in special])
    user = [text for text, kind in typed if kind == TokenType.USER_DEFINED]
    backend.add_tokens([AddedToken(text, normalized=normalized, special=False) for text in user])


def _vocabulary(source: GgufTokenizerSource) -> tuple[list[str], list[int]]:
    # As in llama.cpp, tokens without a type are text, and an empty token is never met.
    tokens = [text or f"[EMPTY_{index}]" for index, text in enumerate(_required(source, "tokens"))]
    types = np.asarray(source.metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))).tolist()
    if len(types) != len(tokens):
        raise CheckpointError(f"{source.path}: {len(tokens)} tokenizer.ggml.tokens but {len(types)} token types")
    return tokens, types


def _required(source: GgufTokenizerSource, key: str) -> Any:
    value = source.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        raise CheckpointError(f"{source.path}: tokenizer.ggml.{key} is missing")
    return value
