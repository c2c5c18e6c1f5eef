"""Kernels are compiled once for the same sources: an extra that is installed later takes what is there."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
VARIANTS = ("amx", "avx512bf16", "avx512", "avx2")


def build(directory: Path) -> tuple[int, set[str]]:
    """Build in place; how many sources were compiled, and which libraries are there."""
    done = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--inplace"],
        cwd=directory,
        capture_output=True,
        text=True,
        check=True,
    )
    made = (directory / "twostroke" / "backends" / "native").glob("*.so")
    return sum(" -c native/" in line for line in done.stdout.splitlines()), {path.stem for path in made}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no compiler")
def test_the_same_sources_are_compiled_once(tmp_path: Path) -> None:
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "native").mkdir()
    package = Path("twostroke", "backends", "native")
    (tmp_path / package).mkdir(parents=True)
    shutil.copy(ROOT / package / "sources.py", tmp_path / package)
    for name in (*VARIANTS, "model"):
        (tmp_path / "native" / f"{name}.cpp").write_text('extern "C" int one() { return 1; }\n')
    libraries = {f"_native_{variant}" for variant in VARIANTS}
    assert build(tmp_path) == (len(VARIANTS), libraries)
    for path in (tmp_path / "build").iterdir():  # as in an installation, which builds in a folder of its own
        if path.name != "kernels":
            shutil.rmtree(path)
    for path in (tmp_path / "twostroke").rglob("*.so"):
        path.unlink()
    assert build(tmp_path) == (0, libraries)
    (tmp_path / "native" / "avx2.cpp").write_text('extern "C" int one() { return 2; }\n')
    assert build(tmp_path)[0] == 1
    assert len(list((tmp_path / "build" / "kernels").iterdir())) == len(VARIANTS)


def test_libraries_are_compiled_beside_each_other() -> None:
    """In an editable installation too, which makes the command anew and takes no option of `setup`."""
    asked = (
        "import runpy; from setuptools import Distribution;"
        "commands = {'build_ext': runpy.run_path('setup.py')['Build']};"
        "print(Distribution({'cmdclass': commands}).reinitialize_command('build_ext').parallel)"
    )  # in a process of its own: setuptools replaces a module that another test may have imported before
    said = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(said.stdout) == os.cpu_count()


def test_every_file_of_data_goes_into_the_wheel() -> None:
    """What is read beside the code is named in pyproject.toml: an editable installation has it in any case."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    packed = {
        path
        for package, patterns in declared.items()
        for pattern in patterns
        for path in ROOT.joinpath(*package.split(".")).glob(pattern)
    }
    built = {".py", ".so", ".pyc"}
    there = {path for path in (ROOT / "twostroke").rglob("*") if path.is_file() and path.suffix not in built}
    assert there - packed == set()
