"""Gated DeltaNet and Mamba-2 (`models.recurrent`) by chunks: a state between chunks, rows within one.

**The order of sums.** A chunk is a tile of CHUNK rows from the snapshot on, whatever part of it comes in a pass. It is
computed in blocks of BLOCK rows, each at its own place in the tile, and what lies behind a row counts 0. So a number
of a row is made of the same products in the same order, along chains that the shapes of tiles alone fix: first what
the state says, then the rows of the blocks before, then those of its own block, one after another. What a row writes
is rounded to bfloat16 before any row reads it, as it lies in pages. The state moves on at the chunk's end alone.
"""

import triton
import triton.language as tl

from twostroke.backends.triton.kernels.launch import kernel
from twostroke.backends.triton.kernels.numbers import dot, narrow
from twostroke.backends.triton.kernels.recurrent import page_rows, snapshot_places


@triton.jit
def _of_both(old_ptr, old_rows, is_old, new_ptr, new_rows, is_new, columns, wide):
    """Rows of which some lie in pages and others in this pass, [rows, columns]; 0 where neither is."""
    old = tl.load(old_ptr + old_rows[:, None] + columns[None, :], mask=is_old[:, None] & wide[None, :], other=0.0)
    new = tl.load(new_ptr + new_rows[:, None] + columns[None, :], mask=is_new[:, None] & wide[None, :], other=0.0)
    return tl.where(is_old[:, None], old, new)


@triton.jit
def _sums(old_ptr, old_rows, is_old, new_ptr, new_rows, is_new):
    """The sums of log decays of rows, [rows]."""
    old = tl.load(old_ptr + old_rows, mask=is_old, other=0.0)
    return tl.where(is_old, old, tl.load(new_ptr + new_rows, mask=is_new, other=0.0))


@triton.jit
def _decays(later, sums_later, earlier, sums_earlier):
    """The decay of what earlier rows have written until later ones, [later, earlier]; 0 where they are not earlier."""
    left = tl.exp(tl.minimum(sums_later[:, None] - sums_earlier[None, :], 0.0))
    return tl.where(earlier[None, :] <= later[:, None], left, 0.0)


