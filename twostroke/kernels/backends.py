"""Backends, and the choice between them."""

import os

import torch

from twostroke.errors import InvalidRequest
from twostroke.kernels.interface import Kernels
from twostroke.kernels.reference import ReferenceKernels

BACKENDS = ("auto", "reference")
DTYPES = ("auto", "float32", "bfloat16")


def create_kernels(backend: str, device: str, dtype: str, threads: int | None) -> Kernels:
    """The backend for a device. Raises InvalidRequest, naming what there is to choose from."""
    if backend not in BACKENDS:
        raise InvalidRequest(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if threads is not None and threads < 1:
        raise InvalidRequest(f"threads must be at least 1, not {threads}")
    try:
        place = torch.device(device)
        torch.empty(1, device=place)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequest(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    if place.type == "cpu":
        torch.set_num_threads(threads or len(os.sched_getaffinity(0)))
    if dtype == "auto":
        dtype = "float32" if place.type == "cpu" else "bfloat16"
    return ReferenceKernels(place, getattr(torch, dtype))
