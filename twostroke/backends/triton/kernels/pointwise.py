"""Kernels that compute row by row: embedding, norms, RoPE with the store of K and V, span tables."""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.codes import SCALE, store_codes
from twostroke.backends.triton.kernels.launch import kernel, unfused_kernel
from twostroke.backends.triton.kernels.numbers import narrow, rms, tanh
from twostroke.backends.triton.kernels.tiles import sum_of_parts


@kernel
def resolve_kernel(ids_ptr, drawn_ptr, out_ptr, N, BLOCK: tl.constexpr):
    """Token ids, with placeholders -1 - i replaced by the i-th drawn token."""
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + n, mask=n < N, other=0)
    known = tl.load(drawn_ptr + tl.maximum(-1 - ids, 0), mask=(n < N) & (ids < 0), other=0)
    tl.store(out_ptr + n, tl.maximum(tl.where(ids < 0, known, ids), 0), mask=n < N)


@kernel
def embed_kernel(ids_ptr, table_ptr, out_ptr, factor, HIDDEN: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a bfloat16 table, times `factor`: float32 [N, HIDDEN]."""
    row = tl.program_id(0)
    columns = tl.arange(0, BLOCK)
    source = table_ptr + tl.load(ids_ptr + row).to(tl.int64) * HIDDEN
    values = tl.load(source + columns, mask=columns < HIDDEN, other=0.0).to(tl.float32)
    tl.store(out_ptr + row.to(tl.int64) * HIDDEN + columns, values * factor, mask=columns < HIDDEN)


@unfused_kernel
def norm_kernel(
    x_ptr, parts_ptr, bias_ptr, post_ptr, weight_ptr, dropout_ptr, out_ptr, part_stride, eps, factor, stream,
    HIDDEN: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr, POST: tl.constexpr, NORM: tl.constexpr,
    DROPOUT: tl.constexpr, SCALED: tl.constexpr, COPIED: tl.constexpr, GROWN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x += the sum of `PARTS` parts and a bias if BIAS, after a norm if POST, times `factor` if SCALED.

    Then x is multiplied by `stream` if GROWN. out = norm(x) if NORM, or x if COPIED, times dropout's factors, bfloat16;
    without either only x changes. x is float32 [N, HIDDEN], parts float32 [PARTS, .., HIDDEN], `part_stride` apart.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < HIDDEN
    at = row * HIDDEN + columns
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    if PARTS > 0:
        added = tl.load(parts_ptr + at, mask=inside, other=0.0)
        for s in tl.static_range(1, PARTS):
            added += tl.load(parts_ptr + s * part_stride + at, mask=inside, other=0.0)
        if POST:
            if BIAS:
                added += tl.load(bias_ptr + columns, mask=inside, other=0.0)
            scale = rms(tl.sum(added * added, 0), HIDDEN, eps)
            added = added * scale * tl.load(post_ptr + columns, mask=inside, other=0.0)
        if SCALED:
            if BIAS and not POST:
                added += tl.load(bias_ptr + columns, mask=inside, other=0.0)
            added = added * factor
        x = x + added
    if BIAS and not (POST or SCALED):
        x = x + tl.load(bias_ptr + columns, mask=inside, other=0.0)
    if GROWN:
        x = x * stream
    if PARTS > 0 or BIAS or GROWN:
        tl.store(x_ptr + at, x, mask=inside)
    if NORM or COPIED:
        made = x
        if NORM:
            scale = rms(tl.sum(x * x, 0), HIDDEN, eps)
            made = x * scale * tl.load(weight_ptr + columns, mask=inside, other=0.0)
        if DROPOUT:
            made = made * tl.load(dropout_ptr + at, mask=inside, other=0.0)
        tl.store(out_ptr + at, narrow(made), mask=inside)


@unfused_kernel
def rope_store_kernel(
    parts_ptr, part_stride, bias_ptr, q_norm_ptr, k_norm_ptr, q_squares_ptr, k_squares_ptr, eps,
    cos_ptr, sin_ptr, growth_ptr, positions_ptr, cells_ptr, q_ptr, kv_ptr, page_stride, layer,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    BIAS: tl.constexpr, NORMS: tl.constexpr, WHOLE: tl.constexpr, VALUE_NORM: tl.constexpr, SAME: tl.constexpr,
    GROWS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, V_BITS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """q, k and v of a row from the sum of its parts [PARTS, N, (HQ + 2 HKV) D]: bias, norms of q and k, RoPE.

    q is written to [N, HQ, D], k and v to the row's cell (frame * PAGE + slot); a cell below 0 is no place. A program
    takes HEADS heads of a row. HKV is 0 if entries are another layer's. WIDTH, V_BITS, STAGES: as attention's.

    WHOLE: norms are over all query heads of the model, so many, and over all KV heads. Squares [N, heads] are those of
    `head_squares_kernel`. VALUE_NORM: v has a norm without weights. SAME: parts have no v, which is k before its norm.
    """
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    width: tl.constexpr = (HQ + (1 if SAME else 2) * HKV) * D
    mask = (heads[:, None] < HQ + 2 * HKV) & (i[None, :] < D // 2)
    source = tl.where(heads >= HQ + HKV, heads - HKV, heads) if SAME else heads
    columns = source[:, None] * D + i[None, :]
    first = sum_of_parts(parts_ptr, part_stride, row * width + columns, mask, PARTS)
    second = sum_of_parts(parts_ptr, part_stride, row * width + columns + D // 2, mask, PARTS)
    if BIAS:
        first += tl.load(bias_ptr + columns, mask=mask, other=0.0)
        second += tl.load(bias_ptr + columns + D // 2, mask=mask, other=0.0)
    is_q, is_v = heads < HQ, heads >= HQ + HKV
    if NORMS:
        if WHOLE:
            K_HEADS: tl.constexpr = WHOLE * HKV // HQ
            q_sum = whole_squares(q_squares_ptr + row * WHOLE, WHOLE)
            k_sum = whole_squares(k_squares_ptr + row * K_HEADS, K_HEADS)
            scale = tl.where(is_q, rms(q_sum, WHOLE * D, eps), rms(k_sum, K_HEADS * D, eps))[:, None]
            weights = tl.where(is_q[:, None], q_norm_ptr + columns, k_norm_ptr + columns - HQ * D)
            left = tl.load(weights, mask=mask & (is_v == 0)[:, None], other=1.0)
            right = tl.load(weights + D // 2, mask=mask & (is_v == 0)[:, None], other=1.0)
        else:
            squares = tl.sum(first * first + second * second, 1)
            scale = rms(squares, D, eps)[:, None]
            inside = i < D // 2
            qa, qb = tl.load(q_norm_ptr + i, mask=inside), tl.load(q_norm_ptr + D // 2 + i, mask=inside)
            ka, kb = tl.load(k_norm_ptr + i, mask=inside), tl.load(k_norm_ptr + D // 2 + i, mask=inside)
            left = tl.where(is_q[:, None], qa[None, :], ka[None, :])
            right = tl.where(is_q[:, None], qb[None, :], kb[None, :])
        if VALUE_NORM:
            first = tl.where(is_v[:, None], first * scale, first * scale * left)
            second = tl.where(is_v[:, None], second * scale, second * scale * right)
        else:
            first = tl.where(is_v[:, None], first, first * scale * left)
            second = tl.where(is_v[:, None], second, second * scale * right)
    position = tl.load(positions_ptr + row).to(tl.int64)
    cos = tl.load(cos_ptr + position * (D // 2) + i, mask=i < D // 2, other=1.0)[None, :]
    sin = tl.load(sin_ptr + position * (D // 2) + i, mask=i < D // 2, other=0.0)[None, :]
    if GROWS:  # queries by a factor of their position
        grown = tl.where(is_q, tl.load(growth_ptr + position), 1.0)[:, None]
        cos, sin = cos * grown, sin * grown
    a = narrow(tl.where(is_v[:, None], first, first * cos - second * sin))
    b = narrow(tl.where(is_v[:, None], second, second * cos + first * sin))
    q_at = q_ptr + row * (HQ * D) + columns
    tl.store(q_at, a, mask=mask & is_q[:, None])
    tl.store(q_at + D // 2, b, mask=mask & is_q[:, None])
    if HKV == 0:
        return
    cell = tl.load(cells_ptr + row)
    stored = (heads >= HQ) & (heads < HQ + 2 * HKV) & (cell >= 0)
    at = (cell // PAGE).to(tl.int64) * page_stride + (cell % PAGE) * WIDTH
    if V_BITS:
        places = kv_ptr + at + (layer * HKV + (heads - HQ) % HKV).to(tl.int64) * (PAGE * WIDTH)
        places += tl.where(is_v, D + SCALE, 0)
        both = tl.permute(tl.join(a.to(tl.float32), b.to(tl.float32)), (0, 2, 1))
        store_codes(places, tl.reshape(both, (HEADS, D)), is_v, stored, HEADS, D, STAGES, V_BITS)
    else:
        side = tl.where(is_v, HKV, 0) + (heads - HQ) % HKV  # K's heads, then V's
        places = kv_ptr + at + ((layer * 2 * HKV + side).to(tl.int64) * (PAGE * WIDTH))[:, None] + i[None, :]
        tl.store(places, a, mask=mask & stored[:, None])
        tl.store(places + D // 2, b, mask=mask & stored[:, None])


@unfused_kernel
def head_squares_kernel(
    parts_ptr, part_stride, bias_ptr, q_squares_ptr, k_squares_ptr,
    HQ: tl.constexpr, HKV: tl.constexpr, D: tl.constexpr, PARTS: tl.constexpr, BIAS: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sum of squares of each head of q and of k, float32 [N, HQ] and [N, HKV]. Parts as of `rope_store_kernel`."""
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, BLOCK)
    mask = (heads[:, None] < HQ + HKV) & (i[None, :] < D)
    columns = heads[:, None] * D + i[None, :]
    x = sum_of_parts(parts_ptr, part_stride, row * ((HQ + 2 * HKV) * D) + columns, mask, PARTS)
    if BIAS:
        x += tl.load(bias_ptr + columns, mask=mask, other=0.0)
    squares = tl.sum(x * x, 1)
    tl.store(q_squares_ptr + row * HQ + heads, squares, mask=heads < HQ)
    tl.store(k_squares_ptr + row * HKV + heads - HQ, squares, mask=(heads >= HQ) & (heads < HQ + HKV))


