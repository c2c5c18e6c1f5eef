"""The properties that must agree before two values are joined."""

from dataclasses import replace
from typing import Any

import pytest

from tests.kv.values import GEOMETRY
from twostroke.errors import GeometryMismatch
from twostroke.kv.geometry import Geometry
from twostroke.models.rope import Rope

OTHERS: dict[str, Any] = {
    "num_layers": 3,
    "num_kv_heads": 1,
    "head_dim": 8,
    "ropes": (Rope(1e4), Rope(1e4, (1.0, 8.0))),
    "kv_dtype": "bfloat16",
    "tokenizer": "words",
}


@pytest.mark.parametrize("field", OTHERS)
def test_every_field_matters_and_is_named(field: str) -> None:
    other = replace(GEOMETRY, **{field: OTHERS[field]})
    assert other.fingerprint != GEOMETRY.fingerprint
    with pytest.raises(GeometryMismatch, match=f"^no: the KV geometry differs: {field} [^;]* is not [^;]*$"):
        GEOMETRY.require(other, "no")


def test_all_fields_that_differ_are_named() -> None:
    with pytest.raises(GeometryMismatch) as caught:
        GEOMETRY.require(Geometry(**OTHERS), "no")
    assert all(field in str(caught.value) for field in OTHERS)
    assert "num_layers 3 is not 2; " in str(caught.value)


def test_equal_geometries_meet() -> None:
    same = replace(GEOMETRY)
    GEOMETRY.require(same, "no")
    assert same.fingerprint == GEOMETRY.fingerprint
