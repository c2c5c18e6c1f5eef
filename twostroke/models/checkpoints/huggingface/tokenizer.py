"""The tokenizer of a Hugging Face directory, as transformers 5 reads it.

The backend is tokenizer.json, or else tokenizer.model, or vocab.json with merges.txt. Further tokens are declared in
tokenizer_config.json. Only where it has no `added_tokens_decoder`, special_tokens_map.json and added_tokens.json count.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken

from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.checkpoint import GgufTokenizerSource
from twostroke.models.checkpoints.gguf import tokenizer as gguf_tokenizer
from twostroke.models.checkpoints.huggingface.json_files import read_json, read_optional
from twostroke.models.checkpoints.sentencepiece_model import read_sentencepiece

log = logging.getLogger(__name__)

NAMED = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")  # the order in which transformers adds them
# The splits of tokenizers that are given as vocab.json and merges.txt, by tokenizer_class without "Fast".
PRE_BY_CLASS = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}
FLAGS = ("lstrip", "rstrip", "normalized", "single_word", "special")


def read_directory(directory: Path) -> dict[str, Any]:
    """The arguments of `Tokenizer`. Raises CheckpointError if it is missing, damaged or of an unknown kind."""
    try:
        return _read(directory)
    except (AttributeError, LookupError, TypeError, ValueError) as error:  # a value is of another kind than in any file
        raise CheckpointError(f"{directory}: the tokenizer's files cannot be read: {error!r:.100}") from None


def _read(directory: Path) -> dict[str, Any]:
    config = read_optional(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        config |= read_optional(directory / "special_tokens_map.json")
    special = {f"{key}_token": _text_of(value) for key in NAMED if (value := config.get(f"{key}_token"))}
    backend, prefixed = _backend(directory, config, special)
    _add_tokens(backend, _declared(directory, config), directory)
    model = read_optional(directory / "config.json")
    text = model.get("text_config")
    model = {**text, **model} if isinstance(text, dict) else model
    _check_size(backend, model.get("vocab_size"), directory)
    eos_ids = _eos_ids(directory, model)
    if "eos_token" in special and (index := backend.token_to_id(special["eos_token"])) is not None:
        eos_ids.add(index)
    # The post-processor in tokenizer.json determines the affixes, not the config's add_bos_token.
    around = backend.encode("", add_special_tokens=True).ids
    split = next((at for at, index in enumerate(around) if index in eos_ids), len(around))
    return {
        "backend": backend,
        "where": directory,
        "special_tokens": special,
        "eos_ids": eos_ids,
        "affixes": prefixed or (around[:split], around[split:]),
        "templates": _templates(directory, config),
    }


def _backend(
    directory: Path, config: Mapping[str, Any], special: dict[str, str]
) -> tuple[tokenizers.Tokenizer, tuple[list[int], list[int]] | None]:
    """The backend, and the ids around each prompt where it has no post-processor that knows them."""
    path = directory / "tokenizer.json"
    if path.is_file():
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer that can be read: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        return backend, None
    if (directory / "tokenizer.model").is_file():
        source = read_sentencepiece(directory / "tokenizer.model")
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        source = _byte_level(directory, config)
    else:
        raise CheckpointError(
            f"{directory}: tokenizer.json is missing, and so are tokenizer.model, or vocab.json with merges.txt; "
            "a directory needs one of them beside the weights"
        )
    meta, backend = source.metadata, gguf_tokenizer.build_backend(source)
    for name in ("bos", "eos"):
        if (id := meta.get(f"tokenizer.ggml.{name}_token_id")) is not None:
            special.setdefault(f"{name}_token", meta["tokenizer.ggml.tokens"][id])
    sides: list[list[int]] = []
    for name, default in (("bos", meta["tokenizer.ggml.model"] == "llama"), ("eos", False)):
        stated = config.get(f"add_{name}_token")
        id = backend.token_to_id(special[f"{name}_token"]) if f"{name}_token" in special else None
        sides.append([id] if id is not None and (default if stated is None else stated) else [])
    return backend, (sides[0], sides[1])


def _byte_level(directory: Path, config: Mapping[str, Any]) -> GgufTokenizerSource:
    """vocab.json and merges.txt as the metadata of a GGUF file."""
    kind = str(config.get("tokenizer_class")).removesuffix("Fast")
    if kind not in PRE_BY_CLASS:
        raise CheckpointError(
            f"{directory}: vocab.json of a {kind:.40} does not tell how text is split; "
            "put the tokenizer.json beside it that transformers' AutoTokenizer saves"
        )
    ids = read_json(directory / "vocab.json")
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
        raise CheckpointError(f"{directory / 'vocab.json'}: the ids must be 0 to {len(ids) - 1}")
    try:
        lines = (directory / "merges.txt").read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory / 'merges.txt'}: cannot be read ({error})") from None
    return GgufTokenizerSource(
        directory / "vocab.json",
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": PRE_BY_CLASS[kind],
            "tokenizer.ggml.tokens": sorted(ids, key=ids.__getitem__),
            "tokenizer.ggml.merges": [line for line in lines if line.strip() and not line.startswith("#version")],
            "tokenizer.ggml.token_type": np.ones(len(ids), np.int32),
        },
    )


def _declared(directory: Path, config: Mapping[str, Any]) -> list[tuple[int | None, AddedToken]]:
    """(stated id, token) of all tokens that files beside the backend declare, in transformers' order."""
    found: list[tuple[int | None, AddedToken]] = []
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    extra = list(extra.values() if isinstance(extra, dict) else extra)
    named = [value for key in NAMED if (value := config.get(f"{key}_token"))]
    names = {_text_of(value) for value in named}
    if (decoder := config.get("added_tokens_decoder")) is not None:
        for id, token in sorted(decoder.items(), key=lambda item: int(item[0])):
            flags = {flag: token[flag] for flag in FLAGS if flag in token}
            flags["special"] = flags.get("special", False) or token["content"] in names
            found.append((int(id), AddedToken(token["content"], **flags)))
    else:
        legacy = read_optional(directory / "added_tokens.json")
        specials = names | {_text_of(token) for token in extra}
        for text, id in sorted(legacy.items(), key=lambda item: item[1]):
            found.append((id, AddedToken(text, normalized=text not in specials, special=text in specials)))
    known = {token.content for _, token in found}
    for token in [*named, *extra]:
        if (text := _text_of(token)) not in known:
            known.add(text)
            found.append((None, AddedToken(text, normalized=False, special=True)))
    return found


