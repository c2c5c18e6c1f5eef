"""Makes Triton's interpreter work with NumPy from 2.4 on. Importing it is enough."""

from typing import Any

import triton.runtime.interpreter as interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 keeps scalars as arrays of one element, which NumPy from 2.4 on does not convert to int."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy
