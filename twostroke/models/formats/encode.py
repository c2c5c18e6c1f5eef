"""Encoding of values into stored formats, for weights that are quantized on load."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np

from twostroke.errors import CheckpointError
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.formats.transcode import transcoder
from twostroke.system.limits import count_threads

ENCODING = 2  # to be raised when the same weights are encoded, or brought into ModelConfig's form, with other bits
CHUNK_ELEMENTS = 1 << 18  # encoded at a time: temporaries of a few MB, and few enough calls to share by threads
GROUP = 32
# The largest magnitudes that formats hold: bfloat16's own, and those whose scale and minimum are finite in float16.
MAX_VALUES = {"BF16": 3.3895313892515355e38, "Q8_0": 127 * 65504.0, "Q4_1": 65504.0}

# Candidate codes of the least and the greatest value of a group. The 4-bit codes are 0 to 15; values outside are
# clipped, which allows finer steps. The list was chosen greedily: on normal weights these three leave 81% of the
# squared error of (0, 15) alone; five would leave 80% and ten 78%.
SPANS = ((-0.5, 15.0), (0.0, 15.5), (-0.25, 15.25))


@dataclass(frozen=True)
class Encoder:
    """Encodes tensors as `format`, with `threads` threads; None for one per core that this process may use."""

    format: str
    threads: int | None = None

    def outline(self, tensor: RawTensor) -> RawTensor:
        """The encoded matrix without its values: its bytes are all 0 and take no memory."""
        row_bytes = FORMATS[self.format].row_bytes(tensor.shape[-1])
        data = np.broadcast_to(np.uint8(0), (len(tensor.data), row_bytes))
        return RawTensor(tensor.name, self.format, tensor.shape, data, tensor.source)

    def __call__(self, tensor: RawTensor) -> RawTensor:
        """The same values, rounded. Raises CheckpointError if one is not finite, or too large for the format."""
        source, target = FORMATS[tensor.format], FORMATS[self.format]
        direct = transcoder(tensor.format, self.format)
        encode = None if direct else ENCODERS[self.format]
        blocks = tensor.data.reshape(-1, source.block_bytes)
        data = np.empty((len(tensor.data), target.row_bytes(tensor.shape[-1])), np.uint8)
        encoded = data.reshape(-1, target.block_bytes)

        def convert(start: int) -> None:
            stop = start + CHUNK_ELEMENTS
            part = blocks[start // source.block_size : stop // source.block_size]
            out = encoded[start // target.block_size : stop // target.block_size]
            try:
                if direct:
                    out[:] = direct(part)
                elif encode:
                    encode(_within(source.decode(part).reshape(-1), self.format), out)
            except OverflowError as error:
                raise CheckpointError(f"{tensor.source}: {error}") from None

        starts = range(0, tensor.num_elements, CHUNK_ELEMENTS)
        if len(starts) == 1:  # to start threads takes longer
            convert(0)
        else:
            with ThreadPoolExecutor(count_threads(self.threads)) as pool:
                list(pool.map(convert, starts))
        tensor.release()  # else a mapped file would stay in memory beside the encoded tensor
        return replace(tensor, format=self.format, data=data)


def _within(values: np.ndarray, format: str) -> np.ndarray:
    """The values. Raises OverflowError, which says why, if some are not finite or too large for a format."""
    low, high, most = float(values.min()), float(values.max()), MAX_VALUES[format]
    if not np.isfinite(low) or not np.isfinite(high):  # a NaN makes both NaN
        raise OverflowError("damaged: some values are NaN or infinite")
    if max(-low, high) > most:
        raise OverflowError(f"values up to {max(-low, high):.3g} are too large for {format}: use weights='bf16'")
    return values


def _bf16(values: np.ndarray, out: np.ndarray) -> None:
    """Round to nearest, ties to even: the lower half carries from 0x8001 on, or from 0x8000 if the upper is odd."""
    bits = values.view(np.uint32)
    out[:] = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")[:, None].view(np.uint8)


def _q8_0(values: np.ndarray, out: np.ndarray) -> None:
    x = _columns(values)
    exact = np.maximum(x.max(0), -x.min(0)) / np.float32(127)
    scale = exact.astype("<f2")
    scale.view(np.uint16)[:] += scale.astype(np.float32) < exact  # up: the largest value must fit in 127 steps
    x *= _inverse(scale.astype(np.float32))
    out[:, :2] = scale[:, None].view(np.uint8)
    out[:, 2:] = np.rint(x, out=x).astype(np.int8).view(np.uint8).T


def _q4_1(values: np.ndarray, out: np.ndarray) -> None:
    """The scale and minimum with the least squared error among several candidates.

    Each of `SPANS` gives codes, and the codes a least-squares scale and minimum. The codes are then rounded again with
    the best of these. The result is used if its error is below that of the plain choice, which maps the least value
    to 0 and the greatest to 15.
    """
    x = _columns(values)
    low = x.min(0)
    step = (x.max(0) - low) / np.float32(15)
    unit = x - low
    unit *= _inverse(step)
    scale, minimum = _fit(unit)
    plain = _affine(x, step, low)
    fitted = _affine(x, step * scale, low + step * minimum)
    better = fitted[0] < plain[0]
    scale, minimum, codes = (np.where(better, f, p) for f, p in zip(fitted[1:], plain[1:], strict=True))
    out[:, :2] = scale[:, None].view(np.uint8)
    out[:, 2:4] = minimum[:, None].view(np.uint8)
    out[:, 4:] = (codes[:16] | codes[16:] << 4).T


def _fit(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scale and minimum with the least squared error over `SPANS`, for groups with values from 0 to 15."""
    total, codes = x.sum(0), np.empty_like(x)
    best, scale, minimum = np.full_like(total, np.inf), np.ones_like(total), np.zeros_like(total)
    for first, last in SPANS:
        np.multiply(x, np.float32((last - first) / 15), out=codes)
        codes += np.float32(first)
        _round(codes)
        sum_codes, products = codes.sum(0), _dots(codes, x)
        a = (GROUP * products - sum_codes * total) * _inverse(GROUP * _dots(codes, codes) - sum_codes**2)
        b = (total - a * sum_codes) / GROUP
        error = -a * products - b * total  # without the sum of x * x, which is the same for all spans
        better = error < best
        best, scale, minimum = (np.where(better, n, o) for n, o in ((error, best), (a, scale), (b, minimum)))
    return scale, minimum