def _add_tokens(backend: tokenizers.Tokenizer, declared: list[tuple[int | None, AddedToken]], where: Path) -> None:
    """Add them as transformers does, which gives a token that is new the next free id, whatever id is stated."""
    present = {token.content for token in backend.get_added_tokens_decoder().values()}
    backend.add_tokens([token for id, token in declared if id is not None or token.content not in present])
    for id, token in declared:
        if id is not None and (given := backend.token_to_id(token.content)) != id:
            log.warning(
                "%s: the token %s has id %s in one file and %s in the tokenizer, which counts, as in transformers",
                where, token.content, id, given,
            )  # fmt: skip


def _check_size(backend: tokenizers.Tokenizer, stated: Any, where: Path) -> None:
    size = backend.get_vocab_size(with_added_tokens=True)
    if isinstance(stated, int) and size > stated:
        log.warning(
            "%s: the tokenizer has %d tokens and the model %d: a prompt that has one of the last is refused",
            where, size, stated,
        )  # fmt: skip


def _eos_ids(directory: Path, model: Mapping[str, Any]) -> set[int]:
    """The ids that end an answer, as in transformers: of generation_config.json, else of config.json."""
    eos = read_optional(directory / "generation_config.json").get("eos_token_id")
    eos = model.get("eos_token_id") if eos is None else eos
    eos_ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(id) is int for id in eos_ids):
        raise CheckpointError(f"{directory}: eos_token_id must be an id or a list of ids, not {eos!r:.40}")
    return set(eos_ids)


def _templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Template files override the config's entry, as in transformers."""
    files = {file.stem: file for file in (directory / "additional_chat_templates").glob("*.jinja")}
    if (main := directory / "chat_template.jinja").is_file():
        files["default"] = main
    if files:
        return {name: file.read_text(encoding="utf-8") for name, file in files.items()}
    # The last is where processors of models with vision had it.
    entry = config.get("chat_template") or read_optional(directory / "chat_template.json").get("chat_template")
    if isinstance(entry, str):
        return {"default": entry}
    return {one["name"]: one["template"] for one in entry or []}


def _text_of(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
