"""NEON's products have the bits of AVX2's over SIMDe; under qemu answers have them too, under every schedule.

The second wants `g++-aarch64-linux-gnu`, `qemu-user`, and a folder that `tools/arm_root.sh` makes: its path is
TWOSTROKE_ARM_ROOT. `make test-arm` does it all.
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

MORE_FAMILIES = ("gemma3", "qwen3moe", "qwen3_5")
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


@pytest.fixture(scope="module")
def cross_compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if not ARM_ROOT or not compiler:
        pytest.skip("wants g++-aarch64-linux-gnu, and an arm64 Python in TWOSTROKE_ARM_ROOT")
    setup = runpy.run_path(str(kernels.ROOT / "setup.py"))
    built = tmp_path_factory.mktemp("arm") / "neon.so"
    flags = [*setup["FLAGS"], *setup["ON_ARM"]["neon"], "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, kernels.ROOT / "native/neon.cpp", "-o", built], check=True)
    return built


def digests(python: list[str], path: str, *arguments: object) -> list[str]:
    command = [*python, str(Path(__file__).parent / "schedules.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("family", ["llama", *(pytest.param(one, marks=pytest.mark.nightly) for one in MORE_FAMILIES)])
def test_answers_under_emulation(family: str, cross_compiled: Path, tmp_path: Path) -> None:
    write_model(family, tmp_path / family, head_dim=32)
    emulated = ["qemu-aarch64", "-L", ARM_ROOT, f"{ARM_ROOT}/usr/bin/python3.11"]
    found = digests(emulated, f"{kernels.ROOT}:{ARM_ROOT}/site", tmp_path, "neon", cross_compiled)
    expected = digests([sys.executable], str(kernels.ROOT), tmp_path, "avx2")
    assert found == expected
    assert len(found) == 9
    for at in range(0, len(found), 3):  # each under three schedules
        assert len({line.split()[-1] for line in found[at : at + 3]}) == 1, found[at : at + 3]
