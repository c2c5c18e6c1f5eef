"""Compiles the native CPU backend; without a compiler the package installs all the same, and says what it lost."""

import platform

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c++20", "-ffp-contract=off", "-fvisibility=hidden", "-pthread"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma", "-mf16c"]

native = Extension(
    "twostroke.kernels._native",
    sources=["native/model.cpp"],
    depends=["native/simd.h", "native/weights.h", "native/gemm.h", "native/attention.h", "native/threads.h"],
    extra_compile_args=FLAGS + AVX512,
    extra_link_args=["-pthread"],
    language="c++",
    optional=True,  # a failed build is a warning; twostroke.kernels.native says why the backend is missing
)
setup(ext_modules=[native] if platform.machine() in ("x86_64", "AMD64") else [])
