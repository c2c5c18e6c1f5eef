"""Backends, and the choice between them."""

import logging
import os
from collections.abc import Mapping

import torch

from twostroke.errors import InvalidRequest
from twostroke.kernels import native
from twostroke.kernels.formats import RawTensor
from twostroke.kernels.interface import Kernels
from twostroke.kernels.reference import ReferenceKernels

log = logging.getLogger(__name__)

BACKENDS = ("auto", "native", "reference")
DTYPES = ("auto", "float32", "bfloat16")


def create_kernels(
    backend: str,
    device: str,
    dtype: str,
    threads: int | None,
    tensors: Mapping[str, RawTensor],
    head_dim: int,
    page_size: int,
) -> Kernels:
    """The backend for a device and a model's tensors.

    "auto" is the native backend where it can run this, and else the reference, which says so in the log. Raises
    InvalidRequest, naming what there is to choose from, or why the backend asked for cannot run.
    """
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
    threads = threads or len(os.sched_getaffinity(0))
    if place.type == "cpu":
        torch.set_num_threads(threads)
    if backend != "reference":
        reason = native.unavailable() or native.unsupported(tensors, head_dim, page_size)
        if place.type != "cpu" or dtype == "bfloat16":
            reason = f"it computes in float32 on a CPU, not in {dtype} on {place}"
        if reason is None and (backend == "native" or dtype == "auto"):
            # PyTorch's own threads would spin on the cores that the kernels compute on.
            torch.set_num_threads(1)
            return native.NativeKernels(threads)
        if backend == "native":
            raise InvalidRequest(f"the native backend cannot run this: {reason}")
        if place.type == "cpu" and dtype == "auto":
            log.warning("PyTorch computes this, slowly: the native backend cannot run it, since %s", reason)
    if dtype == "auto":
        dtype = "float32" if place.type == "cpu" else "bfloat16"
    return ReferenceKernels(place, getattr(torch, dtype))
