"""Compiles the native CPU backend. Without a compiler the package installs without it, and warns."""

import os
import platform
from pathlib import Path

from setuptools import Extension, setup

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
HEADERS = sorted(str(path) for path in Path("native").glob("*.h"))


def native(variant: str) -> Extension:
    return Extension(
        f"twostroke.backends.native._native_{variant}",
        sources=[f"native/{variant}.cpp"],
        depends=["native/model.cpp", *HEADERS],
        extra_compile_args=FLAGS + VARIANTS[variant],
        extra_link_args=["-pthread"],
        language="c++",
        optional=True,  # a failed build is a warning; twostroke.backends.native.library says why the backend is missing
    )


if __name__ == "__main__":
    setup(
        ext_modules=[native(variant) for variant in VARIANTS] if platform.machine() in ("x86_64", "AMD64") else [],
        options={"build_ext": {"parallel": os.cpu_count()}},
    )
