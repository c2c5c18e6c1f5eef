"""The compiled libraries of the native backend: their variants, which of them can run here, and their signatures."""

import ctypes
import hashlib
import logging
import platform
import re
import sys
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from twostroke.backends.native import sources
from twostroke.errors import InvalidRequest
from twostroke.system.process_exit import call_at_exit, free_with

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parents[3] / "native"  # in a checkout

# Processor features that each compiled variant needs, fastest prefill first (on AMD processors). Results differ in
# bits where a variant multiplies bfloat16: in attention, with bfloat16 weights, and with AMX everywhere. Those on ARM
# differ only in instructions for sums of integers, so all have the bits of `neon`.
_AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
VARIANTS: dict[str, tuple[str, ...]] = {
    "i8mm": ("asimd", "asimddp", "i8mm"),
    "neon": ("asimd", "asimddp"),
    "amx": ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512vbmi", "avx512_vbmi2", *_AVX512),
    "avx512bf16": ("avx512_bf16", *_AVX512),
    "avx512": _AVX512,
    "avx2": ("avx2", "fma", "f16c"),
}

ON_ARM = ("i8mm", "neon")
# Where Linux tells of a feature: AT_HWCAP or AT_HWCAP2, and the bit (arch/arm64/include/uapi/asm/hwcap.h).
_HWCAPS = {"asimd": (16, 1), "asimddp": (16, 20), "i8mm": (26, 13)}
_ARM = ("aarch64", "arm64")  # as Linux and as macOS calls it

NAMES = {
    "i8mm": "NEON with products of int8 matrices",
    "neon": "NEON with dot products",
    "amx": "AMX",
    "avx512bf16": "AVX-512 with bfloat16",
    "avx512": "AVX-512 with VNNI",
    "avx2": "AVX2 with FMA",
}

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
EXCHANGE = ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_int64)  # native/ranks.h
TELL = ctypes.CFUNCTYPE(_INT, _POINTER, ctypes.c_int64, _POINTER, ctypes.c_int64)
SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sources": (ctypes.c_int64, ()),
    "usable": (_INT, ()),
    "team": (_POINTER, (_INT,)),
    "team_free": (None, (_POINTER,)),
    "settle": (None, (_POINTER,)),
    "matrix": (_POINTER, (_INT, _INT, _INT, _INT, _INT)),
    "pack": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER, ctypes.c_int64)),
    "matrix_free": (None, (_POINTER,)),
    "matrix_bytes": (ctypes.c_int64, (_POINTER,)),
    "matrix_bound": (ctypes.c_float, (_POINTER, ctypes.c_float)),
    "unpack": (None, (_POINTER, _INT, _POINTER)),
    "read_row": (None, (_INT, _POINTER, _INT, _POINTER)),
    "model": (_POINTER, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "token_inputs": (None, (_POINTER, _POINTER, _POINTER, _INT, _INT)),
    "model_free": (None, (_POINTER,)),
    "add_block": (None, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "add_experts_block": (None, (*(_POINTER,) * 6, *(_INT,) * 6, ctypes.c_float, _POINTER, _INT, _POINTER)),
    "add_expert_norms": (None, (_POINTER, _POINTER, _POINTER)),
    "add_state": (None, (_POINTER, _POINTER, _POINTER)),
    "add_latent": (None, (_POINTER, _POINTER, _POINTER)),
    "add_beside": (None, (_POINTER,)),
    "add_gate": (None, (_POINTER, _POINTER)),
    "forward": (_INT, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER)),
    "logits": (_INT, (_POINTER, _POINTER, _INT, _POINTER, _POINTER)),
    "sketch": (ctypes.c_int64, (_POINTER,)),
    "drop_sketch": (None, (_POINTER,)),
    "search": (_INT, (_POINTER, _POINTER, _INT, _POINTER, _POINTER, _POINTER)),
    "ranks": (_POINTER, (_POINTER, ctypes.c_int64, _INT, _INT, ctypes.c_double, _POINTER, _INT)),
    "ranks_free": (None, (_POINTER,)),
    "join": (None, (_POINTER, _POINTER)),
    "pool": (None, (_POINTER, _INT, _POINTER, ctypes.c_int64, _POINTER, _INT)),
    "part": (None, (_POINTER, _POINTER, EXCHANGE, TELL)),
    "apply": (None, (_POINTER, _POINTER, ctypes.c_int64)),
    "obey": (_INT, (_POINTER, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int64)),
    "listen": (None, (_POINTER,)),
    "follow": (_INT, (_POINTER,)),
    "lose": (None, (_POINTER, _INT)),
    "lost": (_INT, (_POINTER,)),
    "multiply": (None, (_POINTER, _POINTER, _POINTER, _INT, _POINTER)),
    "weigh": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER)),
    "likeliest": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER, _POINTER, _POINTER)),
    "draw": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER, _POINTER)),
    "summarize": (None, (_POINTER, _POINTER, _INT, _INT, _POINTER)),
}


