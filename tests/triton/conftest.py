"""Kernels run in Triton's interpreter where there is no GPU (`tests/conftest.py` chooses it)."""

import pytest
import torch

from tests.triton import interpreter

__all__ = ["interpreter"]


@pytest.fixture
def device() -> torch.device:
    """A GPU, or the CPU for the interpreter."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
