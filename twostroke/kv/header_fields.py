"""Fields of a header's JSON, which may come from anyone: checks that name the field, and the fields of a geometry."""

import dataclasses
import json
import math
from functools import lru_cache
from typing import Any

import numpy as np

from twostroke.kv.geometry import Geometry
from twostroke.models.kv_formats import KV_FORMATS
from twostroke.models.layer_groups import LayerGroup
from twostroke.models.recurrent import GatedDeltaNet, Mamba2, RecurrentMixer, ShortConvolution
from twostroke.models.rope import STILL, Rope

MAX_INTEGER = 2**31 - 1  # largest integer in a header
MAX_NAME_LENGTH = 1000
MAX_GROUPS = 1000
ENTRY_KINDS = ("kv", "rows", "inputs")
USUAL = {"kind": "kv", "one_part": False}  # of most groups, left out of headers
STATES_OF_BEFORE = {"by_head": False, "normed": True}  # what older files do not say
STATE_KINDS = {one.__name__: one for one in (GatedDeltaNet, Mamba2, ShortConvolution)}


class InvalidHeader(ValueError):
    """The header is invalid; the message names the field."""


def parse_json(text: bytes) -> Any:
    """Parse untrusted JSON. Raises InvalidHeader."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidHeader("it is not JSON") from None


def require(right: bool | np.bool_, what: str) -> None:
    """Raise Invalid with the message `what` unless `right`."""
    if not right:
        raise InvalidHeader(what)


def object_of(value: Any, what: str, *names: str) -> dict[str, Any]:
    require(isinstance(value, dict) and set(value) == set(names), f"{what} does not have the fields {', '.join(names)}")
    return value


def integer_of(value: Any, what: str, minimum: int = 0) -> int:
    require(
        type(value) is int and minimum <= value <= MAX_INTEGER,
        f"{what} is not an integer from {minimum} to {MAX_INTEGER}",
    )
    return value


def integers_of(value: Any, what: str) -> np.ndarray:
    """[n] int32 from a list of integers >= 0."""
    right = isinstance(value, list) and set(map(type, value)) <= {int}
    right = right and (not value or (min(value) >= 0 and max(value) <= MAX_INTEGER))
    require(right, f"{what} are not integers from 0 to {MAX_INTEGER}")
    return np.array(value, np.int32)


def name_of(value: Any, what: str) -> str:
    require(isinstance(value, str) and len(value) <= MAX_NAME_LENGTH, f"{what} is not a name")
    return value


@lru_cache(16)
def geometry_fields(geometry: Geometry) -> dict[str, Any]:
    """The geometry as JSON's types. Cached: it takes longer than all the rest of a short value's header."""
    fields = dataclasses.asdict(geometry)
    for rope in fields["ropes"]:
        del rope["short"]
        if rope["rotated"] is None:  # older versions do not know the field
            del rope["rotated"]
    fields["states"] = [[layer, _state_fields(state)] for layer, state in geometry.states]
    if not geometry.states:
        del fields["states"]
    for group in fields["groups"]:
        for name, usual in USUAL.items():
            if group[name] == usual:
                del group[name]
    return fields


def _state_fields(state: RecurrentMixer) -> dict[str, Any]:
    kind = type(state).__name__
    named = {} if isinstance(state, GatedDeltaNet) else {"kind": kind}  # older versions know that kind alone
    return named | {one.name: getattr(state, one.name) for one in dataclasses.fields(STATE_KINDS[kind]) if one.init}


def geometry_of(value: Any) -> Geometry:
    if isinstance(value, dict):
        value = {"states": []} | value  # most models have none
    fields = object_of(value, "geometry", *(field.name for field in dataclasses.fields(Geometry)))
    named = isinstance(fields["kv_dtype"], str) and fields["kv_dtype"] in KV_FORMATS
    require(named, f"kv_dtype is not one of {', '.join(KV_FORMATS)}")
    require(isinstance(fields["ropes"], list), "ropes are not a list")
    return Geometry(
        groups=_groups(fields["groups"]),
        ropes=tuple(map(rope_from_fields, fields["ropes"])),
        kv_dtype=fields["kv_dtype"],
        tokenizer=name_of(fields["tokenizer"], "geometry's tokenizer"),
        states=_states(fields["states"]),
    )


def _states(value: Any) -> tuple[tuple[int, RecurrentMixer], ...]:
    right = isinstance(value, list) and len(value) <= MAX_GROUPS
    right = right and all(isinstance(one, list) and len(one) == 2 for one in value)
    require(right, "states are not a list of pairs")
    found: list[tuple[int, RecurrentMixer]] = []
    for layer, shape in value:
        found.append((integer_of(layer, "a layer"), _state(shape)))
    require(len({shape.chunk for _, shape in found}) <= 1, "states have different chunks")
    return tuple(found)


def _state(value: Any) -> RecurrentMixer:
    value = {"kind": GatedDeltaNet.__name__} | value if isinstance(value, dict) else {}
    kind = value.get("kind")
    require(isinstance(kind, str) and kind in STATE_KINDS, f"a state is none of {', '.join(STATE_KINDS)}")
    made = STATE_KINDS[kind]
    names = [field.name for field in dataclasses.fields(made) if field.init]
    of_before = {name: usual for name, usual in STATES_OF_BEFORE.items() if name in names}
    fields = object_of(of_before | value, "a state", "kind", *names)
    switches = {name: fields[name] for name in ("tiled", *STATES_OF_BEFORE) if name in fields}
    for name, one in switches.items():
        require(isinstance(one, bool), f"{name} is not true or false")
    sizes = {name: integer_of(one, name, 1) for name, one in fields.items() if name != "kind" and name not in switches}
    require(math.prod(sizes.values()) <= MAX_INTEGER**2, "a state is too large")
    state = made(**sizes, **switches)
    require(state.num_v_heads % state.num_k_heads == 0, "heads of a state do not share keys evenly")
    return state


def _groups(value: Any) -> tuple[LayerGroup, ...]:
    require(
        isinstance(value, list) and 0 < len(value) <= MAX_GROUPS, f"there are not 1 to {MAX_GROUPS} groups of layers"
    )
    groups = tuple(map(_group, value))
    layers = [(layer, group.kind) for group in groups for layer in group.layers]
    require(len(set(layers)) == len(layers), "a layer is in two groups")
    return groups


def _group(value: Any) -> LayerGroup:
    if isinstance(value, dict):
        value = USUAL | value
    fields = object_of(value, "a group of layers", *(field.name for field in dataclasses.fields(LayerGroup)))
    require(fields["kind"] in ENTRY_KINDS, "a group has entries of an unknown kind")
    layers = tuple(integers_of(fields["layers"], "layers").tolist())
    depth = integer_of(fields["depth"], "depth", 1)
    require(0 < len(layers) <= depth and list(layers) == sorted(layers), "a group has no layers, or too many")
    window = None if fields["window"] is None else integer_of(fields["window"], "window", 1)
    heads, dim = integer_of(fields["num_kv_heads"], "num_kv_heads", 1), integer_of(fields["head_dim"], "head_dim", 1)
    require(fields["kind"] == "kv" or window is not None, "rows of states have no end")
    once = fields["one_part"]
    require(once is False or (once is True and fields["kind"] == "kv"), "one_part is not true or false")
    return LayerGroup(layers, window, heads, dim, depth, fields["kind"], once)


def rope_from_fields(value: Any) -> Rope:
    """A RoPE from a header's JSON. Raises InvalidHeader."""
    if isinstance(value, dict):
        value = {"amplitude": 1.0, "rotated": None} | value  # a file that is older than these fields
    fields = object_of(value, "a rope", "base", "factors", "amplitude", "rotated")
    factors = fields["factors"]
    numbers = [fields["base"], fields["amplitude"], *(factors if isinstance(factors, list) else [])]
    right = all(type(one) in (int, float) and abs(one) <= STILL and math.isfinite(one) for one in numbers)
    require(right and (factors is None or isinstance(factors, list)), "a rope is not made of numbers")
    rotated = None if fields["rotated"] is None else integer_of(fields["rotated"], "a rope's rotated")
    return Rope(fields["base"], None if factors is None else tuple(factors), fields["amplitude"], rotated)