class NativeConfig(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden", "intermediate", "activation", "num_ropes", "kv_format")),
        *((name, ctypes.c_int32) for name in ("q_width", "kv_width", "half_dim", "vocab", "embedding_format")),
        *((name, ctypes.c_float) for name in ("eps", "embedding_scale", "residual_scale")),
        *((name, ctypes.c_float) for name in ("score_cap", "logit_cap")),
    ]


class NativeAttention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("heads", "kv_heads", "dim", "first_kv_head", "last_kv_head", "any_head")),
        *((name, ctypes.c_int32) for name in ("rope", "query_rope", "window", "group", "place")),
        *((name, ctypes.c_int32) for name in ("own_entries", "whole_norm", "both_ways")),
        ("scale", ctypes.c_float),
        ("sink_logits", _POINTER),
    ]


class NativeState(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("kind", "k_heads", "v_heads", "k_dim", "v_dim", "conv_width", "tiled")),
        *((name, ctypes.c_int32) for name in ("rows_group", "rows_place", "inputs_group", "inputs_place")),
        *((name, ctypes.c_int32) for name in ("first_page", "snapshot_row", "rows_in_page")),
        *((name, _POINTER) for name in ("conv", "decay", "dt_bias", "norm", "conv_bias", "skip")),
    ]


class NativeLatent(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("rank", "rotated", "plain", "value")),
        *((name, _POINTER) for name in ("q_norm", "kv_norm")),
    ]


class NativeBatch(ctypes.Structure):
    _fields_ = [
        ("num_rows", ctypes.c_int32),
        ("num_sequences", ctypes.c_int32),
        *((name, _POINTER) for name in ("tokens", "pages", "slots", "positions")),
        *((name, _POINTER) for name in ("row_starts", "span_starts", "spans", "cos", "sin")),
        ("turns", ctypes.c_int64),
        ("num_queries", ctypes.c_int64),
        *((name, _POINTER) for name in ("query_rows", "queries", "dropout", "embeddings", "token_inputs")),
        ("num_wanted", ctypes.c_int64),
        ("wanted", _POINTER),
        ("num_states", ctypes.c_int64),
        *((name, _POINTER) for name in ("state_rows", "states")),
        ("state_pages", ctypes.c_int64),
        *((name, _POINTER) for name in ("state_counts", "state_sources", "target_starts", "target_sequences")),
        *(
            (name, _POINTER)
            for name in ("target_rows", "target_pages", "biases", "bias_lengths", "bias_base", "hidden")
        ),
    ]


def array_strides(storages: Sequence[Any]) -> ctypes.Array[ctypes.c_int64]:
    """The strides of the first three dimensions of each group's pages, which are numpy arrays, in bytes."""
    strides = [stride for one in storages for stride in one.strides[:3]]
    return (ctypes.c_int64 * len(strides))(*strides)


def features(processor: str) -> set[str]:
    """The processor's features: on ARM what the system tells the process, else by the text of /proc/cpuinfo."""
    if platform.machine() == "arm64":
        found, size = _INT(), ctypes.c_size_t(ctypes.sizeof(_INT))
        tell = ctypes.CDLL(None).sysctlbyname
        tell.argtypes = (ctypes.c_char_p, _POINTER, _POINTER, _POINTER, ctypes.c_size_t)
        tell(b"hw.optional.arm.FEAT_I8MM", ctypes.byref(found), ctypes.byref(size), None, 0)
        return set(_HWCAPS) if found.value else set(_HWCAPS) - {"i8mm"}  # every processor of a Mac has the others
    if platform.machine() == "aarch64":
        tell = ctypes.CDLL(None).getauxval
        tell.restype, tell.argtypes = ctypes.c_ulong, (ctypes.c_ulong,)
        return {name for name, (word, bit) in _HWCAPS.items() if tell(word) >> bit & 1}
    return set(processor.partition("flags")[2].partition("\n")[0].split())


def _processor() -> str:
    """What Linux tells of the processor. Raises OSError if it does not."""
    return "" if sys.platform == "darwin" else Path("/proc/cpuinfo").read_text()


@cache
def vendor() -> str:
    """The processor's vendor: approximate reciprocals differ in the last bit or two between vendors."""
    found = re.search(r"^vendor_id\s*:\s*(\S+)", _processor(), re.MULTILINE)
    return found[1] if found else "unknown"


