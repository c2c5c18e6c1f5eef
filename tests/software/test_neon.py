"""NEON's products have the bits of AVX2's over SIMDe; under qemu, answers are the same under every schedule.

The second wants `g++-aarch64-linux-gnu`, `qemu-user`, and a folder with Python 3.11 for arm64 and, in `site`, the
packages that Twostroke depends on: its path is TWOSTROKE_ARM_ROOT.
"""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.backends.test_native import odd_columns, raw_tensor
from tests.software import kernels
from tests.tiny import write_model
from twostroke.backends.native import backend as native
from twostroke.backends.native import library
from twostroke.backends.native import weights as packed

FAMILIES = ("llama", "gemma3", "qwen3moe", "qwen3_5")
ARM_ROOT = os.environ.get("TWOSTROKE_ARM_ROOT", "")
pytestmark = pytest.mark.skipif("avx2" not in library.variants(), reason="no AVX2 here to compare with")


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (reason := kernels.lacks_simde()) is not None:
        pytest.skip(reason)
    return kernels.compile_into(tmp_path_factory.mktemp("software"), "neon")


@pytest.mark.parametrize("rows", [1, 5, 21, 70])
@pytest.mark.parametrize("name", packed.FORMATS)
def test_products(name: str, rows: int, simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.PLACES, "neon", simulated)
    raw = raw_tensor(name, 64, odd_columns(name))
    x = np.random.default_rng(2).standard_normal((rows, raw.shape[1]), np.float32)
    x[0, :64] *= 1e-30
    mine, theirs = (
        packed.PackedMatrix(native.NativeBackend(1, variant).team, raw).multiply(x) for variant in ("neon", "avx2")
    )
    assert np.array_equal(mine, theirs)


@pytest.mark.skipif(not ARM_ROOT, reason="TWOSTROKE_ARM_ROOT names no arm64 Python")
def test_answers_under_emulation(tmp_path: Path) -> None:
    for family in FAMILIES:
        write_model(family, tmp_path / "models" / family, head_dim=32)
    setup = runpy.run_path(str(kernels.ROOT / "setup.py"))
    built = tmp_path / "neon.so"
    flags = [*setup["FLAGS"], *setup["ON_ARM"]["neon"], "-fPIC", "-shared"]
    compiler = shutil.which("aarch64-linux-gnu-g++")
    assert compiler, "wants g++-aarch64-linux-gnu"
    subprocess.run([compiler, *flags, kernels.ROOT / "native/neon.cpp", "-o", built], check=True)
    emulated = ["qemu-aarch64", "-L", ARM_ROOT, f"{ARM_ROOT}/usr/bin/python3.11"]

    def lines(python: list[str], path: str, *arguments: object) -> list[str]:
        command = [*python, str(Path(__file__).parent / "schedules.py"), str(tmp_path / "models"), *map(str, arguments)]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()

    found = lines(emulated, f"{kernels.ROOT}:{ARM_ROOT}/site", "neon", built)
    expected = lines([sys.executable], str(kernels.ROOT), "avx2")
    same = [f"{family} {kv_dtype} " for family in ("llama", "gemma3") for kv_dtype in ("bfloat16", "int8")]
    for mine, theirs in zip(found, expected, strict=True):  # the others differ: see docs/kernels.md
        assert mine == theirs or not mine.startswith(tuple(same))
    assert len(found) == 9 * len(FAMILIES)
    for at in range(0, len(found), 3):
        assert len({line.split()[-1] for line in found[at : at + 3]}) == 1, found[at : at + 3]
