"""The JSON header of a saved value, and its validation, since a file may come from anyone.

No field of a header is used before `decode` has checked them all. A header that passes describes a value that this
program could have made; the caller still has to compare its geometry.
"""

import base64
import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.backends.page_memory import LAYOUTS, Layout
from twostroke.kv import spans
from twostroke.kv.entries import EntryTable, StateSnapshot, Tail
from twostroke.kv.geometry import Geometry
from twostroke.kv.provenance import NOTHING, Stretch
from twostroke.kv.spans import NO_PAGE
from twostroke.models.kv_formats import KV_FORMATS
from twostroke.models.layer_groups import LayerGroup
from twostroke.models.recurrent import GatedDeltaNet, Mamba2, RecurrentMixer, ShortConvolution
from twostroke.models.rope import Rope

MAX_INTEGER = 2**31 - 1  # largest integer in a header
MAX_NAME_LENGTH = 1000
MAX_GROUPS = 1000
ENTRY_KINDS = ("kv", "rows", "inputs")
STATE_KINDS = {one.__name__: one for one in (GatedDeltaNet, Mamba2, ShortConvolution)}


@dataclass(frozen=True)
class StreamHeader:
    """Describes the pages that follow and the value in them.

    Attributes:
        contents: the value; its table numbers the file's pages, and its tail has no logits.
        num_pages: number of pages that follow.
        num_logits: number of logits in the tail, 0 for none.
    """

    geometry: Geometry
    page_size: int
    layout: Layout
    num_pages: int
    contents: EntryTable
    num_logits: int


class InvalidHeader(ValueError):
    """The header is invalid; the message names the field."""


def encode(header: StreamHeader) -> bytes:
    """The header as JSON."""
    contents, tail = header.contents, header.contents.tail
    fields = {
        "geometry": _geometry_fields(header.geometry),
        "page_size": header.page_size,
        "layout": header.layout,
        "num_pages": header.num_pages,
        "spans": contents.table.tolist(),
        "tokens": contents.tokens.tolist(),
        "stretches": [[s.count, s.model, s.before.tolist()] for s in contents.stretches],
        "next_position": contents.next_position,
        "tail": tail and {"model": tail.model, "pending": tail.pending, "num_logits": header.num_logits},
    }
    if header.geometry.states:
        fields["snapshots"] = [[one.at, one.pages.tolist()] for one in contents.snapshots]
    if contents.head_positions is not None:
        fields["head_positions"] = _packed(contents.head_positions, "<i4")
    if contents.bias is not None:
        fields["bias"] = _packed(contents.bias, "<f4")
    return json.dumps(fields).encode()


@lru_cache(16)
def _geometry_fields(geometry: Geometry) -> dict[str, Any]:
    """The geometry as JSON's types. Cached: it takes longer than all the rest of a short value's header."""
    fields = dataclasses.asdict(geometry)
    for rope in fields["ropes"]:
        if rope["rotated"] is None:  # older versions do not know the field
            del rope["rotated"]
    fields["states"] = [[layer, _state_fields(state)] for layer, state in geometry.states]
    if not geometry.states:
        del fields["states"]
    for group in fields["groups"]:
        if group["kind"] == "kv":
            del group["kind"]
    return fields


def _state_fields(state: RecurrentMixer) -> dict[str, Any]:
    kind = type(state).__name__
    named = {} if isinstance(state, GatedDeltaNet) else {"kind": kind}  # older versions know that kind alone
    return named | {one.name: getattr(state, one.name) for one in dataclasses.fields(STATE_KINDS[kind]) if one.init}


