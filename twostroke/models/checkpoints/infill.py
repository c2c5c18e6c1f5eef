"""Fill-in-the-middle: the tokens by which a model is asked for what stands between two texts (Bavarian et al. 2022)."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tokenizers

# The texts of (prefix, suffix, middle) by family; the first whose tokens a vocabulary has counts.
_MARKS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma, Granite 4
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001 (DeepSeek's bars are full-width)
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<PRE>", "<SUF>", "<MID>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM 4.5
)
_MISTRAL = ("[PREFIX]", "[SUFFIX]")  # the suffix comes first, and nothing behind the prefix (Codestral)
_REPOSITORY = ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<repo_name>", "<reponame>")
_FILE = ("<|file_sep|>", "<|file_separator|>", "<file_sep>", "<filename>")
_ENDS = ("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "<PAD>", "▁<EOT>")
SNIPPET = "\n\n--- snippet ---\n\n"  # between files in a model without a token for it, as llama.cpp has it
REPOSITORY, FILE = "myproject\n", "filename\n"  # names that nobody has told, as llama.cpp has them

NO_INFILL = (
    "the model's tokenizer has no tokens for fill-in-the-middle: leave the suffix out, or serve a model for code, such "
    "as qwen2.5-coder"
)

Encode = Callable[[str], list[int]]  # text to ids, without special tokens


@dataclass(frozen=True)
class InfillTokens:
    """A model's tokens for fill-in-the-middle, by id."""

    # prefix, suffix: come before the two texts
    prefix: int
    suffix: int
    middle: int | None  # comes last; None in a family that puts the suffix first and ends with the prefix
    # repository, file: come before the names of a repository and of its files; None in a model without
    repository: int | None
    file: int | None
    ends: frozenset[int]  # ids that end an answer, besides those that end others
    unguarded: tuple[str, ...]  # texts of those that the tokenizer would find in ordinary text

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, stated: Mapping[str, int]) -> "InfillTokens | None":
        """Those of a vocabulary, or None.

        `stated`: ids that a file states, by llama.cpp's names: pre, suf, mid, pad, rep, sep.
        """

        def first(texts: Sequence[str], name: str) -> int | None:
            found = [id for text in texts if (id := backend.token_to_id(text)) is not None]
            return stated.get(name, found[0] if found else None)

        marks = next((ids for texts in _MARKS if None not in (ids := [*map(backend.token_to_id, texts)])), None)
        named = [stated.get(name, None if marks is None else marks[i]) for i, name in enumerate(("pre", "suf", "mid"))]
        if None in named and None not in (two := [*map(backend.token_to_id, _MISTRAL)]):
            named = [*two, None]
        prefix, suffix, middle = named
        if prefix is None or suffix is None or (middle is None and marks is not None):
            return None
        repository, file = first(_REPOSITORY, "rep"), first(_FILE, "sep")
        ends = [prefix, suffix, middle, repository, file, stated.get("pad"), *map(backend.token_to_id, _ENDS)]
        known = frozenset(id for id in ends if id is not None)
        added = backend.get_added_tokens_decoder()
        unguarded = tuple(added[id].content for id in sorted(known) if id in added and not added[id].special)
        return cls(prefix, suffix, middle, repository, file, known, unguarded)

    def prompt(
        self,
        encode: Encode,  # encodes ordinary text
        # prefix, suffix: the tokens of the two texts
        prefix: Sequence[int],
        suffix: Sequence[int],
        # (name, text) of other files of the repository, the least important first
        extra: Sequence[tuple[str, str]] = (),
        # leave out as many of these, from the first, as it takes to have at most so many tokens
        most: int | None = None,
    ) -> list[int]:
        """The prompt that asks for what stands between the two texts, without BOS."""
        if self.middle is None:
            asked = [self.suffix, *suffix, self.prefix, *prefix]
        else:
            asked = [self.prefix, *prefix, self.suffix, *suffix, self.middle]
        if not extra:
            return asked
        if self.file is None:
            files = [encode(SNIPPET + text) for _, text in extra]
            head, here = list[int](), list[int]()
        else:
            files = [[self.file, *encode(f"{name}\n"), *encode(text)] for name, text in extra]
            head = [] if self.repository is None else [self.repository, *encode(REPOSITORY)]
            here = [self.file, *encode(FILE)]
        room = None if most is None else most - len(head) - len(here) - len(asked)
        while files and room is not None and sum(map(len, files)) > room:
            del files[0]
        return [*head, *(id for file in files for id in file), *here, *asked] if files else asked

    def guarded(self, encode: Encode) -> Encode:
        """An `encode` that never makes one of these tokens of text: a text that spells one is encoded in two parts."""
        if not self.unguarded:
            return encode
        inside = re.compile("|".join(f"(?<={re.escape(one[0])})(?={re.escape(one[1:])})" for one in self.unguarded))
        return lambda text: [id for part in inside.split(text) for id in encode(part)]
