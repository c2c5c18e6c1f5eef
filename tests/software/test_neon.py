"""ARM's products have AVX2's bits over SIMDe; under qemu answers have them too, with i8mm or not, under every schedule.

The second wants `g++-aarch64-linux-gnu`, `qemu-user`, and a folder that `tools/arm_root.sh` makes: its path is
TWOSTROKE_ARM_ROOT. `make test-arm` does it all.
"""

import os
import runpy
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.backends.test_native import odd_columns, raw_tensor
from tests.software import kernels
from tests.thinning import examples
from tests.tiny import write_model
from twostroke.backends.native import backend as native
from twostroke.backends.native import library
from twostroke.backends.native import weights as packed

MORE_FAMILIES = ("gemma3", "qwen3moe", "qwen3_5")
ARM_ROOT = os.environ.get("TWOSTROKE_ARM_ROOT", "")
pytestmark = pytest.mark.skipif("avx2" not in library.variants(), reason="no AVX2 here to compare with")


# Of the two, which share all but the product of two vectors, emulation runs both each time.
@pytest.fixture(scope="module", params=["i8mm", pytest.param("neon", marks=pytest.mark.nightly)])
def simulated(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (reason := kernels.lacks_simde()) is not None:
        pytest.skip(reason)
    # A few products take no time, however little of them is optimized; to compile the rest does.
    return kernels.compile_into(tmp_path_factory.mktemp("software"), request.param, "-Og")


@pytest.mark.parametrize("rows", [1, 5, 21, 70])
@pytest.mark.parametrize("name", packed.FORMATS)
def test_products(name: str, rows: int, simulated: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(library.PLACES, simulated.stem, simulated)
    raw = raw_tensor(name, 64, odd_columns(name))
    x = np.random.default_rng(2).standard_normal((rows, raw.shape[1]), np.float32)
    x[0, :64] *= 1e-30
    mine, theirs = (
        packed.PackedMatrix(native.NativeBackend(1, variant).team, raw).multiply(x)
        for variant in (simulated.stem, "avx2")
    )
    assert np.array_equal(mine, theirs)


@pytest.mark.parametrize("found", [0, 1])
def test_a_mac_tells_whether_it_has_i8mm(found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def sysctlbyname(name: bytes, value: Any, size: Any, *_: object) -> None:
        assert (name, size._obj.value) == (b"hw.optional.arm.FEAT_I8MM", 4)
        value._obj.value = found

    monkeypatch.setattr("platform.machine", lambda: "arm64")
    monkeypatch.setattr("ctypes.CDLL", lambda name: SimpleNamespace(sysctlbyname=sysctlbyname))
    assert library.features("") == {"asimd", "asimddp", *["i8mm"][:found]}


@pytest.fixture(scope="module")
def cross_compiled(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    compiler = shutil.which("aarch64-linux-gnu-g++")
    if not ARM_ROOT or not compiler:
        pytest.skip("wants g++-aarch64-linux-gnu, and an arm64 Python in TWOSTROKE_ARM_ROOT")
    setup, directory = runpy.run_path(str(kernels.ROOT / "setup.py")), tmp_path_factory.mktemp("arm")

    def compiled(variant: str) -> Path:
        level = [] if examples(1) > 1 else ["-O1"]  # at night as a package has it; compiling is most of the test
        flags = [*setup["FLAGS"], *level, *setup["ON_ARM"][variant], "-fPIC", "-shared"]
        source, built = kernels.ROOT / "native" / f"{variant}.cpp", directory / f"{variant}.so"
        subprocess.run([compiler, *flags, source, "-o", built], check=True)
        return built

    with ThreadPoolExecutor() as pool:
        return list(pool.map(compiled, library.ON_ARM))


def digests(python: list[str], path: str, *arguments: Path) -> tuple[list[str], list[str]]:
    """The variant that ran and the name of its bits, and a line for each kind of KV and schedule."""
    command = [*python, str(Path(__file__).parent / "schedules.py"), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    kind, *lines = done.stdout.splitlines()
    return kind.split(), lines


@pytest.mark.parametrize("family", ["llama", *(pytest.param(one, marks=pytest.mark.nightly) for one in MORE_FAMILIES)])
def test_answers_under_emulation(family: str, cross_compiled: list[Path], tmp_path: Path) -> None:
    """A processor with i8mm and one without choose the variants that they can run, and agree in every bit."""
    write_model(family, tmp_path / family, head_dim=32)

    def emulated(processor: str) -> tuple[list[str], list[str]]:
        python = ["qemu-aarch64", "-cpu", processor, "-L", ARM_ROOT, f"{ARM_ROOT}/usr/bin/python3.11"]
        return digests(python, f"{kernels.ROOT}:{ARM_ROOT}/site", tmp_path, *cross_compiled)

    with ThreadPoolExecutor() as pool:
        (found, lines), (other, others) = pool.map(emulated, ("neoverse-n1", "max"))
    assert (found[0], other[0]) == ("neon", "i8mm")
    assert found[1] == other[1]
    _, expected = digests([sys.executable], str(kernels.ROOT), tmp_path)
    assert lines == others == expected
    assert len(lines) == 9
    for at in range(0, len(lines), 3):  # each under three schedules
        assert len({line.split()[-1] for line in lines[at : at + 3]}) == 1, lines[at : at + 3]