def decode(text: bytes) -> StreamHeader:
    """Parse and check the output of `encode`. Raises InvalidHeader for anything else."""
    names = ("geometry", "page_size", "layout", "num_pages", "spans", "tokens", "stretches", "next_position", "tail")
    fields = parse_json(text)
    snapshots = fields.pop("snapshots", []) if isinstance(fields, dict) else []
    heads, bias = (fields.pop(name, None) if isinstance(fields, dict) else None for name in ("head_positions", "bias"))
    fields = _object(fields, "the header", *names)
    geometry = _geometry(fields["geometry"])
    page_size = _integer(fields["page_size"], "page_size", 1)
    num_pages = _integer(fields["num_pages"], "num_pages")
    layout = fields["layout"]
    require(layout in LAYOUTS, f"layout is not one of {', '.join(LAYOUTS)}")
    together = 4 if geometry.stored.codes else 2
    sizes = (page_size, *(group.head_dim for group in geometry.groups))
    even = all(size % together == 0 for size in sizes)
    require(layout != "pairs" or even, f"slots of a page and sizes of heads are not multiples of {together}")
    tokens = _integers(fields["tokens"], "tokens")
    table = _table(fields["spans"], geometry, page_size)
    fits = all(4 * shape.snapshot_row <= geometry.page_bytes(page_size) for _, shape in geometry.states)
    require(fits, "a page is smaller than a row of a state")
    states = _snapshots(snapshots, geometry, len(tokens), page_size)
    _require_all(num_pages, table, states)
    require(spans.counts(table).sum() == len(tokens), "the spans do not hold as many entries as tokens")
    stretches = _stretches(fields["stretches"], spans.positions(table))
    next_position = _integer(fields["next_position"], "next_position")
    tail, num_logits = _tail(fields["tail"])
    by_head = None if heads is None else _head_positions(heads, geometry, spans.positions(table))
    biased = None if bias is None else _bias(bias, geometry, len(tokens))
    contents = EntryTable(table, tokens, stretches, next_position, tail, states, by_head, biased)
    return StreamHeader(geometry, page_size, layout, num_pages, contents, num_logits)


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


def _object(value: Any, what: str, *names: str) -> dict[str, Any]:
    require(isinstance(value, dict) and set(value) == set(names), f"{what} does not have the fields {', '.join(names)}")
    return value


def _integer(value: Any, what: str, minimum: int = 0) -> int:
    require(
        type(value) is int and minimum <= value <= MAX_INTEGER,
        f"{what} is not an integer from {minimum} to {MAX_INTEGER}",
    )
    return value


def _integers(value: Any, what: str) -> np.ndarray:
    """[n] int32 from a list of integers >= 0."""
    right = isinstance(value, list) and set(map(type, value)) <= {int}
    right = right and (not value or (min(value) >= 0 and max(value) <= MAX_INTEGER))
    require(right, f"{what} are not integers from 0 to {MAX_INTEGER}")
    return np.array(value, np.int32)


def _name(value: Any, what: str) -> str:
    require(isinstance(value, str) and len(value) <= MAX_NAME_LENGTH, f"{what} is not a name")
    return value


def _geometry(value: Any) -> Geometry:
    if isinstance(value, dict):
        value = {"states": []} | value  # most models have none
    fields = _object(value, "geometry", *(field.name for field in dataclasses.fields(Geometry)))
    named = isinstance(fields["kv_dtype"], str) and fields["kv_dtype"] in KV_FORMATS
    require(named, f"kv_dtype is not one of {', '.join(KV_FORMATS)}")
    require(isinstance(fields["ropes"], list), "ropes are not a list")
    return Geometry(
        groups=_groups(fields["groups"]),
        ropes=tuple(map(rope_from_fields, fields["ropes"])),
        kv_dtype=fields["kv_dtype"],
        tokenizer=_name(fields["tokenizer"], "geometry's tokenizer"),
        states=_states(fields["states"]),
    )


def _states(value: Any) -> tuple[tuple[int, RecurrentMixer], ...]:
    right = isinstance(value, list) and len(value) <= MAX_GROUPS
    right = right and all(isinstance(one, list) and len(one) == 2 for one in value)
    require(right, "states are not a list of pairs")
    found: list[tuple[int, RecurrentMixer]] = []
    for layer, shape in value:
        found.append((_integer(layer, "a layer"), _state(shape)))
    require(len({shape.chunk for _, shape in found}) <= 1, "states have different chunks")
    return tuple(found)


