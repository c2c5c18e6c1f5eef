"""What a text history finds is an earlier place of the last tokens, in the same group, against the definition."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twostroke.engine.text_history import NGRAM, TextHistory

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=60)


@given(st.lists(st.tuples(st.sampled_from([b"", b"a"]), TEXTS), min_size=1, max_size=4), st.lists(st.integers(1, 9)))
def test_what_followed_before(texts: list[tuple[bytes, list[int]]], cuts: list[int]) -> None:
    history, text = TextHistory(), TextHistory().begin(b"")
    for group, ids in texts:
        text, left = history.begin(group), ids
        for cut in [*cuts, len(ids)]:  # however it grows
            if cut == 1:
                text.add(left[0]) if left else None
            else:
                text.extend(left[:cut])
            left = left[cut:]
    group, own = texts[-1]
    earlier = [ids for other, ids in texts[:-1] if other == group]
    places = [(ids, i) for ids in [*earlier, own] for i in range(NGRAM, len(ids)) if ids[i - NGRAM : i] == own[-NGRAM:]]
    found = text.find()
    assert (found is None) == (not places)
    if found is None:
        return
    assert NGRAM <= found.match <= len(own)
    last = own[-found.match :]
    assert any(ids[i - found.match : i] == last and ids[i : i + 5] == found.tokens(5) for ids, i in places)


def test_the_longest_of_several_places() -> None:
    history = TextHistory()
    for ids in ([7, 1, 2, 3, 40], [8, 1, 2, 3, 50], [9, 1, 2, 3, 60]):
        history.begin(b"").extend(ids)
    text = history.begin(b"")
    text.extend([0, 8, 1, 2, 3])
    assert (found := text.find()) is not None
    assert (found.match, found.tokens(9), found.next_token, found.moved()) == (4, [50], 50, None)


def test_old_texts_are_forgotten() -> None:
    history = TextHistory(max_tokens=100)
    first = history.begin(b"")
    first.extend(range(1000, 1040))
    for start in range(0, 200, 40):
        history.begin(b"").extend(range(start, start + 40))
    assert history.num_tokens <= 100
    first.extend([1, 2])  # it goes on, and is found by nobody
    text = history.begin(b"")
    text.extend([1000, 1001, 1002])
    assert text.find() is None
    text.extend([170, 171, 172])
    assert (found := text.find()) is not None
    assert found.tokens(3) == [173, 174, 175]


@pytest.mark.parametrize("group", [b"", b"x"])
def test_groups_are_apart(group: bytes) -> None:
    history = TextHistory()
    history.begin(b"y").extend(range(50))
    text = history.begin(group)
    text.extend([10, 11, 12])
    assert text.find() is None
    text.extend([20, 21, 22])
    assert text.find() is None


def test_groups_of_one_slot_share_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever finds a salt with the checksum of another's learns nothing of its texts, not even that they are there."""
    monkeypatch.setattr("twostroke.engine.text_history.crc32", lambda group: 0)
    history = TextHistory()
    history.begin(b"a").extend([7, 1, 2, 3, 40])
    for group in (b"b", b""):
        text = history.begin(group)
        text.extend([7, 1, 2, 3])
        assert text.find() is None
