"""Kernels with their instructions in software, so that a processor without AMX, or without AVX-512, can test them."""

import os
import re
import runpy
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import settings

from twostroke.backends.native import library

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
_BUILT = "SOFTWARE_KERNELS"  # for the worker processes of a test run

# Features that a processor must have for a variant in software. For AMX: all except tiles and float16.
NEEDED = {
    "amx": (*library.VARIANTS["avx512bf16"], "avx512vbmi", "avx512_vbmi2"),
    "avx512bf16": library.VARIANTS["avx2"],
    "avx512": library.VARIANTS["avx2"],
    **dict.fromkeys(library.ON_ARM, library.VARIANTS["avx2"]),
}
# Where tests of kernels and schedules are. A server, the page and Triton's kernels show nothing of them.
_ROOMS = ("api", "backends", "engine", "kv", "methods", "models", "software", "study/explain")
# Files whose schedules are of `tiny_llm`, which only PyTorch computes: its heads are too small for kernels. One that
# starts processes, which have no variants in software. And what takes a real model minutes, and tiny ones show too.
_WITHOUT_KERNELS = ("test_engine", "test_scheduler", "test_quantize", "test_process_exit")
_SLOW = ("test_schedules", "another_variant", "uneven")
_HAS_SIMDE = ["g++", "-E", "-include", "simde/arm/neon.h", "-o", os.devnull, "-x", "c++", "-"]
# It compiles in a quarter of -O3's time, and runs in a quarter of -O1's.
_AVX512 = ["-O2", "-Wno-psabi", "-DIN_SOFTWARE", "-include", str(HERE / "avx512.h")]
_NEON = ["-O2", "-Wno-psabi", "-DIN_SOFTWARE", "-include", str(HERE / "neon.h")]
_AMX = ["-O2", "-mavx512vbmi", "-mavx512vbmi2", "-D__AMX_BF16__", "-include", str(HERE / "float16.h")]


def compile_into(directory: Path, variant: str, *more: str) -> Path:
    """Compile native/ with tile instructions and float16, or AVX-512, in software. Raises CalledProcessError."""
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = {
        "amx": setup["AVX512_BF16"] + _AMX,
        "avx512bf16": [*setup["VARIANTS"]["avx2"], *_AVX512, "-DSOFTWARE_BF16"],
        "avx512": setup["VARIANTS"]["avx2"] + _AVX512,
        "i8mm": [*setup["VARIANTS"]["avx2"], "-D__ARM_FEATURE_MATMUL_INT8", *_NEON],
        "neon": setup["VARIANTS"]["avx2"] + _NEON,
    }[variant]
    sources = directory / variant
    shutil.copytree(ROOT / "native", sources)
    if variant == "amx":
        shutil.copy(HERE / "tile_instructions.h", sources)
    elif variant not in library.ON_ARM:
        for source in sources.glob("*.h"):
            source.write_text(re.sub(r"\b_mm512_", "avx512::", source.read_text()))
    built = directory / f"{variant}.so"
    command = ["g++", *setup["FLAGS"], *flags, *more, "-fPIC", "-shared", sources / f"{variant}.cpp", "-o", built]
    subprocess.run(command, check=True)
    return built


def lacks_simde() -> str | None:
    """Say why NEON's instructions cannot be in software here; None if they can."""
    if shutil.which("g++") and not subprocess.run(_HAS_SIMDE, stdin=subprocess.DEVNULL, capture_output=True).returncode:
        return None
    return "NEON is not tested in software: that wants g++ and SIMDe (Debian: libsimde-dev)"


def install(config: pytest.Config, variants: Sequence[str]) -> None:
    """Enable variants that the processor lacks, but supports in software, in this process."""
    if unknown := set(variants) - set(NEEDED):
        raise pytest.UsageError(f"--software takes {', '.join(NEEDED)}, not {', '.join(sorted(unknown))}")
    has = library.features(Path("/proc/cpuinfo").read_text())
    lacking = [one for one in variants if not set(library.VARIANTS[one]) <= has and set(NEEDED[one]) <= has]
    if not lacking:
        wanted = "; ".join(f"{one} wants {' '.join(NEEDED[one])}" for one in variants)
        pytest.exit(f"nothing is tested in software: it can run in hardware, or not here ({wanted})", returncode=0)
    if not shutil.which("g++"):
        pytest.exit("nothing is tested in software, since there is no g++", returncode=0)
    if set(library.ON_ARM) & set(lacking) and (reason := lacks_simde()) is not None:
        pytest.exit(reason, returncode=0)
    if _BUILT not in os.environ:
        directory = tempfile.TemporaryDirectory()
        config.add_cleanup(directory.cleanup)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda variant: compile_into(Path(directory.name), variant), lacking))
        os.environ[_BUILT] = directory.name
    for variant in lacking:
        use(Path(os.environ[_BUILT]) / f"{variant}.so", variant)
    settings.load_profile("software")  # half of the examples: they are slow, and others each time
    # What is left out, `make test` tests.
    tests = f"({' or '.join([*lacking, 'schedule'])}) and not ({' or '.join(_WITHOUT_KERNELS + _SLOW)})"
    config.option.keyword = config.option.keyword or tests
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:  # none were named
        config.args = [f"{HERE.parent / room}" for room in _ROOMS]


def use(built: Path, variant: str) -> None:
    """Let this process, and ranks that it starts, have a variant in software."""
    library.VARIANTS[variant] = NEEDED[variant]
    library.use(variant, built)