def _state(value: Any) -> RecurrentMixer:
    value = {"kind": GatedDeltaNet.__name__} | value if isinstance(value, dict) else {}
    kind = value.get("kind")
    require(isinstance(kind, str) and kind in STATE_KINDS, f"a state is none of {', '.join(STATE_KINDS)}")
    made = STATE_KINDS[kind]
    names = [field.name for field in dataclasses.fields(made) if field.init]
    fields = _object({"by_head": False} | value if "by_head" in names else value, "a state", "kind", *names)
    switches = {name: fields[name] for name in ("tiled", "by_head") if name in fields}
    for name, one in switches.items():
        require(isinstance(one, bool), f"{name} is not true or false")
    sizes = {name: _integer(one, name, 1) for name, one in fields.items() if name != "kind" and name not in switches}
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
        value = {"kind": "kv"} | value  # that of most groups
    fields = _object(value, "a group of layers", *(field.name for field in dataclasses.fields(LayerGroup)))
    require(fields["kind"] in ENTRY_KINDS, "a group has entries of an unknown kind")
    layers = tuple(_integers(fields["layers"], "layers").tolist())
    depth = _integer(fields["depth"], "depth", 1)
    require(0 < len(layers) <= depth and list(layers) == sorted(layers), "a group has no layers, or too many")
    window = None if fields["window"] is None else _integer(fields["window"], "window", 1)
    heads, dim = _integer(fields["num_kv_heads"], "num_kv_heads", 1), _integer(fields["head_dim"], "head_dim", 1)
    require(fields["kind"] == "kv" or window is not None, "rows of states have no end")
    return LayerGroup(layers, window, heads, dim, depth, fields["kind"])


def rope_from_fields(value: Any) -> Rope:
    """A RoPE from a header's JSON. Raises InvalidHeader."""
    if isinstance(value, dict):
        value = {"amplitude": 1.0, "rotated": None} | value  # a file that is older than these fields
    fields = _object(value, "a rope", "base", "factors", "amplitude", "rotated")
    factors = fields["factors"]
    numbers = [fields["base"], fields["amplitude"], *(factors if isinstance(factors, list) else [])]
    right = all(type(one) in (int, float) and abs(one) <= 1e30 and math.isfinite(one) for one in numbers)
    require(right and (factors is None or isinstance(factors, list)), "a rope is not made of numbers")
    rotated = None if fields["rotated"] is None else _integer(fields["rotated"], "a rope's rotated")
    return Rope(fields["base"], None if factors is None else tuple(factors), fields["amplitude"], rotated)


def _snapshots(value: Any, geometry: Geometry, entries: int, page_size: int) -> tuple[StateSnapshot, ...]:
    right = isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)
    require(right and (len(geometry.states) > 0 or not value), "snapshots are not a list of pairs")
    found: list[StateSnapshot] = []
    for at, pages in value:
        own = _integers(pages, "a snapshot's pages")
        least = found[-1].at + 1 if found else 0
        require(_integer(at, "a snapshot's entries", least) <= entries, "a snapshot is behind the value")
        require(len(own) in (0, geometry.snapshot_pages(page_size)), "a snapshot has not its pages")
        found.append(StateSnapshot(at, own))
    return tuple(found)


def _require_all(num_pages: int, table: np.ndarray, snapshots: Sequence[StateSnapshot]) -> None:
    """Every page that follows is used, by one group of layers or one snapshot."""
    kinds = [np.unique(column[column != NO_PAGE]) for column in table[:, PAGE:].T]
    used = np.concatenate([*kinds, *(one.pages for one in snapshots)])
    # Their number first: it may be any, and so many numbers would take all memory.
    all_used = len(used) == num_pages and np.array_equal(np.sort(used), np.arange(num_pages))
    require(all_used, "spans do not use the pages that follow")


