"""The AMX kernels with their instructions in software, so that a processor without AMX can test them."""

import os
import runpy
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from twostroke.kernels import library

ROOT = Path(__file__).parents[2]
NEEDED = (*library.VARIANTS["avx512bf16"], "avx512vbmi", "avx512_vbmi2")  # all but tiles and float16
_BUILT = "SOFTWARE_AMX"  # for the processes that share the tests


def compile_into(directory: Path) -> Path:
    """native/, but for its tiles' instructions and the arithmetic of float16. Raises CalledProcessError."""
    headers = Path(__file__).parent
    for source in [*(ROOT / "native").iterdir(), headers / "tile_instructions.h"]:
        shutil.copy(source, directory)
    setup = runpy.run_path(str(ROOT / "setup.py"))
    flags = [*setup["FLAGS"], *setup["AVX512_BF16"], "-mavx512vbmi", "-mavx512vbmi2", "-D__AMX_BF16__"]
    shim = ["-include", str(headers / "float16.h")]
    built = directory / "amx.so"
    subprocess.run(["g++", *flags, *shim, "-fPIC", "-shared", directory / "amx.cpp", "-o", built], check=True)
    return built


def missing() -> list[str]:
    """What this machine lacks, to compile and run it."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    return sorted(set(NEEDED) - set(flags)) + ([] if shutil.which("g++") else ["g++"])


def install(config: pytest.Config) -> None:
    """Makes this process take it for the processor's own."""
    if lacks := missing():
        pytest.exit(f"AMX in software: nothing is tested, since there is no {', '.join(lacks)} here", returncode=0)
    if _BUILT not in os.environ:
        directory = tempfile.TemporaryDirectory()
        config.add_cleanup(directory.cleanup)
        os.environ[_BUILT] = str(compile_into(Path(directory.name)))
    use(Path(os.environ[_BUILT]))


def use(built: Path) -> None:
    compiled = library._library_path
    library.VARIANTS["amx"] = NEEDED
    library._library_path = lambda variant: built if variant == "amx" else compiled(variant)
