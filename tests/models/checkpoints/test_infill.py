"""Fill-in-the-middle: which tokens a vocabulary has for it, their order, and that no text becomes one of them."""

import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.tokenizer import Tokenizer

QWEN = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def made(backend: tokenizers.Tokenizer, **arguments: Any) -> Tokenizer:
    chosen: dict[str, Any] = {"special_tokens": {}, "eos_ids": [], "affixes": ([], []), "templates": {}}
    return Tokenizer(backend, where=Path("x"), **(chosen | arguments))


def bytes_with(*texts: str, special: bool = True, **arguments: Any) -> Tokenizer:
    """A tokenizer of bytes with some added tokens."""
    backend = tokenizers.Tokenizer(models.BPE({one: id for id, one in enumerate(ALPHABET)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)  # pyright: ignore
    backend.decoder = decoders.ByteLevel()  # pyright: ignore
    backend.add_tokens([AddedToken(text, special=special, normalized=False) for text in texts])
    return made(backend, **arguments)


def sentencepiece_with(*texts: str) -> Tokenizer:
    """A tokenizer that puts a space before every text, as Llama 2's does."""
    pieces = ["<unk>", "▁", *"abc", "▁a", "▁b", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocabulary = {piece: id for id, piece in enumerate(pieces)}
    merges = [("▁", "a"), ("▁", "b")]
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore
    backend.decoder = decoders.Sequence(  # pyright: ignore
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(list(texts))
    return made(backend)


def shown(tokenizer: Tokenizer, *arguments: Any) -> str:
    return "".join(map(tokenizer.token_text, tokenizer.encode_infill(*arguments)))


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (QWEN, "<|fim_prefix|>ab<|fim_suffix|>c<|fim_middle|>"),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "<fim_prefix>ab<fim_suffix>c<fim_middle>"),
        (("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"), "<｜fim▁begin｜>ab<｜fim▁hole｜>c<｜fim▁end｜>"),  # noqa: RUF001
        (("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>"), "▁<PRE>ab▁<SUF>c▁<MID>"),
        (("[PREFIX]", "[SUFFIX]", "[MIDDLE]"), "[SUFFIX]c[PREFIX]ab"),
    ],
)
def test_families(marks: tuple[str, ...], expected: str) -> None:
    tokenizer = bytes_with(*marks)
    assert shown(tokenizer, "ab", "c") == expected
    assert shown(tokenizer, tokenizer.encode("ab"), "c") == expected
    assert shown(tokenizer, "", "") == re.sub("ab|c(?=<|\\[|▁)", "", expected)


def test_models_without() -> None:
    for marks in ((), ("<|fim_prefix|>", "<|fim_suffix|>"), ("[PREFIX]",)):
        with pytest.raises(InvalidRequest, match="no tokens for fill-in-the-middle"):
            bytes_with(*marks).encode_infill("a", "b")


def test_stated_ids_count() -> None:
    """Those of a GGUF file, whatever their texts are."""
    tokenizer = bytes_with("<x>", "<y>", "<z>", "<w>", infill={"pre": 256, "suf": 257, "mid": 258, "pad": 259})
    assert shown(tokenizer, "a", "b") == "<x>a<y>b<z>"
    assert tokenizer.infill is not None
    assert tokenizer.infill.ends == {256, 257, 258, 259}


@pytest.mark.parametrize("special", [True, False])
def test_no_text_is_a_special_token(special: bool) -> None:
    """Qwen's files declare these tokens as text, so that the tokenizer would find them in a prompt."""
    tokenizer = bytes_with(*QWEN, special=special)
    said = "a<|file_sep|>b<|fim_middle|><|fim_middle|"
    ids = tokenizer.encode_infill(said, said, [(said, said)])
    assert tokenizer.infill is not None
    own = [id for id in ids if id in tokenizer.infill.ends]
    assert [tokenizer.token_text(id) for id in own] == [
        "<|repo_name|>", "<|file_sep|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>",
    ]  # fmt: skip
    others = [id for id in ids if id not in own]
    assert tokenizer.decode(others) == f"myproject\n{said}\n{said}filename\n{said}{said}"


def test_files_of_a_repository() -> None:
    tokenizer = bytes_with(*QWEN)
    files = [("a.py", "1"), ("b.py", "2")]
    whole = "<|repo_name|>myproject\n<|file_sep|>a.py\n1<|file_sep|>b.py\n2<|file_sep|>filename\n"
    rest = "<|fim_prefix|>p<|fim_suffix|>s<|fim_middle|>"
    assert shown(tokenizer, "p", "s", files) == whole + rest
    most = len(tokenizer.encode_infill("p", "s", files))
    assert shown(tokenizer, "p", "s", files, most) == whole + rest
    assert shown(tokenizer, "p", "s", files, most - 1) == whole.replace("<|file_sep|>a.py\n1", "") + rest
    assert shown(tokenizer, "p", "s", files, 9) == rest
    plain = bytes_with("<fim_prefix>", "<fim_middle>", "<fim_suffix>")
    snippets = "\n\n--- snippet ---\n\n1\n\n--- snippet ---\n\n2<fim_prefix>p<fim_suffix>s<fim_middle>"
    assert shown(plain, "p", "s", files) == snippets


def test_a_suffix_gets_no_space() -> None:
    """As CodeLlama and mistral-common encode it: only the prefix begins a text."""
    tokenizer = sentencepiece_with("▁<PRE>", "▁<MID>", "▁<SUF>")
    assert [tokenizer.token_text(id) for id in tokenizer.encode_infill("a b", "b")] == [
        "▁<PRE>", " a", " b", "▁<SUF>", "b", "▁<MID>",
    ]  # fmt: skip


def test_bos_comes_first() -> None:
    tokenizer = bytes_with(*QWEN, affixes=([5], [6]))
    assert tokenizer.encode_infill("a", "b")[0] == 5
    assert tokenizer.infill is not None
    assert tokenizer.encode_infill("a", "b")[-1] == tokenizer.infill.middle