@triton.jit
def whole_squares(squares_ptr, COUNT: tl.constexpr):
    """The sum of a row's squares, of COUNT heads, one after another."""
    total = tl.load(squares_ptr)
    for head in tl.static_range(1, COUNT):
        total += tl.load(squares_ptr + head)
    return total


@kernel
def cap_kernel(x_ptr, count, cap, BLOCK: tl.constexpr):
    """x = cap tanh(x / cap), float32 [count]."""
    n = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + n, mask=n < count, other=0.0)
    tl.store(x_ptr + n, cap * tanh(x / cap), mask=n < count)


@kernel
def expand_kernel(
    spans_ptr, starts_ptr, cells_ptr, positions_ptr, N, group_stride,
    WIDTH: tl.constexpr, PAGE: tl.constexpr, SPANS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Span tables [N, WIDTH] (first slot, past the last, position, frames) as cells and a position for each entry.

    starts [N]: the number of entries before each span. A program writes the cells of one group of layers.
    """
    group = tl.program_id(1)
    n = tl.program_id(0) * SPANS + tl.arange(0, SPANS)
    inside = n < N
    first = tl.load(spans_ptr + WIDTH * n, mask=inside, other=0)
    last = tl.load(spans_ptr + WIDTH * n + 1, mask=inside, other=0)
    position = tl.load(spans_ptr + WIDTH * n + 2, mask=inside, other=0)
    frame = tl.load(spans_ptr + WIDTH * n + 3 + group, mask=inside, other=0)
    start = tl.load(starts_ptr + n, mask=inside, other=0)
    lane = tl.arange(0, LANES)[None, :]
    mask = lane < (last - first)[:, None]
    cells_ptr += group * group_stride
    tl.store(cells_ptr + start[:, None] + lane, (frame * PAGE + first)[:, None] + lane, mask=mask)
    tl.store(positions_ptr + start[:, None] + lane, position[:, None] + lane, mask=mask)
