"""Incremental text equals the text of all tokens, even if characters or stop strings are split."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from twostroke.errors import InvalidRequest
from twostroke.models.checkpoints.text_stream import StopStrings, TextStream


def stream_of(tokens: list[bytes], *, strip: bool = False) -> TextStream:
    return TextStream(tokens.__getitem__, strip_leading_space=strip)


def cut(data: bytes, points: list[int]) -> list[bytes]:
    """The same bytes in pieces; points beyond the end and equal points give empty pieces."""
    edges = [0, *sorted(min(point, len(data)) for point in points), len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@given(st.lists(st.binary(max_size=5)), st.booleans())
@example([b"", b" ", b" a"], True)
@example([b"\xf0\x9f", b"\x98", b"\x80 \xe2\x82", b"A\xff"], False)
def test_any_bytes_stream_to_the_text_of_the_whole(tokens: list[bytes], strip: bool) -> None:
    stream = stream_of(tokens, strip=strip)
    text = "".join(stream.push(index) for index in range(len(tokens))) + stream.flush()
    data = b"".join(tokens)
    assert text == (data.removeprefix(b" ") if strip else data).decode("utf-8", errors="replace")


@given(st.text(), st.lists(st.integers(0, 60), max_size=8))
@example("a😀b👩‍👩‍👧ß", [2, 3, 4, 9, 11])
def test_text_split_inside_characters_never_shows_a_replacement(text: str, points: list[int]) -> None:
    tokens = cut(text.encode(), points)
    stream = stream_of(tokens)
    pieces = [stream.push(index) for index in range(len(tokens))]
    assert stream.flush() == ""
    assert "".join(pieces) == text


def test_a_character_is_held_until_it_is_complete() -> None:
    stream = stream_of([b"\xf0\x9f", b"\x98", b"\x80", b"\xe2\x82"])
    assert [stream.push(index) for index in range(4)] == ["", "", "😀", ""]
    assert stream.flush() == "�"
    assert stream.flush() == ""


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition, by brute force: the stop whose match ends first, and the longest of those."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


small = st.text(alphabet="ab\n", max_size=30)


@given(st.lists(small, max_size=12), st.lists(st.text(alphabet="ab\n", min_size=1, max_size=5), max_size=4))
@example(["ab", "ca", "bcd"], ["abcd", "bc"])
@example(["a", "aa", "b"], ["aab"])
def test_stops_are_found_as_in_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    finder = StopStrings(stops)
    emitted, matched, seen = "", None, ""
    for piece in pieces:
        text, matched = finder.push(piece)
        emitted, seen = emitted + text, seen + piece
        if matched is not None:
            break
        held = seen[len(emitted) :]
        assert seen.startswith(emitted)
        # Exactly the text that could still become a stop string is held back.
        beginnings = {stop[:length] for stop in stops for length in range(1, len(stop))}
        assert held == max((begin for begin in beginnings if seen.endswith(begin)), key=len, default="")
    assert (emitted + finder.flush(), matched) == first_stop("".join(pieces), stops)


def test_a_stop_across_pieces_is_not_emitted() -> None:
    finder = StopStrings(["\nUser:", "###"])
    assert finder.push("Yes.\nUs") == ("Yes.", None)
    assert finder.push("ed, #") == ("\nUsed, ", None)
    assert finder.push("## and more") == ("", "###")
    assert finder.push("again") == ("", "###")
    assert finder.flush() == ""


def test_without_stops_all_passes_at_once() -> None:
    finder = StopStrings([])
    assert finder.push("abc") == ("abc", None)
    assert finder.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], "abc"])
def test_stops_that_make_no_sense_are_refused(stops: list[str]) -> None:
    with pytest.raises(InvalidRequest, match="stop strings"):
        StopStrings(stops)
