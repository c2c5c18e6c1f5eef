"""Changes Triton's interpreter for tests. Importing it is enough.

It works with NumPy from 2.4 on. And its products do not depend on where a row lies in a tile, as those of a GPU do not:
BLAS in float32 adds in an order that depends on it. In float64 sums of products of bfloat16 are exact, but for terms
2**30 times smaller than the largest.
"""

# pyright: reportPrivateUsage=false

from typing import Any

import numpy as np
import triton.runtime.interpreter as interpreter

_patch_tensor, _dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 keeps scalars as arrays of one element, which NumPy from 2.4 on does not convert to int."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def _exact_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    if d.data.dtype != np.float32:
        return _dot(self, a, b, d, input_precision, max_num_imprecise_acc)
    sums = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
    return interpreter.TensorHandle(sums + d.data, d.dtype.scalar)


interpreter._patch_lang_tensor = _patch_tensor_for_numpy
interpreter.InterpreterBuilder.create_dot = _exact_dot
