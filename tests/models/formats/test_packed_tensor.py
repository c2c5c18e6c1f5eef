"""Rows of a matrix that is held in several tensors: Phi-3's fused matrices, quantized."""

import numpy as np
import pytest

from twostroke.errors import CheckpointError
from twostroke.models.families.tensor_names import FusedRows
from twostroke.models.formats.packed_tensor import PackedTensor
from twostroke.models.formats.tensor import RawTensor


def test_rows_are_made_when_they_are_read() -> None:
    values, made = np.arange(24, dtype=np.float32).reshape(6, 4), list[int]()

    def make() -> np.ndarray:
        made.append(1)
        return values.view(np.uint8)

    codes = RawTensor("codes", "F32", (6, 4), values.view(np.uint8), "file: codes")
    whole = PackedTensor.of((6, 4), "F32", "file: qkv", "GPTQ 4-bit", (codes,), make)
    part = FusedRows(2, 5, 6).of(whole)
    assert (part.shape, part.outline().shape, part.stored(), made) == ((3, 4), (3, 4), (codes,), [])
    assert np.array_equal(part.unpack().dequantize(), values[2:5])
    assert np.array_equal(part.rows(1, 3).unpack().dequantize(), values[3:5])
    with pytest.raises(CheckpointError, match=r"file: qkv: shape \(6, 4\) where there are 8 rows"):
        FusedRows(2, 5, 8).of(whole)
