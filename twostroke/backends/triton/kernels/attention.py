"""Attention over the pages of a pool: one formula for prefill and decode, whose bits no tile and no order changes.

Keys come in tiles of a fixed number, counted from the sequence's first entry. So neither pages nor chunks nor
neighbours change what is summed. Within a tile:

- Weights are 2**(score - top), where top is the largest score rounded up to an integer. Scaling from one top to another
  is then by powers of two, which is exact down to 2**-126. The largest weight is about 1/2 at least and 1 at most.
- The total of weights is summed in integers, in units of 2**-23, which is exact in any order.
- Products are chains of the matrix unit in ascending order, the same for any number of rows.

Tiles are added in order. As scaling is exact, it does not matter where: in the registers of one program (prefill), or
by a second kernel from the memory that many programs wrote to (decode).

FlashAttention: Dao et al. 2022, arXiv:2205.14135; splits along keys for decode: Flash-Decoding, Dao et al. 2023.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.codes import SCALE, load_codes, load_scales, rotated
from twostroke.backends.triton.kernels.launch import kernel
from twostroke.backends.triton.kernels.numbers import dot, narrow, power_of_two, tanh

FIELDS: tl.constexpr = tl.constexpr(8)  # of a work item: see `backends/triton/pass_plan.py`


@kernel
def attention_kernel(
    work_ptr, q_ptr, kv_ptr, cells_ptr, positions_ptr, sinks_ptr, bias_ptr, out_ptr, sums_ptr, tops_ptr, totals_ptr,
    page_stride, layer, scale, window, bias_stride, cap_scale,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, SINKS: tl.constexpr,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, WIDTH: tl.constexpr, V_BITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tiles [first, last) of keys for one tile of queries and one KV head. Grid: work items, HKV.

    A tile of queries is ROWS rows: tokens of one sequence by the query heads that share the KV head. Without SPLIT an
    item has all tiles, and writes out [N, HQ, D] bfloat16. With it items write each tile's sum of values [parts, HQ,
    D], its top and its total [parts, HQ], float32, one part for each token and tile. SINKS: there are sink logits
    [HQ], which count once in a row's total, with all its tiles. BIASED: what is added to scores, [layers, HKV, entries
    of all sequences] float32, in logarithms to base 2. CAPPED: a product s is tanh(s * cap_scale), and `scale` has the
    cap. WIDTH: elements of a part of an entry. V_BITS is 0 if pages have
    numbers, and else the bits of codes of V; K has 8 then, a page is in bytes, and D is 2**STAGES.
    """
    item = work_ptr + tl.program_id(0) * FIELDS
    head = tl.program_id(1)
    row, count, base, order = tl.load(item), tl.load(item + 1), tl.load(item + 2), tl.load(item + 3)
    first, last, part, stride = tl.load(item + 4), tl.load(item + 5), tl.load(item + 6), tl.load(item + 7)
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
        least = order
        if WINDOW:
            least = tl.load(positions_ptr + base + own, mask=valid, other=0) - window
        if V_BITS:
            q = narrow(rotated(q.to(tl.float32), ROWS, D, STAGES))
            k_side = kv_ptr + (layer * HKV + head).to(tl.int64) * (PAGE * WIDTH)
            v_side = k_side + D + SCALE
        else:
            k_side = kv_ptr + (layer * 2 * HKV + head).to(tl.int64) * (PAGE * WIDTH)
            v_side = k_side + HKV * PAGE * WIDTH
        biases = bias_ptr
        if BIASED:
            biases += (layer * HKV + head).to(tl.int64) * bias_stride
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        out = tl.zeros((ROWS, BLOCK_D), tl.float32)
        whole = first
        if not (SPLIT or WINDOW):  # tiles that every row sees
            whole = first + tl.maximum(tl.minimum((order + 1) // KEYS, last) - first, 0)
            for tile in range(first, whole):
                tile_top, tile_total, made = weigh(
                    q, k_side, v_side, cells_ptr, positions_ptr, biases, base, tile, limit, own, least, scale,
                    cap_scale, page_stride, D, PAGE, False, False, ROWS, KEYS, BLOCK_D, BIASED, CAPPED, WIDTH, V_BITS,
                )  # fmt: skip
                top, total, out = fold(top, total, out, tile_top, tile_total, made)
        for tile in range(whole, last):
            tile_top, tile_total, made = weigh(
                q, k_side, v_side, cells_ptr, positions_ptr, biases, base, tile, limit, own, least, scale,
                cap_scale, page_stride, D, PAGE, True, WINDOW, ROWS, KEYS, BLOCK_D, BIASED, CAPPED, WIDTH, V_BITS,
            )  # fmt: skip
            if SPLIT:
                place = (part + token * stride + tile).to(tl.int64) * HQ + query_head
                tl.store(tops_ptr + place, tile_top, mask=valid)
                tl.store(totals_ptr + place, tile_total, mask=valid)
                tl.store(sums_ptr + place[:, None] * D + d[None, :], made, mask=wanted)
            else:
                top, total, out = fold(top, total, out, tile_top, tile_total, made)
        if not SPLIT:
            if SINKS:
                total += sink_weight(tl.load(sinks_ptr + query_head), top)
            made = out / tl.where(valid, total, 1.0)[:, None]
            if V_BITS:
                made = rotated(made, ROWS, D, STAGES) * (1.0 / D)
            tl.store(out_ptr + at[:, None] + d[None, :], narrow(made), mask=wanted)


@triton.jit
def weigh(
    q, k_side, v_side, cells_ptr, positions_ptr, biases, base, tile, limit, own, least, scale, cap_scale, page_stride,
    D: tl.constexpr, PAGE: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_D: tl.constexpr,
    BIASED: tl.constexpr, CAPPED: tl.constexpr, WIDTH: tl.constexpr, V_BITS: tl.constexpr,
):  # fmt: skip
    """One tile of keys: its top [ROWS], its total [ROWS] and its sum of values [ROWS, BLOCK_D].

    Rows see entries up to their own; with WINDOW those at positions above `least`.
    """
    d = tl.arange(0, BLOCK_D)
    j = tile * KEYS + tl.arange(0, KEYS)
    if MASKED:
        exists = j < limit
        cell = tl.load(cells_ptr + base + j, mask=exists, other=0)
    else:
        cell = tl.load(cells_ptr + base + j)
    address = (cell // PAGE).to(tl.int64) * page_stride + (cell % PAGE) * WIDTH
    if V_BITS:
        there = j < limit  # all of them, if the tile is not masked
        k = load_codes(k_side, address[None, :], d[:, None], there[None, :], D, 8)
        v = load_codes(v_side, address[:, None], d[None, :], there[:, None], D, V_BITS)
        k_scales, v_scales = load_scales(k_side, address, there, D, 8), load_scales(v_side, address, there, D, V_BITS)
    elif MASKED:  # what is beyond the sequence may be NaN, and 0 times NaN is NaN
        k = tl.load(k_side + address[None, :] + d[:, None], mask=exists[None, :] & (d < D)[:, None], other=0.0)
        v = tl.load(v_side + address[:, None] + d[None, :], mask=exists[:, None] & (d < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        k = tl.load(k_side + address[None, :] + d[:, None])
        v = tl.load(v_side + address[:, None] + d[None, :])
    else:
        k = tl.load(k_side + address[None, :] + d[:, None], mask=(d < D)[:, None], other=0.0)
        v = tl.load(v_side + address[:, None] + d[None, :], mask=(d < D)[None, :], other=0.0)
    scores = dot(q, k, tl.zeros((ROWS, KEYS), tl.float32))
    if V_BITS:
        scores = scores * k_scales[None, :]
    if CAPPED:
        scores = tanh(scores * cap_scale)
    if MASKED:
        visible = j[None, :] <= own[:, None]
        if WINDOW:
            position = tl.load(positions_ptr + base + j, mask=exists, other=0)
            visible = visible & (position[None, :] > least[:, None])
        scores = tl.where(visible, scores, float("-inf"))
    # Fused on purpose: a compiler may fuse it or not, by what is around it, and the bits would differ.
    if BIASED:  # a bias of 0 gives the bits of none: a product that is rounded later has the same largest one
        bias = tl.load(biases + base + j, mask=j < limit, other=0.0)[None, :]
        top = tl.ceil(tl.max(tl.fma(scores, tl.zeros_like(scores) + scale, tl.zeros_like(scores) + bias), 1))
    else:
        top = tl.ceil(tl.max(scores, 1) * scale)
    lowered = tl.where(top == float("-inf"), 0.0, -top)[:, None]
    if BIASED:
        lowered = lowered + bias
    weights = tl.exp2(tl.fma(scores, tl.zeros_like(scores) + scale, tl.zeros_like(scores) + lowered))
    units = (weights + 1.0).to(tl.int32, bitcast=True) - 0x3F800000  # the bits of 1 + w count w in units of 2^-23
    total = tl.sum(units, 1).to(tl.float32) * 1.1920928955078125e-07
    if V_BITS:
        weights = weights * v_scales[None, :]
    return top, total, dot(narrow(weights), v, tl.zeros((ROWS, BLOCK_D), tl.float32))


@triton.jit
def fold(top, total, out, tile_top, tile_total, made):
    """Add a tile to the running sums [R], [R], [R, D]. Exact but for the two additions."""
    higher = tl.maximum(top, tile_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    old, new = power_of_two(top - base), power_of_two(tile_top - base)
    return higher, total * old + tile_total * new, out * old[:, None] + made * new[:, None]


@triton.jit
def sink_weight(logit, top):
    """The weight of a sink logit beside keys whose top is `top`."""
    lowered = tl.where(top == float("-inf"), 0.0, -top)
    return tl.exp2(tl.fma(logit, tl.zeros_like(logit) + 1.4426950408889634, lowered))


@kernel
def combine_kernel(
    work_ptr, sums_ptr, tops_ptr, totals_ptr, sinks_ptr, out_ptr,
    HQ: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, SINKS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The parts of a row, added in order: out [N, HQ, D] bfloat16. Grid: rows in parts, HQ, blocks of BLOCK_D columns.

    With STAGES the sums are of rotated values, and a program has all columns.

    work [rows, 3]: the row, its first part, the number of its parts; 0 parts for no row. The largest top is found
    first: scaled to it or step by step, the sums are the same. Then BLOCK parts at a time are loaded.
    """
    item = work_ptr + tl.program_id(0) * 3
    row, part, count = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    if count > 0:
        head = tl.program_id(1)
        d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
        lanes = tl.arange(0, BLOCK)
        highest = tl.full((BLOCK,), float("-inf"), tl.float32)
        for n in range(0, count, BLOCK):
            place = (part + n + lanes).to(tl.int64) * HQ + head
            highest = tl.maximum(highest, tl.load(tops_ptr + place, mask=n + lanes < count, other=float("-inf")))
        top = tl.max(highest, 0)
        total = 0.0
        out = tl.zeros((BLOCK_D,), tl.float32)
        for n in range(0, count, BLOCK):
            for i in tl.static_range(BLOCK):
                # Past the last part it is read once more, times 0: so that all loads can be in flight.
                exists = n + i < count
                place = (part + tl.minimum(n + i, count - 1)).to(tl.int64) * HQ + head
                made = tl.load(sums_ptr + place * D + d, mask=d < D, other=0.0)
                factor = tl.where(exists, power_of_two(tl.load(tops_ptr + place) - top), 0.0)
                total += tl.load(totals_ptr + place) * factor
                out += made * factor
        if SINKS:
            total += sink_weight(tl.load(sinks_ptr + head), top)
        at = (row * HQ + head).to(tl.int64) * D
        made = out / total
        if STAGES:
            made = tl.reshape(rotated(made[None, :], 1, D, STAGES), (D,)) * (1.0 / D)
        tl.store(out_ptr + at + d, narrow(made), mask=d < D)
