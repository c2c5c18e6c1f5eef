"""Compiles the native CPU backend. Without a compiler the package installs without it, and warns."""

import hashlib
import os
import platform
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
FLAGS.append("-g0")  # without debug information: 2 MB of libraries instead of 27, in half the time
# One library for each variant; twostroke.backends.native.library loads the first that the processor can run.
AVX512 = [*(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq", "vnni")), "-mfma", "-mf16c"]
AVX512_BF16 = [*AVX512, "-mavx512bf16"]
VARIANTS = {
    "amx": [*AVX512_BF16, "-mavx512vbmi", "-mavx512vbmi2", "-mavx512fp16", "-mamx-tile", "-mamx-bf16"],
    "avx512bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": ["-mavx2", "-mfma", "-mf16c"],
}
ON_ARM = {"i8mm": ["-march=armv8.2-a+dotprod+i8mm"], "neon": ["-march=armv8.2-a+dotprod"]}
MACHINES = {"x86_64": VARIANTS, "AMD64": VARIANTS, "aarch64": ON_ARM, "arm64": ON_ARM}
# A wheel for another machine, by a compiler that $CXX names, as tools/wheel.py does it; or for this one.
PLATFORM = os.getenv("TWOSTROKE_PLATFORM", "")
MACHINE = PLATFORM.rpartition("_")[2] or platform.machine()
# A pure wheel has no kernels and installs anywhere; it computes with PyTorch.
HAS_KERNELS = MACHINE in MACHINES and (sys.platform == "linux" or MACHINE == "arm64")
COMPILES = HAS_KERNELS and not os.getenv("TWOSTROKE_PURE")
KEPT = Path("build/kernels")  # libraries that were compiled in this checkout
DIGEST = "twostroke/backends/native/sources.py"
HEADERS = sorted(str(path) for path in Path("native").glob("*.h"))


class Build(build_ext):
    """Names the libraries without a Python version: they are loaded by ctypes, and use nothing of Python's."""

    def initialize_options(self) -> None:
        super().initialize_options()
        self.parallel = os.cpu_count() or 1  # not as an option of `setup`: an editable install forgets those

    def get_ext_filename(self, fullname: str) -> str:
        return f"{Path(*fullname.split('.'))}.so"

    def build_extension(self, ext: Extension) -> None:
        """Compile a library, unless the same compiler has made it from the same sources: extras cost no compilation."""
        made = Path(self.get_ext_fullpath(ext.name))
        kept = KEPT / f"{made.stem}-{self._digest(ext)}.so"
        if kept.exists() and not self.force:
            made.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(kept, made)
            return
        super().build_extension(ext)
        KEPT.mkdir(parents=True, exist_ok=True)
        for old in KEPT.glob(f"{made.stem}-*"):
            old.unlink()
        shutil.copyfile(made, f"{kept}.new")
        os.replace(f"{kept}.new", kept)  # a build that is stopped leaves no half of it

    def _digest(self, ext: Extension) -> str:
        compiler = self.compiler.compiler_cxx
        version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
        made_from = hashlib.sha256(repr((compiler, ext.extra_compile_args, ext.extra_link_args)).encode() + version)
        for path in (*ext.sources, *ext.depends):
            made_from.update(Path(path).read_bytes())
        return made_from.hexdigest()[:16]


class Wheel(bdist_wheel):
    """One wheel for every version of Python."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", PLATFORM or super().get_tag()[2])


def native(variant: str) -> Extension:
    sources = runpy.run_path(DIGEST)["digest"](Path("native"), variant)  # kernels of others are noticed when loaded
    return Extension(
        f"twostroke.backends.native._native_{variant}",
        sources=[f"native/{variant}.cpp"],
        depends=["setup.py", DIGEST, "native/model.cpp", *HEADERS],
        extra_compile_args=[*FLAGS, *(VARIANTS | ON_ARM)[variant], f"-DSOURCES={sources:#x}"],
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,  # a failed build is a warning; twostroke.backends.native.library says why the backend is missing
    )


if __name__ == "__main__":
    setup(
        ext_modules=[native(variant) for variant in MACHINES[MACHINE]] if COMPILES else [],
        cmdclass={"build_ext": Build, "bdist_wheel": Wheel},
    )
