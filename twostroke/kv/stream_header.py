"""The JSON header of a saved value, and its validation, since a file may come from anyone.

No field of a header is used before `decode` has checked them all. A header that passes describes a value that this
program could have made; the caller still has to compare its geometry.
"""

import base64
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from twostroke.backends.interface import PAGE, POSITION, START, STOP
from twostroke.backends.page_memory import LAYOUTS, Layout
from twostroke.kv import spans
from twostroke.kv.entries import EntryTable, StateSnapshot, Tail
from twostroke.kv.geometry import Geometry
from twostroke.kv.header_fields import (
    MAX_INTEGER,
    InvalidHeader,
    geometry_fields,
    geometry_of,
    integer_of,
    integers_of,
    name_of,
    object_of,
    parse_json,
    require,
)
from twostroke.kv.provenance import NOTHING, Stretch
from twostroke.kv.spans import NO_PAGE


@dataclass(frozen=True)
class StreamHeader:
    """Describes the pages that follow and the value in them."""

    geometry: Geometry
    page_size: int
    layout: Layout
    num_pages: int  # number of pages that follow
    contents: EntryTable  # the value; its table numbers the file's pages, and its tail has no logits
    num_logits: int  # number of logits in the tail, 0 for none


def encode(header: StreamHeader) -> bytes:
    """The header as JSON."""
    contents, tail = header.contents, header.contents.tail
    fields = {
        "geometry": geometry_fields(header.geometry),
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


def decode(text: bytes) -> StreamHeader:
    """Parse and check the output of `encode`. Raises InvalidHeader for anything else."""
    names = ("geometry", "page_size", "layout", "num_pages", "spans", "tokens", "stretches", "next_position", "tail")
    fields = parse_json(text)
    snapshots = fields.pop("snapshots", []) if isinstance(fields, dict) else []
    heads, bias = (fields.pop(name, None) if isinstance(fields, dict) else None for name in ("head_positions", "bias"))
    fields = object_of(fields, "the header", *names)
    geometry = geometry_of(fields["geometry"])
    page_size = integer_of(fields["page_size"], "page_size", 1)
    num_pages = integer_of(fields["num_pages"], "num_pages")
    layout = fields["layout"]
    require(layout in LAYOUTS, f"layout is not one of {', '.join(LAYOUTS)}")
    together = 4 if geometry.stored.codes else 2
    sizes = (page_size, *(group.head_dim for group in geometry.groups))
    even = all(size % together == 0 for size in sizes)
    require(layout != "pairs" or even, f"slots of a page and sizes of heads are not multiples of {together}")
    tokens = integers_of(fields["tokens"], "tokens")
    table = _table(fields["spans"], geometry, page_size)
    fits = all(4 * shape.snapshot_row <= geometry.page_bytes(page_size) for _, shape in geometry.states)
    require(fits, "a page is smaller than a row of a state")
    states = _snapshots(snapshots, geometry, len(tokens), page_size)
    _require_all(num_pages, table, states)
    require(spans.counts(table).sum() == len(tokens), "the spans do not hold as many entries as tokens")
    stretches = _stretches(fields["stretches"], spans.positions(table))
    next_position = integer_of(fields["next_position"], "next_position")
    tail, num_logits = _tail(fields["tail"])
    by_head = None if heads is None else _head_positions(heads, geometry, spans.positions(table))
    biased = None if bias is None else _bias(bias, geometry, len(tokens))
    contents = EntryTable(table, tokens, stretches, next_position, tail, states, by_head, biased)
    needed = [window is None for window in geometry.windows]
    lacks = ~spans.held(table) & needed
    require(not (lacks.any() and lacks[~geometry.unseen(contents)].any()), "a layer without a window lacks entries")
    return StreamHeader(geometry, page_size, layout, num_pages, contents, num_logits)


def _snapshots(value: Any, geometry: Geometry, entries: int, page_size: int) -> tuple[StateSnapshot, ...]:
    right = isinstance(value, list) and all(isinstance(one, list) and len(one) == 2 for one in value)
    require(right and (len(geometry.states) > 0 or not value), "snapshots are not a list of pairs")
    found: list[StateSnapshot] = []
    for at, pages in value:
        own = integers_of(pages, "a snapshot's pages")
        least = found[-1].at + 1 if found else 0
        require(integer_of(at, "a snapshot's entries", least) <= entries, "a snapshot is behind the value")
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
    table = integers_of([number for span in counted for number in span], "spans").reshape(-1, width)
    table[:, PAGE:] -= 1
    starts, stops = table[:, START], table[:, STOP]
    require((starts < stops).all() and (stops <= page_size).all(), "a span is not within its page")
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
        stop = start + integer_of(count, "a stretch's count", 1)
        require(stop <= len(positions), "stretches hold more entries than there are tokens")
        if model is None:
            require(before == [], "a stretch that is not canonical has tokens before it")
            stretches.append(Stretch(count, None, NOTHING))
        else:
            known = integers_of(before, "a stretch's tokens before")
            expected = np.arange(len(known), len(known) + count)
            require(np.array_equal(positions[start:stop], expected), "a canonical stretch has wrong positions")
            stretches.append(Stretch(count, name_of(model, "a stretch's model"), known))
        start = stop
    require(start == len(positions), "stretches hold fewer entries than there are tokens")
    return tuple(stretches)


def _tail(value: Any) -> tuple[Tail | None, int]:
    if value is None:
        return None, 0
    fields = object_of(value, "the tail", "model", "pending", "num_logits")
    pending = None if fields["pending"] is None else integer_of(fields["pending"], "the pending token")
    tail = Tail(name_of(fields["model"], "the tail's model"), pending=pending)
    return tail, integer_of(fields["num_logits"], "num_logits")
