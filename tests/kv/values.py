"""A stand-in for a model: K and V of an entry are a digest of the weights and of everything it attended to.

So an entry that was computed over another prefix, or by other weights, has other numbers, and a comparison of bits
detects any confusion. The numbers are bytes, which float32 and bfloat16 both represent exactly.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from twostroke.backends.page_memory import HostMemory
from twostroke.kv.cache import KVCache
from twostroke.kv.entries import Tail
from twostroke.kv.geometry import Geometry
from twostroke.kv.pool import PagePool
from twostroke.kv.slot_mapping import SlotMapping
from twostroke.kv.writer import KVWriter
from twostroke.models.layer_groups import LayerGroup
from twostroke.models.recurrent import GatedDeltaNet
from twostroke.models.rope import Rope


def geometry(num_layers: int = 2, num_kv_heads: int = 2, head_dim: int = 4, kv_dtype: str = "float32") -> Geometry:
    """Layers that are all alike."""
    group = LayerGroup(tuple(range(num_layers)), None, num_kv_heads, head_dim, num_layers)
    return Geometry((group,), (Rope(1e4),) * num_layers, kv_dtype, "letters")


GEOMETRY = geometry()
# A group for each of the layers, so that one may lack pages that the other has.
APART = replace(GEOMETRY, groups=(LayerGroup((0,), None, 2, 4, 1), LayerGroup((1,), None, 2, 4, 1)))
# Two groups of layers whose entries have the same numbers; the second one gives back what is behind its window.
FULL, SLIDING = LayerGroup((0, 1), None, 2, 4, 2), LayerGroup((2, 3), 6, 2, 4, 2)
WINDOWED = Geometry((FULL, SLIDING), (Rope(1e4),) * 4, "float32", "letters")
# A third layer has a state, whose snapshots take two pages.
STATE = GatedDeltaNet(num_k_heads=1, num_v_heads=1, k_dim=16, v_dim=8, conv_width=3, chunk=8)
ROWS, INPUTS = LayerGroup((2,), 8, 1, 26, 1, "rows"), LayerGroup((2,), 3, 1, 40, 1, "inputs")
RECURRENT = Geometry((FULL, ROWS, INPUTS), (Rope(1e4),) * 2, "float32", "letters", ((2, STATE),))
SHAPE = (2, 2, 2, 4)  # layers, K and V, heads, head_dim: 32 numbers, as many as a digest has bytes


def make_pool(
    num_pages: int = 60, page_size: int = 4, geometry: Geometry = GEOMETRY, in_pairs: bool = False
) -> PagePool:
    memory = HostMemory(num_pages, geometry.page_shape(page_size), "pairs" if in_pairs else "plain")
    return PagePool(geometry, memory, num_pages, page_size)


def computed(model: str, context: Sequence[bytes], token: int, position: int) -> bytes:
    """The entry that `model` computes for a token at a position after the entries of `context`."""
    return hashlib.blake2b(repr((model, token, position)).encode() + b"".join(context), digest_size=32).digest()


def array(entries: Sequence[bytes]) -> np.ndarray:
    """[layers, 2, n, heads, head_dim], as `KVCache.entries` returns them."""
    numbers = np.frombuffer(b"".join(entries), np.uint8).reshape(len(entries), *SHAPE)
    return np.moveaxis(numbers, 0, 2).astype(np.float32)


def contents(kv: KVCache) -> list[bytes]:
    """The entries of a value, by the inverse of `array`."""
    numbers = kv.entries()[: SHAPE[0]].astype(np.float32).astype(np.uint8)
    return [entry.tobytes() for entry in np.moveaxis(numbers, 2, 0)]


def recurrent(entry: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What an entry of `RECURRENT` is in the layer with a state: k and u, small integers, and inputs."""
    digest = np.frombuffer(entry, np.uint8).astype(np.float32)
    return digest[:16] % 4, digest[16:24] % 4, np.resize(digest, STATE.conv_size)


def write_recurrent(pool: PagePool, places: SlotMapping, entries: Sequence[bytes], state: np.ndarray) -> None:
    """Write entries of `RECURRENT` behind a state, which does not decay: a sum of products of integers is exact."""
    rows = np.zeros((1, 1, len(entries), 1, STATE.row_values), np.float32)
    inputs = np.zeros((1, 1, len(entries), 1, STATE.conv_size), np.float32)
    reached = [state]
    for i, entry in enumerate(entries):
        k, u, inputs[..., i, 0, :] = recurrent(entry)
        rows[..., i, 0, :24] = np.concatenate([k, u])
        reached.append(reached[-1] + np.outer(k, u))
    for group, (frames, numbers) in enumerate(zip(places.frames, (array(entries), rows, inputs), strict=True)):
        kept = frames >= 0
        pool.memory.write(group, frames[kept], places.slots[kept], numbers[:, :, kept])
    assert places.states is not None
    size = pool.geometry.state_pages(pool.page_size).rows_in_page(2) * STATE.v_dim
    for count, target in places.states.targets:
        whole = np.concatenate([reached[count].ravel(), np.zeros(2 * STATE.conv_size, np.float32)])
        for i, frame in enumerate(target.tolist()):
            part = whole[i * size : (i + 1) * size]
            pool.memory.state_storage[frame, : len(part)] = part


def enter(writer: KVWriter, tokens: Sequence[int]) -> None:
    """Append tokens and compute them."""
    context = contents(writer.freeze())
    for token in tokens:
        context.append(computed(writer.model, context, token, writer.next_position + len(context) - len(writer)))
    if writer.base.pool.geometry.states:
        known = writer.freeze().states()
        assert known is not None
        places = writer.append(list(tokens))
        write_recurrent(writer.base.pool, places, context[len(context) - len(tokens) :], known[2])
        return
    places = writer.append(list(tokens))
    entries = writer.base.pool.geometry.stored.encode(array(context[len(context) - len(tokens) :]))
    for group, frames in enumerate(places.frames):
        own = [layer % len(entries) for layer in writer.base.pool.geometry.groups[group].layers]
        writer.base.pool.memory.write(group, frames, places.slots, entries[own])


def prefill(after: KVCache | PagePool, tokens: Sequence[int], model: str = "m", tail: Tail | None = None) -> KVCache:
    """A value that extends another one, or begins in a pool."""
    writer = KVWriter(after if isinstance(after, KVCache) else KVCache.empty(after), model)
    enter(writer, tokens)
    return writer.freeze(tail)


def same_tail(one: Tail | None, other: Tail | None) -> bool:
    if one is None or other is None or one.logits is None or other.logits is None:
        return one == other
    assert one.logits.dtype == other.logits.dtype
    return (one.model, one.pending) == (other.model, other.pending) and np.array_equal(one.logits, other.logits)
