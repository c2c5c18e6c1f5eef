"""Backends, and the choice between them."""

import logging
from collections.abc import Mapping

from twostroke.backends.interface import Backend
from twostroke.backends.native import backend as native
from twostroke.backends.native import library
from twostroke.errors import InvalidRequest
from twostroke.formats.tensor import RawTensor
from twostroke.models.config import ModelConfig

log = logging.getLogger(__name__)

NATIVE = ("native", *(f"native-{variant}" for variant in library.VARIANTS))  # the quickest here, or the one named
BACKENDS = ("auto", *NATIVE, "reference")
DTYPES = ("auto", "float32", "bfloat16")


def create_backend(
    backend: str,
    device: str,
    dtype: str,
    threads: int,
    config: ModelConfig,
    matrices: Mapping[str, RawTensor],
    page_size: int,
) -> Backend:
    """The backend for a device and a model, of which `matrices` are outlines of the weights.

    "auto" is the native backend where it can run this, and else the reference, which says so in the log. "native" is
    the quickest of its variants at prefill that the processor can run. Raises InvalidRequest, naming what there is to
    choose from, or why the backend asked for cannot run.
    """
    device = str(device)  # a torch.device will do
    if backend not in BACKENDS:
        raise InvalidRequest(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    reason, on_cpu = None, device.partition(":")[0] == "cpu"
    if backend != "reference":
        variant = backend.partition("-")[2] or None
        reason = library.unavailable(variant) or native.unsupported(config, matrices, page_size)
        if not on_cpu or dtype == "bfloat16":
            asked = f"on {device}" if dtype == "auto" else f"in {dtype} on {device}"
            reason = f"it computes in float32 on a CPU, not {asked}"
        if reason is None and (backend in NATIVE or dtype == "auto"):
            return native.NativeBackend(threads, variant)
        if backend in NATIVE:
            raise InvalidRequest(f"the {backend} backend cannot run this: {reason}")
    try:
        from twostroke.backends.reference.backend import ReferenceBackend
    except ModuleNotFoundError as error:
        why = f"the native backend cannot run this, since {reason}, and " if reason else ""
        raise InvalidRequest(f"{why}the reference needs {error.name}: pip install 'twostroke[torch]'") from None
    if reason and on_cpu and dtype == "auto":
        log.warning("PyTorch computes this, slowly: the native backend cannot run it, since %s", reason)
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    try:
        return ReferenceBackend(device, dtype, threads)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequest(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
