"""Values in files: the same value comes back, or a typed error does."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.kv.values import GEOMETRY, contents, make_pool, prefill, same_tail
from twostroke.errors import CorruptFile, GeometryMismatch, KVError, OutOfPages
from twostroke.kv.cache import KVCache
from twostroke.kv.contents import Tail
from twostroke.kv.pool import PagePool
from twostroke.models.rope import Rope

LOGITS = Tail("m", logits=np.array([0.1, -0.0, 3e-39, np.inf], np.float32))
NewPool = Callable[..., PagePool]


@dataclass
class Holder:
    """What `KVCache.load` needs of an LLM."""

    pool: PagePool


def load(path: Path, pool: PagePool) -> KVCache:
    return KVCache.load(path, Holder(pool))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("tail", [None, LOGITS, Tail("m", pending=5), replace(LOGITS, pending=3)])
def test_a_round_trip_keeps_everything(tmp_path: Path, new_pool: NewPool, dtype: str, tail: Tail | None) -> None:
    geometry = replace(GEOMETRY, kv_dtype=dtype, ropes=(Rope(1e4), Rope(1e6, (1.0, 0.1))))
    pool, there = new_pool(geometry=geometry), new_pool(geometry=geometry)
    kv = prefill(pool, range(11))
    value = prefill(kv[:2] + kv[5:], [3, 1], model="other", tail=tail)
    pool.storage += geometry.dtype.type(1 / 3)  # numbers of every bit, and signs
    pool.storage[:, 1] *= -1
    value.save(tmp_path / "value")
    loaded = load(tmp_path / "value", there)
    assert np.array_equal(loaded.entries().view(np.int8), value.entries().view(np.int8))
    assert (loaded.tokens, loaded.positions, loaded.next_position) == (value.tokens, value.positions, 13)
    assert (loaded.table[:, 1:] == value.table[:, 1:]).all()  # attention walks the same pages
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


def test_the_empty_value_can_be_saved_too(tmp_path: Path, pool: PagePool) -> None:
    prefill(pool, range(5))[3:3].save(tmp_path / "value")
    loaded = load(tmp_path / "value", pool)
    assert (len(loaded), loaded.next_position, pool.num_used) == (0, 3, 0)


def _saved(directory: Path) -> tuple[Path, bytes]:
    path = directory / "value"
    prefill(make_pool(), range(6), tail=LOGITS).save(path)
    return path, path.read_bytes()


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
        ("num_layers", 3),
        ("num_kv_heads", 1),
        ("head_dim", 8),
        ("ropes", (Rope(1e4), Rope(5e5))),
        ("ropes", (Rope(1e4), Rope(1e4, (2.0, 2.0)))),
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
    kv.save(tmp_path / "new" / "directory" / "value")
    assert load(tmp_path / "new" / "directory" / "value", pool).tokens == [1]


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