@kernel
def linear_attention_kernel(
    sequences_ptr, items_ptr, made_ptr, sums_ptr, write_ptr, skip_ptr, cells_ptr, row_cells_ptr, rows_ptr,
    row_sums_ptr, rows_stride, place, frames_ptr, start, states_ptr, words, out_ptr,
    HK: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, TILED: tl.constexpr, DELTA: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr, FIELDS: tl.constexpr,
):  # fmt: skip
    """A sequence's rows in one head of v, for BLOCK_V of its columns, float32 [N, HV * V]; u and snapshots to pages.

    Args:
        sequences_ptr: [S, 3] first item, items, frames of the snapshot that is known (below 0: zeros).
        items_ptr: [items, FIELDS] first row, rows, known rows of the chunk, the entry of its first, whether the chunk
            ends, the frames of the snapshot behind it (below 0: none).
        made_ptr: q, k and v, bfloat16 [N, 2 HK K + HV V].
        sums_ptr, write_ptr: of `decays_kernel`.
        rows_ptr, row_sums_ptr: the pages of rows as bfloat16 and as float32; `rows_stride` as of the first.
    """
    sequence, head = tl.program_id(0), tl.program_id(1)
    shared: tl.constexpr = HV // HK
    kh = head % HK if TILED else head // shared
    nth = head // HK if TILED else head % shared
    conv: tl.constexpr = 2 * HK * K + HV * V
    width: tl.constexpr = HK * K + HV * V + 2 * HV
    at_k = kh * (K + shared * V)  # k in an entry
    at_u = at_k + K + nth * V
    at_sum = (HK * K + HV * V) // 2 + head
    kk = tl.arange(0, BLOCK_K)
    k_wide = kk < K
    vv = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    v_wide = vv < V
    r = tl.arange(0, CHUNK)
    b = tl.arange(0, BLOCK)
    first_item = tl.load(sequences_ptr + 3 * sequence)
    items = tl.load(sequences_ptr + 3 * sequence + 1)
    source = tl.load(sequences_ptr + 3 * sequence + 2)
    own = k_wide[:, None] & v_wide[None, :]
    numbers = tl.where(own, (head * K + kk)[:, None] * V + vv[None, :], 0)
    there = own & (source >= 0)
    begin = tl.where(source >= 0, source + start, 0)
    kept = snapshot_places(frames_ptr, begin, tl.where(there, numbers, 0), words, SIZE)
    state = tl.load(states_ptr + kept, mask=there, other=0.0)
    for n in range(items):
        item = items_ptr + FIELDS * (first_item + n)
        first, count, known = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        entry, ends, target = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
        total = known + count
        is_old, is_new = r < known, (r >= known) & (r < total)
        cells = tl.load(cells_ptr + entry + r, mask=is_old, other=0)
        old = page_rows(cells, rows_stride, place, PAGE, width)
        new = (first + r - known).to(tl.int64)
        keys = _of_both(
            rows_ptr + at_k, old, is_old, made_ptr + (HK + kh) * K, new * conv, is_new, kk, k_wide
        )  # fmt: skip
        sums = _sums(row_sums_ptr + at_sum, old // 2, is_old, sums_ptr + head, new * HV, is_new)
        # What the rows of earlier blocks have written; those of this pass are added block by block.
        blocks = known // BLOCK
        earlier = (r < blocks * BLOCK)[:, None] & v_wide[None, :]
        written = tl.load(rows_ptr + at_u + old[:, None] + vv[None, :], mask=earlier, other=0.0).to(tl.float32)
        for block in range(blocks, (total + BLOCK - 1) // BLOCK):
            at = block * BLOCK + b
            at_page, is_own = at < known, (at >= known) & (at < total)
            block_cells = tl.load(cells_ptr + entry + at, mask=at_page, other=0)
            old_at = page_rows(block_cells, rows_stride, place, PAGE, width)
            row = (first + at - known).to(tl.int64)
            q_at = row[:, None] * conv + (kh * K + kk)[None, :]
            q = tl.load(made_ptr + q_at, mask=is_own[:, None] & k_wide[None, :], other=0.0)
            k = _of_both(
                rows_ptr + at_k, old_at, at_page, made_ptr + (HK + kh) * K, row * conv, is_own, kk, k_wide
            )  # fmt: skip
            wide = is_own[:, None] & v_wide[None, :]
            v_at = row[:, None] * conv + (2 * HK * K + head * V) + vv[None, :]
            v = tl.load(made_ptr + v_at, mask=wide, other=0.0).to(tl.float32)
            at_old = rows_ptr + at_u + old_at[:, None] + vv[None, :]
            before = tl.load(at_old, mask=at_page[:, None] & v_wide[None, :], other=0.0).to(tl.float32)
            own_sums = _sums(row_sums_ptr + at_sum, old_at // 2, at_page, sums_ptr + head, row * HV, is_own)
            write = tl.load(write_ptr + row * HV + head, mask=is_own, other=0.0)
            whole = tl.exp(own_sums)[:, None]
            decays = _decays(at, own_sums, r, sums)
            if DELTA:
                zeros = tl.zeros([BLOCK, CHUNK], tl.float32)
                among = write[:, None] * decays * dot(k, tl.trans(keys), zeros)
                found = tl.dot(k.to(tl.float32), state, input_precision="ieee")
                taken = tl.dot(tl.where(r[None, :] < block * BLOCK, among, 0.0), written, input_precision="ieee")
                wanted = write[:, None] * (v - whole * found) - taken
                near = write[:, None] * _decays(at, own_sums, at, own_sums)
                near = near * dot(k, tl.trans(k), tl.zeros([BLOCK, BLOCK], tl.float32))
                for i in range(BLOCK):
                    u = tl.where(at_page[:, None], before, narrow(wanted).to(tl.float32))
                    u = tl.sum(tl.where((b == i)[:, None], u, 0.0), 0)
                    share = tl.sum(tl.where((b == i)[None, :], near, 0.0), 1)
                    wanted = tl.where((b > i)[:, None], wanted - share[:, None] * u[None, :], wanted)
            else:
                wanted = write[:, None] * v
            rounded = narrow(wanted)
            u = tl.where(at_page[:, None], before, rounded.to(tl.float32))
            u = tl.where((at < total)[:, None], u, 0.0)
            place_of = tl.where(r[:, None] == at[None, :], 1.0, 0.0)
            written += tl.dot(place_of, u, input_precision="ieee")  # exact: one product of each sum is not 0
            seen = decays * dot(q, tl.trans(keys), tl.zeros([BLOCK, CHUNK], tl.float32))
            out = whole * tl.dot(q.to(tl.float32), state, input_precision="ieee")
            out = out + tl.dot(seen, written, input_precision="ieee")
            if not DELTA:
                out = out + tl.load(skip_ptr + head) * v
            tl.store(out_ptr + row[:, None] * (HV * V) + (head * V + vv)[None, :], out, mask=wide)
            own_cells = tl.load(row_cells_ptr + row, mask=is_own, other=-1)
            kept_at = page_rows(own_cells, rows_stride, place, PAGE, width)[:, None] + at_u + vv[None, :]
            tl.store(rows_ptr + kept_at, rounded, mask=wide & (own_cells >= 0)[:, None])
        if ends > 0:
            last = tl.sum(tl.where(r == total - 1, sums, 0.0), 0)
            left = tl.where(r < total, tl.exp(tl.minimum(last - sums, 0.0)), 0.0)
            moved = tl.dot(tl.trans(keys.to(tl.float32) * left[:, None]), written, input_precision="ieee")
            state = tl.exp(last) * state + moved
            there = own & (target >= 0)
            places = tl.where(target >= 0, target + start, 0)
            kept = snapshot_places(frames_ptr, places, tl.where(there, numbers, 0), words, SIZE)
            tl.store(states_ptr + kept, state, mask=there)