def _table(value: Any, geometry: Geometry, page_size: int) -> np.ndarray:
    width = PAGE + len(geometry.groups)
    right = isinstance(value, list) and all(isinstance(span, list) and len(span) == width for span in value)
    require(right, f"spans are not lists of {width}")
    # Pages count from 1 here, so that 0 stands for NO_PAGE.
    counted = [[*span[:PAGE], *(page + 1 if type(page) is int else page for page in span[PAGE:])] for span in value]
    table = _integers([number for span in counted for number in span], "spans").reshape(-1, width)
    table[:, PAGE:] -= 1
    starts, stops, pages = table[:, START], table[:, STOP], table[:, PAGE:]
    require((starts < stops).all() and (stops <= page_size).all(), "a span is not within its page")
    windowed = [window is not None for window in geometry.windows]
    require((pages[:, np.logical_not(windowed)] != NO_PAGE).all(), "a layer without a window lacks entries")
    last = table[:, POSITION].astype(np.int64) + stops - starts
    require((last <= MAX_INTEGER).all(), "positions are too large")
    return table


def _head_positions(value: Any, geometry: Geometry, positions: np.ndarray) -> np.ndarray:
    """Check that heads rise, and hold nothing that comes behind its slot."""
    found = _by_head(value, "<i4", geometry, len(positions))
    require((found >= 0).all() and (found <= positions[:, None, None]).all(), "a head's entry comes behind its slot")
    return found


def _bias(value: Any, geometry: Geometry, length: int) -> np.ndarray:
    found = _by_head(value, "<f4", geometry, length)
    require((found < np.inf).all(), "a bias is no number")
    return found


def _by_head(value: Any, dtype: str, geometry: Geometry, length: int) -> np.ndarray:
    """[n, layers, KV heads] numbers from what `_packed` made."""
    heads = geometry.kv_heads
    require(heads is not None and not geometry.windowed, "heads of such a model hold the same entries")
    shape = length, len(geometry.kv_layers), heads or 0
    try:
        data = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except ValueError:
        raise InvalidHeader("numbers of heads are not base64") from None
    require(len(data) == math.prod(shape) * np.dtype(dtype).itemsize, "there are not as many numbers as heads")
    return np.frombuffer(data, dtype).reshape(shape).astype(dtype[1:])


def _packed(array: np.ndarray, dtype: str) -> str:
    return base64.b64encode(array.astype(dtype).tobytes()).decode()


def _stretches(value: Any, positions: np.ndarray) -> tuple[Stretch, ...]:
    """Check that canonical entries have the positions that follow the tokens they were computed over."""
    right = isinstance(value, list) and all(isinstance(one, list) and len(one) == 3 for one in value)
    require(right, "stretches are not lists of three")
    stretches, start = [], 0
    for count, model, before in value:
        stop = start + _integer(count, "a stretch's count", 1)
        require(stop <= len(positions), "stretches hold more entries than there are tokens")
        if model is None:
            require(before == [], "a stretch that is not canonical has tokens before it")
            stretches.append(Stretch(count, None, NOTHING))
        else:
            known = _integers(before, "a stretch's tokens before")
            expected = np.arange(len(known), len(known) + count)
            require(np.array_equal(positions[start:stop], expected), "a canonical stretch has wrong positions")
            stretches.append(Stretch(count, _name(model, "a stretch's model"), known))
        start = stop
    require(start == len(positions), "stretches hold fewer entries than there are tokens")
    return tuple(stretches)


def _tail(value: Any) -> tuple[Tail | None, int]:
    if value is None:
        return None, 0
    fields = _object(value, "the tail", "model", "pending", "num_logits")
    pending = None if fields["pending"] is None else _integer(fields["pending"], "the pending token")
    tail = Tail(_name(fields["model"], "the tail's model"), pending=pending)
    return tail, _integer(fields["num_logits"], "num_logits")
