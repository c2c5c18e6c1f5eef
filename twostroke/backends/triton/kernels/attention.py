"""Attention over the pages of a pool, one kernel for prefill and decode.

A tile of queries is 64 rows: tokens of one sequence by the query heads that share a KV head. Keys come in tiles of
fixed size, counted from the sequence's first entry, so neither pages nor chunks nor neighbours change what is summed.

Each tile of keys is summed by itself, relative to its own largest score rounded up to an integer (in base 2), and the
tiles are added in order. Rescaling is by powers of two, which is exact. So it does not matter where the tiles are
added: in the registers of one program (prefill), or by a second kernel from the memory that many programs wrote to
(decode). Rounding up costs nothing: weights are then between 0 and 1 still, the largest above 1/2.

FlashAttention: Dao et al. 2022, arXiv:2205.14135; splits along keys for decode: Flash-Decoding, Dao et al. 2023.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.numbers import dot, narrow, power_of_two

ROWS: tl.constexpr = tl.constexpr(64)
FIELDS: tl.constexpr = tl.constexpr(8)  # of a work item: see `backends/triton/work.py`


@triton.jit
def attention_kernel(
    work_ptr, q_ptr, kv_ptr, cells_ptr, positions_ptr, out_ptr, sums_ptr, tops_ptr, totals_ptr,
    page_stride, layer, scale, window,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Tiles [begin, end) of keys for one tile of queries and one KV head. Grid: work items, HKV.

    An item whose stride is 0 writes out [N, HQ, D] bfloat16. Others write each tile's sum of values
    [parts, HQ, D], its largest score and its total [parts, HQ], float32, one part for each token and tile.
    """
    item = work_ptr + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    row, count, base, order = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    begin, end, part, stride = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
    if count > 0:
        GROUP: tl.constexpr = HQ // HKV
        r, d = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
        token = r // GROUP
        valid = token < count
        query_head = head * GROUP + r % GROUP
        at = ((row + token) * HQ + query_head).to(tl.int64) * D
        wanted = valid[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + at[:, None] + d[None, :], mask=wanted, other=0.0)
        own = order + token  # a row's place among its sequence's entries
        limit = order + count
        if WINDOW:
            least = tl.load(positions_ptr + base + own, mask=valid, other=0) - window
        k_side = kv_ptr + ((layer * 2 * HKV + head) * (PAGE * D)).to(tl.int64)
        v_side = k_side + HKV * PAGE * D
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, BLOCK_D), tl.float32)
        for tile in range(begin, end):
            j = tile * KEYS + tl.arange(0, KEYS)
            exists = j < limit
            cell = tl.load(cells_ptr + base + j, mask=exists, other=0)
            address = (cell // PAGE).to(tl.int64) * page_stride + (cell % PAGE) * D
            k = tl.load(k_side + address[None, :] + d[:, None], mask=exists[None, :] & (d < D)[:, None], other=0.0)
            scores = dot(q, k, tl.zeros((ROWS, KEYS), tl.float32)) * scale
            visible = j[None, :] <= own[:, None]
            if WINDOW:
                position = tl.load(positions_ptr + base + j, mask=exists, other=0)
                visible = visible & (position[None, :] > least[:, None])
            scores = tl.where(visible & valid[:, None], scores, float("-inf"))
            tile_top = tl.ceil(tl.max(scores, 1))
            weights = tl.exp2(scores - tl.where(tile_top == float("-inf"), 0.0, tile_top)[:, None])
            tile_total = tl.sum(weights, 1)
            v = tl.load(v_side + address[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)
            made = dot(narrow(weights), v, tl.zeros((ROWS, BLOCK_D), tl.float32))
            if stride > 0:
                place = (part + token * stride + tile).to(tl.int64) * HQ + query_head
                tl.store(tops_ptr + place, tile_top, mask=valid)
                tl.store(totals_ptr + place, tile_total, mask=valid)
                tl.store(sums_ptr + place[:, None] * D + d[None, :], made, mask=wanted)
            else:
                top, total, out = fold(top, total, out, tile_top, tile_total, made)
        if stride == 0:
            # A row of a padded tile has no key at all.
            made = out / tl.where(valid, total, 1.0)[:, None]
            tl.store(out_ptr + at[:, None] + d[None, :], narrow(made), mask=wanted)


@triton.jit
def fold(top, total, out, tile_top, tile_total, made):
    """Add a tile to the running sums [R], [R], [R, D]. Exact but for the two additions."""
    higher = tl.maximum(top, tile_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = power_of_two(top - base), power_of_two(tile_top - base)
    return higher, total * old + tile_total * new, out * old[:, None] + made * new[:, None]


@triton.jit
def combine_kernel(
    work_ptr, sums_ptr, tops_ptr, totals_ptr, out_ptr,
    HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The parts of a row, added in order: out [N, HQ, D] bfloat16. Grid: rows in parts, HQ.

    work [rows, 3]: the row, its first part, the number of its parts; 0 parts for no row.
    """
    item = work_ptr + tl.program_id(0) * 3
    row, part, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0:
        head = tl.program_id(1)
        d = tl.arange(0, BLOCK_D)
        top = tl.full((1,), float("-inf"), tl.float32)
        total = tl.zeros((1,), tl.float32)
        out = tl.zeros((1, BLOCK_D), tl.float32)
        one = tl.arange(0, 1)
        for n in range(count):
            place = (part + n).to(tl.int64) * HQ + head + one
            made = tl.load(sums_ptr + place[:, None] * D + d[None, :], mask=(d < D)[None, :], other=0.0)
            top, total, out = fold(top, total, out, tl.load(tops_ptr + place), tl.load(totals_ptr + place), made)
        made = out / total[:, None]
        at = (row * HQ + head).to(tl.int64) * D
        tl.store(out_ptr + at + d[None, :] + tl.zeros((1, BLOCK_D), tl.int32), narrow(made), mask=(d < D)[None, :])
