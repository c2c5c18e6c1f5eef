"""The choice of a backend."""

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from twostroke.backends.interface import Backend
from twostroke.backends.native import backend as native
from twostroke.backends.native import library
from twostroke.backends.ranks.processes import RANK_TIMEOUT_S, under_torchrun
from twostroke.errors import InvalidRequest
from twostroke.models.config import ModelConfig
from twostroke.models.formats.tensor import RawTensor
from twostroke.models.kv_formats import CODED
from twostroke.system.extras import install_command

log = logging.getLogger(__name__)

NATIVE = ("native", *(f"native-{variant}" for variant in library.VARIANTS))  # the best variant, or a given one
BACKENDS = ("auto", *NATIVE, "triton", "reference")
DTYPES = ("auto", "float32", "bfloat16")
KV_DTYPES = (*DTYPES, *CODED)


def require_device(backend: str, device: str, tp: int = 1) -> None:
    """Raise InvalidRequest for a backend or a device that cannot be used here, whatever the model.

    It is called before a model is fetched, and imports PyTorch only where it is needed.
    """
    device, variant = str(device), backend.partition("-")[2] or None  # also accepts a torch.device
    if backend in NATIVE and (reason := library.unavailable(variant)):
        raise InvalidRequest(f"the {backend} backend cannot run this: {reason}")
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


@dataclass(frozen=True)
class BackendRequest:
    """The model and the machine for which a backend is created: the arguments of `create_backend`."""

    backend: str
    device: str
    dtype: str
    threads: int
    config: ModelConfig
    matrices: Mapping[str, RawTensor]
    page_size: int
    tp: int
    kv_dtype: str

    @property
    def kind(self) -> str:
        """The kind of the device: "cpu", "cuda"."""
        return self.device.partition(":")[0]

    def refusal(self, name: str, reason: str) -> str:
        """Say in one line that a backend cannot be used."""
        if name == "reference":
            return f"the reference {reason}"
        auto = self.backend == "auto"
        return f"the {name if auto else self.backend} backend cannot run this{', since' if auto else ':'} {reason}"


def create_backend(
    backend: str,
    device: str,
    dtype: str,
    threads: int,
    config: ModelConfig,
    matrices: Mapping[str, RawTensor],
    page_size: int,
    tp: int = 1,
    kv_dtype: str = "auto",
) -> Backend:
    """The backend for a device and a model; of `matrices`, the weights, only formats and shapes are read.

    "auto" is the first of `CANDIDATES` that can run the model, with a warning in the log if it is not the first for
    the device. "native" is the variant with the fastest prefill that the processor can run. `tp` is the number of
    ranks, each of which has a GPU of its own on "cuda". `kv_dtype` is how K and V are stored; "auto" is the backend's
    own.

    Raises:
        InvalidRequest: an argument is not one of the choices (the message lists them), or the requested backend or
            device cannot be used (the message says why).
    """
    wanted = BackendRequest(backend, str(device), dtype, threads, config, matrices, page_size, tp, kv_dtype)
    if backend not in BACKENDS:
        raise InvalidRequest(f"backend must be one of {', '.join(BACKENDS)}, not {backend!r}")
    if dtype not in DTYPES:
        raise InvalidRequest(f"dtype must be one of {', '.join(DTYPES)}, not {dtype!r}")
    if kv_dtype not in KV_DTYPES:
        raise InvalidRequest(f"kv_dtype must be one of {', '.join(KV_DTYPES)}, not {kv_dtype!r}")
    if tp > 1:
        if wanted.kind != "cpu":
            _require_gpus(wanted.device, tp)
        follow_torchrun()
    passed_over: list[str] = []
    for candidate in CANDIDATES:
        if candidate.fits(wanted):
            made = candidate.create(wanted)
            if not isinstance(made, str):
                for reason in passed_over:
                    log.warning("PyTorch computes this, slowly: %s", reason)
                return made
            passed_over.append(wanted.refusal(candidate.name, made))
    raise InvalidRequest(", and ".join(passed_over))


def streaming(backend: Backend, config: ModelConfig, name: str) -> native.NativeBackend:
    """The backend, if it can read the layers of the model `name` in every pass. Raises InvalidRequest if not."""
    plain = all(one.source is None and one.latent is None for one in config.attentions)
    if not isinstance(backend, native.NativeBackend) or backend.tp > 1:
        reason = "only the native backend does so, in one process"
    elif not plain or config.state_layers or config.token_inputs or config.takes_hidden:
        reason = "its layers share more than what goes from one to the next"
    else:
        return backend
    raise InvalidRequest(f"stream_weights cannot read the layers of {name} in every pass: {reason}")


