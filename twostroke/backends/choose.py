"""The choice of a backend."""

import logging
import os
from collections.abc import Mapping
from importlib.util import find_spec

from twostroke.backends.interface import Backend
from twostroke.backends.native import backend as native
from twostroke.backends.native import library
from twostroke.backends.ranks.processes import RANK_TIMEOUT_S, under_torchrun
from twostroke.errors import InvalidRequest
from twostroke.models.config import ModelConfig
from twostroke.models.formats.tensor import RawTensor
from twostroke.system.extras import install_command

log = logging.getLogger(__name__)

NATIVE = ("native", *(f"native-{variant}" for variant in library.VARIANTS))  # the best variant, or a given one
BACKENDS = ("auto", *NATIVE, "triton", "reference")
DTYPES = ("auto", "float32", "bfloat16")


def require_device(backend: str, device: str, tp: int = 1) -> None:
    """Raise InvalidRequest for a backend or a device that cannot be used here, whatever the model.

    It is called before a model is fetched, and imports PyTorch only where it is needed.
    """
    device, variant = str(device), backend.partition("-")[2] or None  # also accepts a torch.device
    if backend in NATIVE and (reason := library.unavailable(variant)):
        raise InvalidRequest(f"the {backend} backend cannot be used: {reason}")
    kind = device.partition(":")[0]
    if kind == "cpu" and backend not in ("triton", "reference"):
        return
    what, needed = (
        ("the reference", "torch") if kind == "cpu" and backend == "reference" else (f"device {device!r}", "gpu")
    )
    if find_spec("torch") is None:
        raise InvalidRequest(f"{what} needs torch: {install_command(needed)}")
    if kind == "cpu":
        return
    import torch

    if tp > 1:
        _require_gpus(device, tp)
    try:
        torch.device(device)
    except RuntimeError as error:
        raise InvalidRequest(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidRequest(f"device {device!r} cannot be used: PyTorch finds no CUDA device")


def create_backend(
    backend: str,
    device: str,
    dtype: str,
    threads: int,
    config: ModelConfig,
    matrices: Mapping[str, RawTensor],
    page_size: int,
    tp: int = 1,
) -> Backend:
    """The backend for a device and a model; of `matrices`, the weights, only formats and shapes are read.

    "auto" is the native backend if it can run the model, and otherwise the reference, with a warning in the log. On
    "cuda" it is the Triton backend, and the reference where that cannot run the model.
    "native" is the variant with the fastest prefill that the processor can run. `tp` is the number of ranks, each of
    which has a GPU of its own on "cuda".

    Raises:
        InvalidRequest: an argument is not one of the choices (the message lists them), or the requested backend or
            device cannot be used (the message says why).
    """
    device = str(device)  # also accepts a torch.device
    if backend not in BACKENDS:
        raise InvalidRequest(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    reason, on_cpu = None, device.partition(":")[0] == "cpu"
    if tp > 1:
        if not on_cpu:
            _require_gpus(device, tp)
        follow_torchrun()
    if backend == "triton" or (backend == "auto" and device.partition(":")[0] == "cuda" and dtype != "float32"):
        made = _triton(device, dtype, config, matrices, tp)
        if not isinstance(made, str):
            return made
        if backend == "triton":
            raise InvalidRequest(f"the triton backend cannot run this: {made}")
        log.warning("PyTorch computes this, slowly: the triton backend cannot run it, since %s", made)
    if backend != "reference":
        variant = backend.partition("-")[2] or None
        reason = library.unavailable(variant) or native.unsupported(config, matrices, page_size)
        if not on_cpu or dtype == "bfloat16":
            asked = f"on {device}" if dtype == "auto" else f"in {dtype} on {device}"
            reason = f"it computes in float32 on a CPU, not {asked}"
        if reason is None and (backend in NATIVE or dtype == "auto"):
            return native.NativeBackend(threads, variant, tp)
        if backend in NATIVE:
            raise InvalidRequest(f"the {backend} backend cannot run this: {reason}")
    try:
        from twostroke.backends.reference.backend import ReferenceBackend
    except ModuleNotFoundError as error:
        why = f"the native backend cannot run this, since {reason}, and " if reason else ""
        raise InvalidRequest(f"{why}the reference needs {error.name}: {install_command('torch')}") from None
    if reason and on_cpu and dtype == "auto":
        log.warning("PyTorch computes this, slowly: the native backend cannot run it, since %s", reason)
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    try:
        return ReferenceBackend(device, dtype, threads, tp)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequest(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from None


def follow_torchrun() -> None:
    """Follow rank 0 and then end (SystemExit), if `torchrun` has started this process as another rank than 0."""
    if under_torchrun() and os.environ["RANK"] != "0":
        from twostroke.backends.ranks.rank_group import ANY_TIME, RankGroup

        group = RankGroup.of_torchrun(RANK_TIMEOUT_S)
        kind, *facts = group.receive(limit=ANY_TIME)
        if kind == "native":
            from twostroke.backends.native.distributed_ranks import follow
        elif kind == "triton":
            from twostroke.backends.triton.follower import follow
        else:
            from twostroke.backends.reference.follower import follow
        follow(group, *facts)
        raise SystemExit(0)


def _require_gpus(device: str, tp: int) -> None:
    """Raise InvalidRequest unless each rank of this host can have a GPU."""
    if device != "cuda":
        raise InvalidRequest(f"tp={tp} computes on CPUs, or with device cuda on a GPU for each rank, not on {device}")
    try:
        import torch

        from twostroke.backends.ranks import collectives
    except ModuleNotFoundError as error:
        raise InvalidRequest(f"device {device!r} needs {error.name}: {install_command('gpu')}") from None
    needed, found = int(os.environ["LOCAL_WORLD_SIZE"]) if under_torchrun() else tp, torch.cuda.device_count()
    if found < (1 if collectives.ONE_GPU else needed):
        raise InvalidRequest(f"tp={tp} needs {needed} GPUs, and this machine has {found}")
    if not torch.distributed.is_nccl_available():
        raise InvalidRequest(f"tp={tp} on GPUs needs NCCL, which this build of PyTorch does not have")


def _triton(device: str, dtype: str, config: ModelConfig, matrices: Mapping[str, RawTensor], tp: int) -> Backend | str:
    """The Triton backend, or why it cannot be used."""
    if dtype == "float32":
        return "it computes in bfloat16"
    try:
        from twostroke.backends.triton import backend as gpu
    except ModuleNotFoundError as error:
        return f"it needs {error.name}: {install_command('gpu')}"
    except (ImportError, OSError) as error:
        return f"Triton or PyTorch cannot be loaded: {str(error).splitlines()[0]}"
    if reason := gpu.unavailable(device, tp) or gpu.unsupported(config, matrices):
        return reason
    return gpu.TritonBackend(device, tp)
