"""Kernels run in Triton's interpreter where there is no GPU (`tests/conftest.py` chooses it)."""

from typing import Any

import pytest
import torch
import triton.runtime.interpreter as interpreter

_patch_tensor = interpreter._patch_lang_tensor


def _patch_tensor_for_numpy(tensor: Any, scope: Any) -> None:
    """Triton 3.6 keeps scalars as arrays of one element, which NumPy from 2.4 on does not convert to int."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_tensor_for_numpy


@pytest.fixture
def device() -> torch.device:
    """A GPU, or the CPU for the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
