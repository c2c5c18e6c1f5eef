"""Values in files: loading returns the same value, or raises a typed error, for any file."""

import base64
import copy
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kv.values import GEOMETRY, RECURRENT, contents, geometry, make_pool, prefill, same_tail
from tests.thinning import examples
from twostroke.backends.interface import PAGE
from twostroke.backends.lazy_logits import StoredLogits
from twostroke.errors import CorruptFile, GeometryMismatch, KVError, OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.kv.page_contents import read_entries
from twostroke.kv.pool import PagePool
from twostroke.kv.prefix_index import PrefixIndex
from twostroke.models.rope import NO_ROPE, Rope
from twostroke.system.user_key import user_key

LOGITS = Tail("m", StoredLogits(np.array([[0.1, -0.0, 3e-39, np.inf]], np.float32)))
NewPool = Callable[..., PagePool]


@dataclass
class Holder:
    """The part of an LLM that `KVCache.load` needs."""

    pool: PagePool


def load(path: Path, pool: PagePool) -> KVCache:
    return KVCache.load(path, Holder(pool))


def test_layers_without_rope_and_with_a_part_of_it(tmp_path: Path, new_pool: NewPool) -> None:
    """A file says what is rotated, unless that is all: files of older versions do not."""
    geometry = replace(GEOMETRY, ropes=(NO_ROPE, Rope(1e6, rotated=2)))
    prefill(new_pool(geometry=geometry), range(5)).save(tmp_path / "value")
    assert load(tmp_path / "value", new_pool(geometry=geometry)).tokens == list(range(5))
    assert b'"rotated": 0' in (tmp_path / "value").read_bytes()
    with pytest.raises(GeometryMismatch, match="no RoPE"):
        load(tmp_path / "value", new_pool())
    prefill(new_pool(), range(5)).save(tmp_path / "plain")
    assert b"rotated" not in (tmp_path / "plain").read_bytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "k8v4"])
@pytest.mark.parametrize("tail", [None, LOGITS, Tail("m", pending=5), replace(LOGITS, pending=3)])
def test_a_round_trip_keeps_everything(tmp_path: Path, new_pool: NewPool, dtype: str, tail: Tail | None) -> None:
    geometry = replace(GEOMETRY, kv_dtype=dtype, ropes=(Rope(1e4), Rope(1e6, (1.0, 0.1))))
    pool, there = new_pool(geometry=geometry), new_pool(geometry=geometry)
    kv = prefill(pool, range(11))
    value = prefill(kv[:2] + kv[5:], [3, 1], model="other", tail=tail)
    if not geometry.stored.codes:
        pool.memory.storages[0][:] += pool.memory.storages[0].dtype.type(1 / 3)  # numbers of every bit, and signs
        pool.memory.storages[0][:, 1] *= -1
    value.save(tmp_path / "value")
    loaded = load(tmp_path / "value", there)
    assert np.array_equal(loaded.entries().view(np.int8), value.entries().view(np.int8))
    assert (loaded.tokens, loaded.positions, loaded.next_position) == (value.tokens, value.positions, 13)
    assert (loaded.table[:, :PAGE] == value.table[:, :PAGE]).all()  # attention reads the same pages
    assert loaded.fingerprint == value.fingerprint
    assert same_tail(loaded.tail, tail)
    assert loaded.canonical_length("m") == 2
    assert (kv[:0] + loaded[:2] + kv[2:]).canonical_length("m") == 11
    assert (kv[:5] + loaded[2:]).canonical_length("m") == 11