@cache
def variants() -> tuple[str, ...]:
    """The compiled variants that this processor can run, fastest first. Raises OSError without /proc/cpuinfo."""
    processor = _processor()
    has = features(processor)
    compiled = [name for name, needed in VARIANTS.items() if set(needed) <= has and library_path(name)]
    if "GenuineIntel" in processor and {"avx512", "avx512bf16"} <= set(compiled):  # bfloat16 is slower on Intel
        compiled.remove("avx512bf16")
        compiled.insert(compiled.index("avx512") + 1, "avx512bf16")
    usable = tuple(name for name in compiled if load(name).twostroke_usable())
    for name in compiled:
        if name not in usable:
            log.warning(
                "the processor could run the %s kernels, but the operating system does not let this process", name
            )
    return usable


def unavailable(variant: str | None = None) -> str | None:
    """Say why the native backend, or one of its variants, cannot run here; None if it can."""
    if (machine := platform.machine()) not in ("x86_64", "AMD64", *_ARM):
        return f"its kernels are for x86-64 and ARM processors, and this one is {machine}"
    try:
        runnable = variants()
    except OSError:
        return "the processor's features cannot be read (/proc/cpuinfo)"
    here = [name for name in VARIANTS if (name in ON_ARM) == (machine in _ARM)]
    wanted = [variant] if variant else here
    if any(name in runnable for name in wanted):
        return None
    if not any(library_path(name) for name in wanted) and wanted[-1] in here:
        return "it was not compiled: install a C++ compiler, then the package again"
    others = f"; it can run {', '.join(f'native-{name}' for name in runnable)}" if runnable else ""
    has = features(_processor())
    if set(VARIANTS[wanted[-1]]) <= has:
        return f"the operating system does not let this process use {NAMES[wanted[-1]]}{others}"
    return f"the processor has no {NAMES[wanted[-1]]}{others}"


PLACES: dict[str, Path] = {}  # of variants whose file is not beside this one: see `use`


def use(variant: str, path: Path) -> None:
    """Load a variant from another file from now on: that of rank 0, or kernels in software."""
    PLACES[variant] = path


def library_path(variant: str) -> Path | None:
    """The file of a compiled variant; None if it was not compiled."""
    path = PLACES.get(variant) or Path(__file__).parent / f"_native_{variant}.so"
    return path if path.is_file() else None


def same_bits(variant: str) -> str:
    """The compiled variant by which the bits of this one are known: `neon` for all on ARM, else itself."""
    return "neon" if variant in ON_ARM and library_path("neon") else variant


@cache
def digest(variant: str) -> str:
    """The sha256 of a compiled variant: a new build may compute other bits."""
    path = library_path(variant)
    assert path is not None, "asked for a variant that is compiled"
    return hashlib.sha256(path.read_bytes()).hexdigest()


@cache
def load(variant: str) -> ctypes.CDLL:
    """Load a compiled variant and declare its functions.

    Raises InvalidRequest if this is a checkout, and its sources have changed since they were compiled.
    """
    library = ctypes.CDLL(str(path := library_path(variant)))
    expected = sources.digest(SOURCES, variant)
    if expected and _compiled_from(library) not in (0, expected):
        raise InvalidRequest(
            f"{path} was compiled from other sources than those in {SOURCES}: run `make` or `pip install --editable .` "
            "again, as after every change of them"
        )
    for name, (result, arguments) in SIGNATURES.items():
        function = getattr(library, f"twostroke_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def _compiled_from(library: ctypes.CDLL) -> int:
    """The digest of a library's sources; 0 if it knows none, and -1 for one of a version that had no digest."""
    if not hasattr(library, "twostroke_sources"):
        return -1
    library.twostroke_sources.restype = SIGNATURES["sources"][0]
    return library.twostroke_sources()


class ThreadTeam:
    """Threads that run a variant's kernels together. A pass may return while some of them are still in it.

    Each thread has a reserve thread, which wakes only if other processes take the cores.
    """

    def __init__(self, variant: str, size: int) -> None:
        """Start `size` threads. Raises InvalidRequest if the system cannot start as many."""
        self.library = load(variant)
        self.handle: int = self.library.twostroke_team(size)
        if not self.handle:
            raise InvalidRequest(f"the system cannot start {size} threads and as many in reserve: ask for fewer")
        free_with(self, self.library.twostroke_team_free, self.handle)
        call_at_exit(self.settle)  # Python may free pools then

    def settle(self) -> None:
        """Wait until no thread is in a pass."""
        self.library.twostroke_settle(self.handle)

    def free_with(self, owner: object, free: Callable[[int], None], handle: int, *kept: object) -> None:
        """Free `handle`, which threads may read, when `owner` is gone and they have settled; keep `kept` as long."""
        free_with(owner, _free_settled, self, free, handle, *kept)

    @cached_property
    def bare(self) -> int:
        """A model without blocks, for single matrix products."""
        made = self.library.twostroke_model(self.handle, ctypes.byref(NativeConfig()), None, None, None)
        free_with(self, self.library.twostroke_model_free, made)
        return made


def _free_settled(team: ThreadTeam, free: Callable[[int], None], handle: int, *_kept: object) -> None:
    team.settle()
    free(handle)