def _affine(x: np.ndarray, step: np.ndarray, low: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(squared error, float16 scale and minimum, uint8 codes) of groups encoded with scale `step` and minimum `low`."""
    scale, minimum = step.astype("<f2"), low.astype("<f2")
    d, m = scale.astype(np.float32), minimum.astype(np.float32)
    work = x - m
    work *= _inverse(d)
    codes = _round(work).astype(np.uint8)
    work *= d
    work += m
    work -= x
    return _dots(work, work), scale, minimum, codes


def _columns(values: np.ndarray) -> np.ndarray:
    """A copy of shape (32, n) with a group in each column, so that sums over a group are sums of whole rows.

    Callers work on it in place where possible: touching fresh memory takes longer than the arithmetic.
    """
    return np.ascontiguousarray(values.reshape(-1, GROUP).T)


def _round(x: np.ndarray) -> np.ndarray:
    """Round to the nearest integer from 0 to 15, in place."""
    return np.clip(np.rint(x, out=x), 0, 15, out=x)


def _inverse(x: np.ndarray) -> np.ndarray:
    """1 / x where x > 0, else 0, so that codes are 0 there."""
    return np.divide(1, x, out=np.zeros_like(x), where=x > 0)


def _dots(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The inner products of corresponding groups of a and b, row after row.

    `np.einsum` would multiply and add in one instruction on some processors, and there encode other weights.
    """
    total = a[0] * b[0]
    for row, other in zip(a[1:], b[1:], strict=True):
        total += row * other
    return total


ENCODERS: dict[str, Callable[[np.ndarray, np.ndarray], None]] = {"BF16": _bf16, "Q8_0": _q8_0, "Q4_1": _q4_1}