def test_equal_values_make_equal_files_wherever_their_pages_are(tmp_path: Path, new_pool: NewPool) -> None:
    kv, there = prefill(new_pool(), range(11), tail=LOGITS), new_pool()
    held = prefill(there, [1])
    kv.save(tmp_path / "one")
    kv.copy_to(there).save(tmp_path / "two")
    assert len(held) == 1
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_room_in_pages_gives_nothing_away_that_was_there(
    tmp_path: Path, new_pool: NewPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups and snapshots that do not fill their pages: equal files, without what was there, which may be NaN."""
    for name, before in (("one", b"\0"), ("two", b"\xff")):
        pool = new_pool(geometry=RECURRENT)
        for frame in range(pool.num_pages):
            pool.memory.write_page(frame, before * pool.page_bytes)
        kv = prefill(pool, range(16))
        assert len(kv.entry_table.snapshot_pages)
        kv.save(tmp_path / name)
        del kv
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "other"))
    assert load(tmp_path / "two", new_pool(geometry=RECURRENT)).tokens == list(range(16))


def test_the_empty_value_can_be_saved_too(tmp_path: Path, pool: PagePool) -> None:
    prefill(pool, range(5))[3:3].save(tmp_path / "value")
    loaded = load(tmp_path / "value", pool)
    assert (len(loaded), loaded.next_position, pool.num_used) == (0, 3, 0)


def packed(numbers: list[Any], dtype: str) -> str:
    return base64.b64encode(np.array(numbers, dtype).tobytes()).decode()


def _saved(directory: Path) -> tuple[Path, bytes]:
    path = directory / "value"
    prefill(make_pool(), range(6), tail=LOGITS).save(path)
    return path, path.read_bytes()


@settings(max_examples=examples(50), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    path, good = _saved(tmp_path)
    at = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(bad)
    pool = make_pool()
    with pytest.raises(CorruptFile, match="value"):
        load(path, pool)
    assert pool.num_used == 0


def test_any_truncation_and_any_addition_is_noticed(tmp_path: Path) -> None:
    path, good = _saved(tmp_path)
    pool = make_pool()
    for length in range(len(good)):
        path.write_bytes(good[:length])
        with pytest.raises(CorruptFile):
            load(path, pool)
    path.write_bytes(good + b"\0")
    with pytest.raises(CorruptFile):
        load(path, pool)
    path.write_bytes(good)
    assert load(path, pool).tokens == list(range(6))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("groups", geometry(num_layers=3).groups),
        ("groups", geometry(num_kv_heads=1).groups),
        ("groups", geometry(head_dim=8).groups),
        ("ropes", (Rope(1e4), Rope(5e5))),
        ("ropes", (Rope(1e4), Rope(1e4, (2.0, 2.0)))),
        ("ropes", (Rope(1e4), NO_ROPE)),
        ("kv_dtype", "bfloat16"),
        ("tokenizer", "words"),
    ],
)
def test_another_geometry_is_refused_by_field(tmp_path: Path, new_pool: NewPool, field: str, value: object) -> None:
    path, _ = _saved(tmp_path)
    other = new_pool(geometry=replace(GEOMETRY, **{field: value}))
    with pytest.raises(GeometryMismatch, match=f"value: .*{field}"):
        load(path, other)
    assert other.num_used == 0


def test_another_page_size_is_refused(tmp_path: Path, new_pool: NewPool) -> None:
    path, _ = _saved(tmp_path)
    with pytest.raises(KVError, match="pages of 4 entries, and the pool has 8"):
        load(path, new_pool(page_size=8))


def test_no_room_changes_nothing(tmp_path: Path, new_pool: NewPool) -> None:
    path, _ = _saved(tmp_path)
    small = new_pool(num_pages=2)
    held = prefill(small, [1])
    with pytest.raises(OutOfPages):
        load(path, small)
    assert small.num_used == 1
    del held
    assert len(load(path, small)) == 6


def test_a_loaded_value_is_continued_in_place_and_leaves_the_file_alone(tmp_path: Path, pool: PagePool) -> None:
    path, good = _saved(tmp_path)
    loaded = load(path, pool)
    longer = prefill(loaded, [6])
    assert pool.num_used == 2
    assert contents(longer) == contents(prefill(pool, range(7)))
    assert longer.canonical_length("m") == 7
    assert path.read_bytes() == good


def test_files_that_are_not_there_or_not_files(tmp_path: Path, pool: PagePool) -> None:
    for path in (tmp_path / "missing", tmp_path):
        with pytest.raises(KVError, match="cannot be read"):
            load(path, pool)
    kv = prefill(pool, [1])
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(KVError, match="cannot be saved"):
        kv.save(tmp_path / "file" / "value")
    with pytest.raises(KVError, match=f"there is no directory {tmp_path / 'new'}: make it first"):
        kv.save(tmp_path / "new" / "value")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(KVError, match="not a regular file"):
        load(tmp_path / "pipe", pool)


@pytest.mark.parametrize(("error", "raised"), [(OSError, KVError), (KeyboardInterrupt, KeyboardInterrupt)])
def test_a_failed_save_leaves_the_old_file_and_no_other(
    tmp_path: Path, pool: PagePool, monkeypatch: pytest.MonkeyPatch, error: type, raised: type
) -> None:
    path, good = _saved(tmp_path)

    def fail(*_: object) -> None:
        raise error(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    kv = prefill(pool, [9])
    with pytest.raises(raised, match="No space left on device"):
        kv.save(path)
    assert path.read_bytes() == good
    assert os.listdir(tmp_path) == ["value"]


# Pages -----------------------------------------------------------------------------------------------------------


def test_a_page_used_in_part_gives_nothing_else_away(tmp_path: Path, pool: PagePool) -> None:
    """Other entries of its pages are not in the file, and the page that is read has zeros there."""
    kv = prefill(pool, range(11))
    value = kv[2:5] + kv[7:]
    value.save(tmp_path / "value")
    data = (tmp_path / "value").read_bytes()
    assert all(entry[0].tobytes() not in data for entry in kv.entries()[0, 0, [0, 1, 5, 6]])
    assert all(entry[0].tobytes() in data for entry in value.entries()[0, 0])
    loaded = load(tmp_path / "value", pool)
    everything = read_entries(pool, 0, np.repeat(np.unique(loaded.table[:, PAGE]), 4), np.tile(np.arange(4), 3))
    assert np.count_nonzero(everything.any((0, 1, 3, 4))) == len(value) == 7


@pytest.mark.parametrize("tier", ["pool", "host"])
@pytest.mark.parametrize(("saved", "read"), [(False, True), (True, False), (True, True)])
def test_files_of_either_layout_are_read_into_either(tmp_path: Path, saved: bool, read: bool, tier: str) -> None:
    pools = [make_pool(20, in_pairs=pairs) for pairs in (saved, read)]
    kv = prefill(pools[0], range(11))
    value = (kv[2:5] + kv[7:]).to(tier)
    value.save(tmp_path / "value")
    loaded = load(tmp_path / "value", pools[1])
    assert contents(loaded) == contents(value)
    assert (loaded.table[:, :PAGE] == value.table[:, :PAGE]).all()
    assert (pools[1].num_used, loaded.tier) == (3, "pool")
    assert contents(value.copy_to(pools[1])) == contents(value)


def test_pages_of_a_device_are_saved_and_read(tmp_path: Path) -> None:
    torch_memory = pytest.importorskip("twostroke.backends.reference.memory").DeviceMemory
    pool = PagePool(GEOMETRY, torch_memory(9, GEOMETRY.page_shape(4), "cpu"), 9, page_size=4)
    kv = prefill(pool, range(11), tail=LOGITS)
    for value in (kv, kv[1:].to("host")):
        value.save(tmp_path / "value")
        for there in (pool, make_pool()):
            assert contents(load(tmp_path / "value", there)) == contents(value)
    moved = kv[1:].to("host")
    del value, kv
    assert (pool.num_used, pool.num_copies) == (0, 3)
    assert contents(moved.to("pool")) == contents(prefill(make_pool(), range(11)))[1:]


# Trust -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def other_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """From now on the key is that of another user."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "other"))
    return tmp_path / "other"


def test_what_this_user_saved_is_believed(tmp_path: Path, pool: PagePool) -> None:
    prefill(pool, range(9), tail=LOGITS).save(tmp_path / "value")
    loaded = load(tmp_path / "value", pool)
    assert loaded.canonical_length("m") == prefill(loaded, [9]).canonical_length("m") - 1 == 9
    assert same_tail(loaded.tail, LOGITS)


@pytest.mark.parametrize("tail", [LOGITS, Tail("m", pending=3), replace(LOGITS, pending=3)])
@pytest.mark.parametrize("theirs", ["key", "no key", "unreadable", "open to others", "of another size"])
def test_what_another_user_saved_is_used_and_believed_nothing(
    tmp_path: Path,
    pool: PagePool,
    tail: Tail,
    theirs: str,
    request: pytest.FixtureRequest,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kv = prefill(pool, range(9), tail=tail)
    kv.save(tmp_path / "value")
    home: Path = request.getfixturevalue("other_home")
    if theirs != "no key":
        assert user_key(make=True) is not None
    if theirs == "unreadable":
        (home / "key").unlink()
        (home / "key").mkdir()
    elif theirs == "open to others":
        (home / "key").chmod(0o640)
    elif theirs == "of another size":
        (home / "key").write_bytes(b"short")
    loaded = load(tmp_path / "value", pool)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[-1].startswith(f"{tmp_path / 'value'}: not sealed by this user")
    assert len(messages) == (1 if theirs in ("key", "no key") else 2)
    assert (loaded.tokens, loaded.positions, contents(loaded)) == (kv.tokens, kv.positions, contents(kv))
    assert loaded.pending == tail.pending
    assert loaded.tail is None or loaded.tail.logits is None
    index = PrefixIndex(pool, "m")
    for value in (loaded, prefill(loaded, range(8)), prefill(loaded[:4], range(8)), loaded[:5] + kv[5:]):
        assert value.canonical_length("m") == 0
        index.insert(value)
        assert index.num_pages == 0


def test_a_value_saved_again_by_who_does_not_believe_it_stays_so(
    tmp_path: Path, pool: PagePool, other_home: Path
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TWOSTROKE_HOME", str(tmp_path / "first"))
        prefill(pool, range(9)).save(tmp_path / "value")
    load(tmp_path / "value", pool).save(tmp_path / "again")
    assert load(tmp_path / "again", pool).canonical_length("m") == 0
    assert (other_home / "key").stat().st_mode & 0o777 == 0o600


def test_without_a_key_values_are_saved_all_the_same(
    tmp_path: Path, pool: PagePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "file"))
    prefill(pool, range(9)).save(tmp_path / "value")
    assert "the key cannot be used" in caplog.text
    assert load(tmp_path / "value", pool).canonical_length("m") == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stray", [np.nan, np.inf, -np.inf])
def test_a_stranger_does_not_bring_numbers_that_are_not_finite(
    tmp_path: Path, new_pool: NewPool, dtype: str, stray: float, request: pytest.FixtureRequest
) -> None:
    """They would stay in the page when another value uses it."""
    pool = new_pool(geometry=replace(GEOMETRY, kv_dtype=dtype))
    kv = prefill(pool, range(9))
    pool.memory.storages[0][1, 1, 2, 1, 0, 3] = stray
    kv.save(tmp_path / "value")
    assert len(load(tmp_path / "value", pool)) == 9  # the user's own values may have them
    request.getfixturevalue("other_home")
    del kv
    pool.memory.storages[0][:] = 0
    with pytest.raises(CorruptFile, match="not finite"):
        load(tmp_path / "value", pool)
    assert not pool.memory.storages[0].any()


# Hostile files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [1, 2])
def test_a_file_of_an_earlier_version_is_told(tmp_path: Path, pool: PagePool, version: int) -> None:
    (tmp_path / "value").write_bytes(b"twostroke-kv-%d\n\0" % version + bytes(100))
    with pytest.raises(CorruptFile, match="value: this KV cache was saved by an earlier version of Twostroke: make it"):
        load(tmp_path / "value", pool)


def with_header(good: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    """The file with another header and a valid checksum."""
    size = int.from_bytes(good[16:24], "little")
    header = json.loads(good[24 : 24 + size])
    changed = change(header)
    text = changed if isinstance(changed, bytes) else json.dumps(header if changed is None else changed).encode()
    head = len(text).to_bytes(8, "little") + text + hashlib.sha256(text).digest()
    return good[:16] + head + good[24 + size + 32 :]


FIELDS = [
    (),
    *((name,) for name in ("geometry", "page_size", "layout", "num_pages", "spans", "tokens", "stretches")),
    *((name,) for name in ("next_position", "tail")),
    *(("geometry", name) for name in ("groups", "ropes", "kv_dtype", "tokenizer")),
    ("geometry", "groups", 0),
    *(("geometry", "groups", 0, name) for name in ("layers", "window", "num_kv_heads", "head_dim", "depth")),
    ("geometry", "ropes", 0),
    ("geometry", "ropes", 0, "base"),
    ("geometry", "ropes", 0, "factors"),
    *(("spans", i) for i in range(2)),
    *(("spans", i, j) for i in range(2) for j in range(4)),
    ("tokens", 3),
    ("stretches", 0),
    *(("stretches", 0, i) for i in range(3)),
    *(("tail", name) for name in ("model", "pending", "num_logits")),
]
STRANGE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-5, 40),
    st.sampled_from([2**31 - 1, 2**31, 2**32, 2**63, -(2**63), 10**400, 1e308, float("nan"), float("inf"), "", "m"]),
    st.sampled_from(["plain", "pairs", "float16", "bfloat16", [], {}, [[]], [0] * 3, [[0, 4, 0, 0]] * 3]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
)


@settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.sampled_from(FIELDS), STRANGE, st.sampled_from("rda")), min_size=1, max_size=3))
def test_a_hostile_header_is_one_clear_error_or_a_value(tmp_path: Path, changes: list[Any]) -> None:
    def change(header: Any) -> Any:
        for path, drawn, how in changes:
            value = copy.deepcopy(drawn)  # the samples are shared: one put into itself would be a circle
            if not path:
                return value
            try:
                inner = header
                for key in path[:-1]:
                    inner = inner[key]
                if how == "r":
                    inner[path[-1]] = value
                elif how == "d":
                    del inner[path[-1]]
                else:
                    inner[path[-1]].append(value)
            except (KeyError, IndexError, TypeError, AttributeError):
                pass  # removed by an earlier change
        return header

    path, good = _saved(tmp_path)
    path.write_bytes(with_header(good, change))
    _is_an_error_or_a_value(path, good)


