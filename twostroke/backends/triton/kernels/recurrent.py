"""What surrounds the sums over rows of a recurrent layer: its convolution, decays, norms and gates.

A product's outputs are read as parts, float32 [PARTS, .., FEATURES], which are added in their order. The inputs of a
convolution and the rows of tokens lie in pages as [places, PAGE, numbers]; a cell (frame * PAGE + slot) below 0 is no
place. `models.recurrent` has the formulas.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel
from twostroke.backends.triton.kernels.numbers import narrow, rms, sigmoid
from twostroke.backends.triton.kernels.tiles import sum_of_parts

NORM_EPS: tl.constexpr = tl.constexpr(1e-6)  # of the norms of q and k


@triton.jit
def softplus(x):
    """log(1 + exp(x)) of float32, exact to rounding where it is small too."""
    small = tl.exp(-tl.abs(x))
    grown = 1.0 + small
    rest = tl.where(grown == 1.0, small, tl.log(grown) * (small / tl.where(grown == 1.0, 1.0, grown - 1.0)))
    return tl.maximum(x, 0.0) + rest


@triton.jit
def page_rows(cells, page_stride, place, PAGE: tl.constexpr, WIDTH: tl.constexpr):
    """The offsets of entries of WIDTH numbers at these cells, in the `place`-th layer of their pages."""
    return (cells // PAGE).to(tl.int64) * page_stride + (place * PAGE + cells % PAGE).to(tl.int64) * WIDTH


@triton.jit
def snapshot_places(frames_ptr, first, numbers, words, SIZE: tl.constexpr):
    """The offsets of a layer's numbers in a snapshot, whose frames begin at `first`: SIZE numbers in each."""
    frames = tl.load(frames_ptr + first + numbers // SIZE)
    return frames.to(tl.int64) * words + numbers % SIZE


@triton.jit
def _inputs(
    rows, there, back, at_ptr, inputs_ptr, cells_ptr, pages_ptr, page_stride, place, frames_ptr, start, states_ptr,
    words, columns, wide, CONV: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Inputs of the convolution `back` tokens before rows, float32 [rows, columns]: of this pass, of pages, or kept."""
    before = tl.load(at_ptr + 4 * rows, mask=there, other=0)  # the sequence's rows in this pass before this one
    since = tl.load(at_ptr + 4 * rows + 1, mask=there, other=0)  # entries between the snapshot and this pass
    entry = tl.load(at_ptr + 4 * rows + 2, mask=there, other=0)
    source = tl.load(at_ptr + 4 * rows + 3, mask=there, other=-1)
    is_new = there & (back <= before)
    is_old = there & (back > before) & (back <= before + since)
    is_kept = (back > before + since) & (source >= 0)
    wide = wide[None, :]
    new_at = ((rows - back) * CONV)[:, None] + columns[None, :]
    new = tl.load(inputs_ptr + new_at, mask=wide & is_new[:, None], other=0.0)
    cells = tl.load(cells_ptr + entry - back, mask=is_old, other=0)
    old_at = page_rows(cells, page_stride, place, PAGE, CONV)[:, None] + columns[None, :]
    old = tl.load(pages_ptr + old_at, mask=wide & is_old[:, None], other=0.0)
    kept = wide & is_kept[:, None]
    numbers = STATE + ((since + before + WIDTH - 1 - back) * CONV)[:, None] + columns[None, :]
    first = tl.where(is_kept, source + start, 0)[:, None]
    kept_at = snapshot_places(frames_ptr, first, tl.where(kept, numbers, 0), words, SIZE)
    found = tl.load(states_ptr + kept_at, mask=kept, other=0.0)
    return tl.where(is_new[:, None], new.to(tl.float32), tl.where(is_old[:, None], old.to(tl.float32), found))


@kernel
def state_inputs_kernel(
    parts_ptr, part_stride, cells_ptr, out_ptr, pages_ptr, page_stride, place, N,
    FEATURES: tl.constexpr, CONV: tl.constexpr, PARTS: tl.constexpr, PRODUCT: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The first CONV outputs of a product, bfloat16 [N, CONV], and to pages; if PRODUCT, times those from 2 CONV on."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (rows < N)[:, None] & (columns < CONV)
    places = rows[:, None] * FEATURES + columns
    made = sum_of_parts(parts_ptr, part_stride, places, inside, PARTS)
    if PRODUCT:
        made = made * sum_of_parts(parts_ptr, part_stride, places + 2 * CONV, inside, PARTS)
    rounded = narrow(made)
    tl.store(out_ptr + rows[:, None] * CONV + columns, rounded, mask=inside)
    cells = tl.load(cells_ptr + rows, mask=rows < N, other=-1)
    kept = page_rows(cells, page_stride, place, PAGE, CONV)[:, None] + columns
    tl.store(pages_ptr + kept, rounded, mask=inside & (cells >= 0)[:, None])


@kernel
def convolve_kernel(
    at_ptr, inputs_ptr, cells_ptr, pages_ptr, page_stride, place, frames_ptr, start, states_ptr, words, N,
    weight_ptr, bias_ptr, q_scale, row_cells_ptr, rows_ptr, rows_stride, rows_place, out_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    PAGE: tl.constexpr, BIAS: tl.constexpr, NORMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """q, k and v of rows after the convolution and SiLU, bfloat16 [N, CONV], and k to the rows' entries.

    A program makes one head of q, k or v of ROWS rows. With NORMS q and k are of length 1, and q is times `q_scale`.
    """
    rows, unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    conv: tl.constexpr = 2 * HK * K + HV * V
    i = tl.arange(0, BLOCK)
    is_value = unit >= 2 * HK
    columns = tl.where(is_value, 2 * HK * K + (unit - 2 * HK) * V, unit * K) + i
    wide = i < tl.where(is_value, V, K)
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        seen = _inputs(
            rows, rows < N, WIDTH - 1 - tap, at_ptr, inputs_ptr, cells_ptr, pages_ptr, page_stride, place, frames_ptr,
            start, states_ptr, words, columns, wide, conv, WIDTH, HV * K * V, SIZE, PAGE,
        )  # fmt: skip
        total += seen * tl.load(weight_ptr + columns * WIDTH + tap, mask=wide, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias_ptr + columns, mask=wide, other=0.0)[None, :]
    made = total * sigmoid(total)
    if NORMS:
        length = 1.0 / tl.sqrt(tl.sum(made * made, 1) + NORM_EPS)
        length = tl.where(unit < HK, length * q_scale, length)
        made = tl.where(is_value, made, made * length[:, None])
    rounded = narrow(made)
    inside = (rows < N)[:, None] & wide[None, :]
    tl.store(out_ptr + rows[:, None] * conv + columns[None, :], rounded, mask=inside)
    if (unit >= HK) & (unit < 2 * HK):
        cells = tl.load(row_cells_ptr + rows, mask=rows < N, other=-1)
        width: tl.constexpr = HK * K + HV * V + 2 * HV
        own: tl.constexpr = K + HV // HK * V  # numbers of a head of k, and of what is written by it
        kept = page_rows(cells, rows_stride, rows_place, PAGE, width)[:, None] + (unit - HK) * own + i[None, :]
        tl.store(rows_ptr + kept, rounded, mask=inside & (cells >= 0)[:, None])


@kernel
def short_convolution_kernel(
    at_ptr, inputs_ptr, cells_ptr, pages_ptr, page_stride, place, frames_ptr, start, states_ptr, words, N,
    weight_ptr, parts_ptr, part_stride, out_ptr,
    CONV: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The convolution of rows' inputs, times the product's outputs from CONV on: bfloat16 [N, CONV]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = columns < CONV
    total = tl.zeros([ROWS, BLOCK], tl.float32)
    for tap in tl.static_range(WIDTH):
        seen = _inputs(
            rows, rows < N, WIDTH - 1 - tap, at_ptr, inputs_ptr, cells_ptr, pages_ptr, page_stride, place, frames_ptr,
            start, states_ptr, words, columns, wide, CONV, WIDTH, 0, SIZE, PAGE,
        )  # fmt: skip
        total += seen * tl.load(weight_ptr + columns * WIDTH + tap, mask=wide, other=0.0)[None, :]
    inside = (rows < N)[:, None] & wide[None, :]
    places = (rows * (3 * CONV) + CONV)[:, None] + columns[None, :]
    gate = sum_of_parts(parts_ptr, part_stride, places, inside, PARTS)
    tl.store(out_ptr + rows[:, None] * CONV + columns[None, :], narrow(total * gate), mask=inside)


@kernel
def keep_inputs_kernel(
    at_ptr, inputs_ptr, cells_ptr, pages_ptr, page_stride, place, frames_ptr, start, states_ptr, words, targets_ptr,
    CONV: tl.constexpr, WIDTH: tl.constexpr, STATE: tl.constexpr, SIZE: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The last inputs of the convolution to snapshots. targets [T, 2]: the last row before one, and its frames."""
    target, nth = tl.program_id(0), tl.program_id(1)
    columns = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    wide = columns < CONV
    one = tl.arange(0, 1)
    rows = tl.load(targets_ptr + 2 * target + one).to(tl.int64)
    seen = _inputs(
        rows, rows >= 0, WIDTH - 2 - nth, at_ptr, inputs_ptr, cells_ptr, pages_ptr, page_stride, place, frames_ptr,
        start, states_ptr, words, columns, wide, CONV, WIDTH, STATE, SIZE, PAGE,
    )  # fmt: skip
    numbers = tl.where(wide, STATE + nth * CONV + columns, 0)
    places = snapshot_places(frames_ptr, tl.load(targets_ptr + 2 * target + 1) + start, numbers, words, SIZE)
    tl.store(states_ptr + places[None, :], seen, mask=wide[None, :])


@kernel
def decays_kernel(
    items_ptr, parts_ptr, part_stride, decay_ptr, bias_ptr, cells_ptr, row_cells_ptr, rows_ptr, rows_stride, place,
    sums_ptr, write_ptr,
    FEATURES: tl.constexpr, HV: tl.constexpr, FIRST: tl.constexpr, PARTS: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, DELTA: tl.constexpr, CHUNK: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """For a head and the new rows of a chunk: sums of log decays from its first row on, and how strongly a row writes.

    Both float32 [N, HV], sums also to the rows' entries, which are given as float32: WIDTH of them for a row. A sum is
    the one before plus the row's own, whether that came in this pass or lies in a page. Outputs of the product from
    FIRST on are those of b, with DELTA, then those of a.
    """
    item, head = tl.program_id(0), tl.program_id(1)
    first = tl.load(items_ptr + FIELDS * item)
    count = tl.load(items_ptr + FIELDS * item + 1)
    known = tl.load(items_ptr + FIELDS * item + 2)
    entry = tl.load(items_ptr + FIELDS * item + 3)
    i = tl.arange(0, CHUNK)
    inside = i < count
    rows = (first + i).to(tl.int64)
    places = rows * FEATURES + FIRST + head
    step = sum_of_parts(parts_ptr, part_stride, places + (HV if DELTA else 0), inside, PARTS)
    step = softplus(step + tl.load(bias_ptr + head))
    log_decay = -tl.load(decay_ptr + head) * step
    cell = tl.load(cells_ptr + entry + known - 1, mask=known > 0, other=0)
    column = WIDTH - HV + head
    total = tl.load(rows_ptr + page_rows(cell, rows_stride, place, PAGE, WIDTH) + column, mask=known > 0, other=0.0)
    sums = tl.zeros([CHUNK], tl.float32)
    for j in range(count):
        total = total + tl.sum(tl.where(i == j, log_decay, 0.0), 0)
        sums = tl.where(i == j, total, sums)
    tl.store(sums_ptr + rows * HV + head, sums, mask=inside)
    if DELTA:
        step = sigmoid(sum_of_parts(parts_ptr, part_stride, places, inside, PARTS))
    tl.store(write_ptr + rows * HV + head, step, mask=inside)
    own = tl.load(row_cells_ptr + rows, mask=inside, other=-1)
    kept = rows_ptr + page_rows(own, rows_stride, place, PAGE, WIDTH) + column
    tl.store(kept, sums, mask=inside & (own >= 0))


@kernel
def state_gate_kernel(
    x_ptr, parts_ptr, part_stride, norm_ptr, out_ptr, eps, N,
    FEATURES: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
    GATED_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """norm(x) silu(z), bfloat16 [N, SIZE], over WIDTH numbers at a time; z: outputs of the product from FIRST on.

    With GATED_FIRST norm(x silu(z)), whose weights are SIZE numbers; else WIDTH.
    """
    rows, unit = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    columns = unit * WIDTH + i
    inside = (rows < N)[:, None] & (i < WIDTH)[None, :]
    at = rows[:, None] * SIZE + columns[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0)
    z = sum_of_parts(parts_ptr, part_stride, rows[:, None] * FEATURES + FIRST + columns[None, :], inside, PARTS)
    gate = z * sigmoid(z)
    if GATED_FIRST:
        x = x * gate
    x = x * rms(tl.sum(x * x, 1), WIDTH, eps)[:, None]
    weights = norm_ptr + (columns if GATED_FIRST else i)
    x = x * tl.load(weights, mask=i < WIDTH, other=0.0)[None, :]
    if not GATED_FIRST:
        x = x * gate
    tl.store(out_ptr + at, narrow(x), mask=inside)


@kernel
def output_gate_kernel(
    x_ptr, parts_ptr, part_stride, N, SIZE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """x times the sigmoid of a product's outputs, in place: bfloat16 [N, SIZE]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (rows < N)[:, None] & (columns < SIZE)
    at = rows[:, None] * SIZE + columns
    gate = sigmoid(sum_of_parts(parts_ptr, part_stride, at, inside, PARTS))
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(x_ptr + at, narrow(x * gate), mask=inside)
