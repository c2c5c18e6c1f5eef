"""Simulated weights of 2 and 3 bits: groups of 32 that use the first 4 or 8 of the 16 codes of Q4_1.

They have the quality of 2 and 3 bits, and the memory and time of 4 bits.
"""

from dataclasses import dataclass, replace

import numpy as np

from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.encode import GROUP, Encoder
from twostroke.models.formats.tensor import RawTensor

CHUNK_GROUPS = 1 << 15  # groups encoded at a time: temporaries of a few MB
REFITS = 4  # iterations of codes, then scale and minimum; more change almost nothing


@dataclass(frozen=True)
class SimulatedBitsEncoder(Encoder):
    """Turns matrices into Q4_1 with 2**bits codes; `format` is a name for identities. See `simulated_bits_encoder`."""

    bits: int = 3

    def outline(self, tensor: RawTensor) -> RawTensor:
        return Encoder("Q4_1").outline(tensor)

    def __call__(self, tensor: RawTensor) -> RawTensor:
        whole = self.outline(tensor)
        blocks = np.empty((tensor.num_elements // GROUP, FORMATS["Q4_1"].block_bytes), np.uint8)
        step = max(1, CHUNK_GROUPS * GROUP // tensor.shape[-1])
        done = 0
        for start in range(0, tensor.shape[0], step):
            rows = tensor.rows(start, min(start + step, tensor.shape[0]))
            part = _encode(rows.dequantize().reshape(-1, GROUP), self.bits)
            blocks[done : done + len(part)] = part
            done += len(part)
        tensor.release()
        return replace(whole, data=blocks.reshape(whole.data.shape))


def simulated_bits_encoder(bits: int) -> SimulatedBitsEncoder:
    return SimulatedBitsEncoder(f"Q4_1 of {bits} bits", bits=bits)


def _encode(x: np.ndarray, bits: int) -> np.ndarray:
    """[n, 32] float32 to Q4_1 blocks, by alternating nearest codes with a least-squares scale and minimum."""
    top = (1 << bits) - 1
    low = x.min(1, keepdims=True)
    scale = (x.max(1, keepdims=True) - low) / np.float32(top)
    for _ in range(REFITS):
        codes = _codes(x, scale, low, top)
        centred = codes - codes.mean(1, keepdims=True)
        spread = (centred**2).sum(1, keepdims=True)
        fitted = np.divide((centred * x).sum(1, keepdims=True), spread, out=scale.copy(), where=spread > 0)
        scale, low = fitted, x.mean(1, keepdims=True) - fitted * codes.mean(1, keepdims=True)
    halves = scale.astype("<f2"), low.astype("<f2")
    codes = _codes(x, halves[0].astype(np.float32), halves[1].astype(np.float32), top).astype(np.uint8)
    packed = codes[:, : GROUP // 2] | codes[:, GROUP // 2 :] << 4
    return np.concatenate([*(half.view(np.uint8) for half in halves), packed], axis=1)


def _codes(x: np.ndarray, scale: np.ndarray, low: np.ndarray, top: int) -> np.ndarray:
    steps = np.divide(x - low, scale, out=np.zeros_like(x), where=scale > 0)
    return np.clip(np.rint(steps), 0, top)