def _is_an_error_or_a_value(path: Path, good: bytes) -> None:
    pool = make_pool()
    held = prefill(pool, range(5))
    before = contents(held)
    try:
        loaded = load(path, pool)
    except KVError as error:
        told = str(error)
    else:
        told = f"{path}: a value"
        assert len(loaded) == len(loaded.positions) == len(contents(loaded))
        longer = prefill(loaded, [1, 2])
        believed = path.read_bytes() == good or not len(loaded)
        assert believed or longer.canonical_length("m") == 0
        assert longer.positions[-1] == loaded.next_position + 1
        del loaded, longer
    assert told.startswith(f"{path}: ")
    assert "\n" not in told
    assert pool.num_used == 2
    assert contents(held) == before


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda header: b"[" * 100_000, "not JSON"),
        (lambda header: b"\xff", "not JSON"),
        (lambda header: [], "the header does not have the fields"),
        (lambda header: header | {"more": 1}, "the header does not have the fields"),
        (lambda header: header | {"num_pages": 2**31 - 1}, "do not use the pages"),
        (lambda header: header | {"num_pages": True}, "num_pages is not an integer"),
        (lambda header: header | {"layout": "sideways"}, "layout is not one of"),
        (lambda header: header | {"tokens": [*header["tokens"][:-1], -1]}, "tokens are not integers"),
        (lambda header: header | {"tokens": [*header["tokens"][:-1], 2**31]}, "tokens are not integers"),
        (lambda header: header | {"tokens": header["tokens"][:-1]}, "as many entries as tokens"),
        (lambda header: header | {"spans": [[0, 4, 0, 0], [0, 5, 4, 1]]}, "not within its page"),
        (lambda header: header | {"spans": [[0, 4, 0, 0], [2, 2, 4, 1]]}, "not within its page"),
        (lambda header: header | {"spans": [[0, 4, 0, 0], [0, 2, 4, 2]]}, "do not use the pages"),
        (lambda header: header | {"spans": [[0, 4, 0, 0], [0, 2, 2**31 - 2, 1]]}, "positions are too large"),
        (lambda header: header | {"stretches": [[2**31 - 1, None, []]]}, "more entries than there are tokens"),
        (lambda header: header | {"stretches": [[5, None, []]]}, "fewer entries"),
        (lambda header: header | {"stretches": [[6, None, [1]]]}, "not canonical has tokens"),
        (lambda header: header | {"stretches": [[6, "m", [1]]]}, "wrong positions"),
        (lambda header: header | {"head_positions": packed([0] * 23, "<i4")}, "as many numbers as heads"),
        (lambda header: header | {"head_positions": [0] * 24}, "as many numbers as heads"),
        (lambda header: header | {"head_positions": "*"}, "not base64"),
        (lambda header: header | {"head_positions": packed([*[0] * 23, -1], "<i4")}, "comes behind its slot"),
        (lambda header: header | {"head_positions": packed([*[0] * 23, 6], "<i4")}, "comes behind its slot"),
        (lambda header: header | {"bias": packed([0] * 23, "<f4")}, "as many numbers as heads"),
        (lambda header: header | {"bias": packed([*[0] * 23, np.nan], "<f4")}, "a bias is no number"),
        (lambda header: header | {"next_position": -1}, "next_position is not an integer"),
        (lambda header: header | {"tail": header["tail"] | {"num_logits": 2**31 - 1}}, "size is not what"),
        (lambda header: header | {"tail": header["tail"] | {"num_logits": 2}}, "size is not what"),
        (lambda header: header | {"page_size": 0}, "page_size is not an integer"),
    ],
)
def test_why_a_header_cannot_be_is_told(tmp_path: Path, change: Callable[[Any], Any], why: str) -> None:
    path, good = _saved(tmp_path)
    path.write_bytes(with_header(good, change))
    pool = make_pool()
    with pytest.raises(CorruptFile, match=why):
        load(path, pool)
    assert pool.num_used == 0


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_put_together_from_pieces_is_an_error_or_a_value(tmp_path: Path, data: st.DataObject) -> None:
    path, good = _saved(tmp_path)
    pieces = []
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(good)))
        pieces.append(good[start : data.draw(st.integers(start, len(good)))] or data.draw(st.binary(max_size=40)))
    path.write_bytes(good[: data.draw(st.integers(0, len(good)))] + b"".join(pieces))
    _is_an_error_or_a_value(path, good)


def test_pages_of_two_files_do_not_make_one_that_is_believed(tmp_path: Path) -> None:
    """Each page's checksum is valid, but the seal is over all of them."""
    path, good = _saved(tmp_path)
    prefill(make_pool(), range(10, 16), tail=LOGITS).save(path)
    other = path.read_bytes()
    second = -(8 + 16 + 32) - (8 + 32 + 32) - (512 + 32)
    first = second - (512 + 32)
    path.write_bytes(good[:first] + other[first:second] + good[second:])
    loaded = load(path, make_pool())
    assert loaded.canonical_length("m") == 0
    assert contents(loaded)[:4] == contents(prefill(make_pool(), range(10, 16)))[:4]