def follow_torchrun() -> None:
    """Follow rank 0 and then end (SystemExit), if `torchrun` has started this process as another rank than 0."""
    if under_torchrun() and os.environ["RANK"] != "0":
        from twostroke.backends.ranks.rank_group import ANY_TIME, RankGroup

        group = RankGroup.of_torchrun(RANK_TIMEOUT_S)
        try:
            name, *setup = group.receive(limit=ANY_TIME)
            module = "native.distributed_ranks" if name == "native" else "torch_follower"
            import_module(f"twostroke.backends.{module}").follow(group, name, *setup)
        finally:
            group.close()
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


def _create_native(wanted: BackendRequest) -> Backend | str:
    if wanted.kind != "cpu" or wanted.dtype == "bfloat16":
        asked = f"on {wanted.device}" if wanted.dtype == "auto" else f"in {wanted.dtype} on {wanted.device}"
        return f"it computes in float32 on a CPU, not {asked}"
    kv_dtype = native.KV_DTYPES[0] if wanted.kv_dtype == "auto" else wanted.kv_dtype
    if kv_dtype not in native.KV_DTYPES:
        return f"it stores K and V in {' or '.join(native.KV_DTYPES)}, not in {kv_dtype}"
    variant = wanted.backend.partition("-")[2] or None
    reason = library.unavailable(variant) or native.unsupported(
        wanted.config, wanted.matrices, wanted.page_size, wanted.tp, kv_dtype
    )
    return reason or native.NativeBackend(wanted.threads, variant, wanted.tp, kv_dtype)


def _create_triton(wanted: BackendRequest) -> Backend | str:
    if wanted.dtype == "float32":
        return "it computes in bfloat16"
    try:
        from twostroke.backends.triton import backend as gpu
    except ModuleNotFoundError as error:
        return f"it needs {error.name}: {install_command('gpu')}"
    except (ImportError, OSError) as error:
        return f"Triton or PyTorch cannot be loaded: {str(error).splitlines()[0]}"
    kv_dtype = gpu.KV_DTYPES[0] if wanted.kv_dtype == "auto" else wanted.kv_dtype
    if kv_dtype not in gpu.KV_DTYPES:
        return f"it stores K and V in {' or '.join(gpu.KV_DTYPES)}, not in {kv_dtype}"
    reason = gpu.unavailable(wanted.device, wanted.tp) or gpu.unsupported(wanted.config, wanted.matrices, kv_dtype)
    return reason or gpu.TritonBackend(wanted.device, wanted.tp, kv_dtype)


def _create_reference(wanted: BackendRequest) -> Backend | str:
    try:
        from twostroke.backends.reference.backend import ReferenceBackend, unsupported
    except ModuleNotFoundError as error:
        return f"needs {error.name}: {install_command('torch')}"
    if reason := unsupported(wanted.config, wanted.tp, wanted.kv_dtype):
        return f"cannot run this: {reason}"
    dtype = wanted.dtype
    if dtype == "auto":
        dtype = "float32" if wanted.kind == "cpu" else "bfloat16"
    try:
        kv_dtype = None if wanted.kv_dtype == "auto" else wanted.kv_dtype
        return ReferenceBackend(wanted.device, dtype, wanted.threads, wanted.tp, kv_dtype)
    except (RuntimeError, AssertionError) as error:
        raise InvalidRequest(f"device {wanted.device!r} cannot be used: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class BackendCandidate:
    """A backend that can be chosen."""

    name: str
    kind: str  # the kind of device for which "auto" tries it; "" for any
    dtypes: tuple[str, ...]  # values of `dtype` with which "auto" tries it
    create: Callable[[BackendRequest], Backend | str]  # makes the backend, or says why it cannot be used

    def fits(self, wanted: BackendRequest) -> bool:
        """Whether it was asked for by name, or "auto" tries it."""
        if wanted.backend != "auto":
            return wanted.backend.partition("-")[0] == self.name
        return self.kind in ("", wanted.kind) and wanted.dtype in self.dtypes


# In the order in which "auto" tries them.
CANDIDATES = (
    BackendCandidate("native", "cpu", ("auto",), _create_native),
    BackendCandidate("triton", "cuda", ("auto", "bfloat16"), _create_triton),
    BackendCandidate("reference", "", DTYPES, _create_reference),
)
