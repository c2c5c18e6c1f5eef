"""The properties that must agree before two values are joined."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.kv.values import GEOMETRY, geometry
from twostroke.api.llm import LLM
from twostroke.errors import GeometryMismatch
from twostroke.kv.geometry import Geometry
from twostroke.kv.header_fields import geometry_fields, geometry_of
from twostroke.models.rope import Rope

OTHERS: dict[str, Any] = {
    "groups": geometry(num_layers=3).groups,
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
    assert "groups [3 layers of 2 KV heads of 4] is not [2 layers of 2 KV heads of 4]; " in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_kv_heads": 1}, "2 layers of 1 KV heads of 4"),
        ({"head_dim": 8}, "2 layers of 2 KV heads of 8"),
        ({"window": 3}, "2 layers of 2 KV heads of 4, window 3"),
    ],
)
def test_the_shape_of_layers_is_named(changed: dict[str, int], words: str) -> None:
    groups = (replace(GEOMETRY.groups[0], **changed),)
    with pytest.raises(GeometryMismatch, match=re.escape(f"groups [{words}] is not [2 layers of 2 KV heads of 4]")):
        GEOMETRY.require(replace(GEOMETRY, groups=groups), "no")


def test_equal_geometries_meet() -> None:
    same = replace(GEOMETRY)
    GEOMETRY.require(same, "no")
    assert same.fingerprint == GEOMETRY.fingerprint


def test_a_header_says_the_geometry_of_every_family(family: str, tiny_llm: Callable[..., LLM]) -> None:
    """Of files and of the wire: what is written is read as it was."""
    own = tiny_llm(family).pool.geometry
    assert geometry_of(json.loads(json.dumps(geometry_fields(own)))) == own
