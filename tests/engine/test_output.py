"""Tracks: the generated text and its end, against a brute-force definition."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.tiny import write_tokenizer
from twostroke.engine.output import ChoiceOutput, Token
from twostroke.models.checkpoints.checkpoint import HfTokenizerSource
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.sampling.draw import Sampled
from twostroke.sampling.params import SamplingParams

EOS = 1


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer.from_source(HfTokenizerSource(directory))


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """The id of every byte, so that a test can split a text anywhere, even inside characters."""
    singles = {id: tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)}
    found = {data[0]: id for id, data in singles.items() if len(data) == 1}
    assert len(found) == 256
    return found


def follow(tokenizer: Tokenizer, ids: Sequence[int], full_at: int | None = None, **params: Any) -> list[Token]:
    """The tokens up to the one that ends it."""
    track = ChoiceOutput(SamplingParams(**params), tokenizer, choice=2)
    tokens: list[Token] = []
    for index, id in enumerate(ids):
        tokens.append(track.push(Sampled(id, -0.5, top=((id, -0.5),)), full=index == full_at))
        assert tokens[-1].finish_reason == track.finish_reason
        if track.finish_reason is not None:
            break
    assert track.ids == [token.id for token in tokens] == [sampled.id for sampled in track.sampled]
    assert all(token.finish_reason is None for token in tokens[:-1])
    return tokens


def text_of(tokens: list[Token]) -> str:
    return "".join(token.text for token in tokens)


def spelled(text: str, byte_ids: dict[int, int]) -> list[int]:
    return [byte_ids[byte] for byte in text.encode()]


def test_tokens_as_the_caller_sees_them(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the fox")
    tokens = follow(tokenizer, [*ids, EOS, 5])
    assert text_of(tokens) == "the fox"
    assert tokens[0] == Token(ids[0], tokens[0].text, -0.5, ((ids[0], -0.5),), 0, 2, None)
    assert tokens[-1] == Token(EOS, "", -0.5, ((EOS, -0.5),), len(ids), 2, "stop")


def test_what_ends_it(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    a, b, c = spelled("abc", byte_ids)
    ids = [a, b, EOS, c, a, b]

    def ending(**params: Any) -> tuple[int, str, str | None]:
        tokens = follow(tokenizer, ids, **params)
        return len(tokens), text_of(tokens), tokens[-1].finish_reason

    assert ending() == (3, "ab", "stop")
    assert ending(ignore_eos=True) == (6, "abcab", None)
    assert ending(ignore_eos=True, stop_token_ids=(EOS,)) == (3, "ab", "stop"), "asked for by name"
    assert ending(stop_token_ids=(b,)) == (2, "a", "stop"), "the ending token's own text is left out"
    assert ending(ignore_eos=True, stop_token_ids=(c,)) == (4, "ab", "stop")
    assert ending(max_tokens=1) == (1, "a", "length")
    assert ending(max_tokens=3) == (3, "ab", "stop"), "an ending token that comes last ends it by itself"
    assert ending(max_tokens=4, ignore_eos=True) == (4, "abc", "length")
    assert ending(max_tokens=None, ignore_eos=True) == (6, "abcab", None)
    assert ending(full_at=1) == (2, "ab", "length")
    assert ending(full_at=2) == (3, "ab", "stop")
    assert ending(stop=("b",)) == (2, "a", "stop")
    assert ending(stop=("b",), max_tokens=2) == (2, "a", "stop"), "a stop string comes before max_tokens"
    assert ending(stop=("b",), full_at=1) == (2, "a", "stop")
    assert ending(stop=("ca",), ignore_eos=True) == (5, "ab", "stop")
    assert ending(stop=("bc",), ignore_eos=True) == (4, "a", "stop"), "a special token between has no text"


def test_min_tokens(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    """No token with index 0 to min_tokens - 1 ends the text; text held back is still emitted."""
    a, b = spelled("ab", byte_ids)
    ids = [EOS, a, EOS, b, EOS]
    for min_tokens, count in ((0, 1), (1, 3), (2, 3), (3, 5), (4, 5)):
        assert len(follow(tokenizer, ids, min_tokens=min_tokens)) == count
        assert (
            len(follow(tokenizer, [a, b, a, b, b, b], stop=("b",), min_tokens=min_tokens))
            == (2, 2, 4, 4, 5)[min_tokens]
        )
    assert follow(tokenizer, ids, min_tokens=5)[-1].finish_reason is None
    tokens = follow(tokenizer, ids, min_tokens=5, max_tokens=5)
    assert (text_of(tokens), tokens[-1].finish_reason) == ("ab", "length")
    kept = follow(tokenizer, [a, b, a, EOS], stop=("ab",), min_tokens=2)
    assert (text_of(kept), kept[-1].finish_reason) == ("aba", "stop"), "the first is text; the second never came"


def test_a_stop_string_may_begin_before_min_tokens_and_end_after(
    tokenizer: Tokenizer, byte_ids: dict[int, int]
) -> None:
    tokens = follow(tokenizer, spelled("xSTOPy", byte_ids), stop=("STOP",), min_tokens=3)
    assert (text_of(tokens), len(tokens), tokens[-1].finish_reason) == ("x", 5, "stop")
    overlapping = follow(tokenizer, spelled("ababx", byte_ids), stop=("aba",), min_tokens=3)
    assert text_of(overlapping) == "ababx", "the second begins inside of the first, and is not complete"
    overlapping = follow(tokenizer, spelled("ababa", byte_ids), stop=("aba",), min_tokens=3)
    assert (text_of(overlapping), overlapping[-1].finish_reason) == ("ab", "stop")


def test_held_back_text_is_flushed(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    ids = spelled("aST", byte_ids)
    for tokens in (
        follow(tokenizer, ids, stop=("STOP",), max_tokens=3),
        follow(tokenizer, ids, stop=("STOP",), full_at=2),
        follow(tokenizer, [*ids, EOS], stop=("STOP",)),
        follow(tokenizer, ids, stop=("STOP",), max_tokens=3, min_tokens=3),
    ):
        assert [token.text for token in tokens[:3]][:2] == ["a", ""]
        assert text_of(tokens) == "aST"
    half = spelled("é", byte_ids)[:1]
    assert text_of(follow(tokenizer, half, max_tokens=1)) == "�"
    assert text_of(follow(tokenizer, [*half, EOS])) == "�"


def expected(pieces: list[bytes], stops: Sequence[str], min_tokens: int) -> tuple[str, int, str]:
    """(text, tokens, reason) by brute force; the last piece is at max_tokens."""
    seen = ""
    for count in range(1, len(pieces) + 1):
        data = b"".join(pieces[:count])
        # Only complete text: an incomplete UTF-8 sequence is not yet text.
        text = data.decode("utf-8", errors="ignore")
        if count > min_tokens:
            for end in range(len(seen) + 1, len(text) + 1):
                found = [stop for stop in stops if text[:end].endswith(stop)]
                if found:
                    return text[: end - max(map(len, found))], count, "stop"
        seen = text
    return b"".join(pieces).decode("utf-8", errors="replace"), len(pieces), "length"


texts = st.text(alphabet="abé😀\n", min_size=1, max_size=14)


@given(texts, st.lists(st.text(alphabet="abé😀", min_size=1, max_size=4), max_size=1), st.integers(0, 12))
@example("aabaab", ["aab"], 3)
@settings(max_examples=300, deadline=None)
def test_any_text_cut_into_bytes(
    tokenizer: Tokenizer, byte_ids: dict[int, int], text: str, stops: list[str], min_tokens: int
) -> None:
    ids = spelled(text, byte_ids)
    min_tokens = min(min_tokens, len(ids))
    tokens = follow(tokenizer, ids, stop=tuple(stops), min_tokens=min_tokens, max_tokens=len(ids))
    wanted = expected([bytes([byte]) for byte in text.encode()], stops, min_tokens)
    assert (text_of(tokens), len(tokens), tokens[-1].finish_reason) == wanted


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_any_tokens_and_several_stop_strings(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(2, tokenizer.vocab_size - 1) | st.sampled_from(tokenizer.encode("the dog"))))
    whole = tokenizer.decode(ids)
    cuts = st.tuples(st.integers(0, max(0, len(whole) - 1)), st.integers(1, 5)).map(lambda at: whole[at[0] :][: at[1]])
    stops = [stop for stop in data.draw(st.lists(cuts, max_size=3)) if stop and "�" not in stop]
    tokens = follow(tokenizer, ids, stop=tuple(stops))
    ends = [whole.find(stop) + len(stop) for stop in stops]
    if ends:
        longest = max((stop for stop in stops if whole[: min(ends)].endswith(stop)), key=len)
        assert text_of(tokens) == whole[: min(ends) - len(longest)]
        assert tokens[-1].finish_reason == "stop"
    else:
        assert tokens == [] or tokens[-1].finish_reason is None
        assert whole.startswith(text_of(tokens))
        finished = follow(tokenizer, [*ids, EOS])
        assert text_of(finished) == whole


class Brackets:
    """Reads what is within brackets as no plain text."""

    shown = frozenset({EOS})

    @dataclass(frozen=True)
    class Part:
        written: str
        plain: bool

    def __init__(self) -> None:
        self._inside = False

    def __call__(self) -> "Brackets":
        return Brackets()

    def spans(self, text: str, ended: bool = False) -> list[Part]:
        parts: list[Brackets.Part] = []
        for char in text:
            self._inside = (self._inside or char == "[") and char != "]"
            parts.append(Brackets.Part(char, not self._inside))
        return parts


def test_stop_strings_where_a_reader_allows_them(tokenizer: Tokenizer, byte_ids: dict[int, int]) -> None:
    """Not within what it reads, nor across its edge; a fork goes on from the same place."""
    for text, told in (("a[xstop]b stop c", "a[xstop]b "), ("st[op]", "st[op]"), ("[stop", "[stop")):
        options: Any = {"stop": ("stop",), "reader": Brackets()}
        tokens = follow(tokenizer, [*spelled(text, byte_ids), EOS], **options)
        assert text_of(tokens) == told
        track = ChoiceOutput(SamplingParams(**options), tokenizer, choice=0)
        before = [track.push(Sampled(token.id)) for token in tokens[:3]]
        fork = track.fork()
        assert text_of([*before, *(fork.push(Sampled(token.id)) for token in tokens[3:])]) == told
