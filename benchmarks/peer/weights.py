"""A model of the catalog in the forms that engines read. All are made from the same GGUF file, and kept.

`catalog` is for our engine, which opens the GGUF by name. `safetensors` has its dequantized values in bfloat16.
`openvino` and `onnx` are int4 made from those. Models with random weights (random_shapes.py) are GGUF files only.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.peer.engines import ENGINES, Engine
from benchmarks.peer.environments import CannotSetUp, ensure_environment, log_file, python, run
from benchmarks.peer.random_shapes import SHAPES
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.checkpoints.fetch import fetch

INT4_GROUP = 128  # optimum's default; rows that it does not divide need a smaller one


def ensure_weights(engine: Engine, model: str, work: Path) -> str:
    """The path or name that the engine opens. Raises CannotSetUp, or FetchError if the model is not available."""
    return FORMS[engine.form](model, work)


def catalog(model: str, work: Path) -> str:
    path = gguf(model, work)
    return path if model in SHAPES else model


def gguf(model: str, work: Path) -> str:
    if model not in SHAPES:
        return str(fetch(CATALOG[model]))

    def make(directory: Path) -> None:
        from benchmarks.peer.random_gguf import write_random  # needs gguf, which --help must not

        directory.mkdir()
        write_random(SHAPES[model], directory / f"{model}.gguf")

    return str(Path(once(work / "models" / model / "gguf", make)) / f"{model}.gguf")


def safetensors(model: str, work: Path) -> str:
    if model in SHAPES:
        raise CannotSetUp("there is only a GGUF file with random weights")
    maker = ENGINES["transformers"]

    def make(directory: Path) -> None:
        ensure_environment(maker, work)
        command = [str(python(maker, work)), "-m", "benchmarks.peer.dequantize", gguf(model, work), str(directory)]
        run(command, log_file(work, f"dequantize-{model}"))

    return once(work / "models" / model / "safetensors", make)


def openvino(model: str, work: Path) -> str:
    maker = ENGINES["openvino"]

    def make(directory: Path) -> None:
        ensure_environment(maker, work)
        dense = Path(safetensors(model, work))
        width = json.loads((dense / "config.json").read_text())["hidden_size"]
        group = [] if width % INT4_GROUP == 0 else ["--group-size", str(INT4_GROUP // 2)]
        command = [str(python(maker, work).with_name("optimum-cli")), "export", "openvino", "--model", str(dense)]
        command += ["--task", "text-generation-with-past", "--weight-format", "int4", *group, str(directory)]
        run(command, log_file(work, f"export-{model}"))

    return once(work / "models" / model / "openvino-int4", make)


def onnx(model: str, work: Path) -> str:
    maker = ENGINES["onnxruntime-genai"]

    def make(directory: Path) -> None:
        ensure_environment(maker, work)
        command = [str(python(maker, work)), "-m", "onnxruntime_genai.models.builder", "--precision", "int4"]
        command += ["--input", safetensors(model, work), "--output", str(directory), "--execution_provider", "cpu"]
        command += [
            "--cache_dir",
            str(work / "onnx-cache"),
            "--extra_options",
            "prune_lm_head=true",
        ]  # int8 activations: the default
        run(command, log_file(work, f"onnx-{model}"))

    return once(work / "models" / model / "onnx-int4", make)


FORMS: dict[str, Callable[[str, Path], str]] = {
    "catalog": catalog,
    "gguf": gguf,
    "safetensors": safetensors,
    "openvino": openvino,
    "onnx": onnx,
}


def once(directory: Path, make: Callable[[Path], None]) -> str:
    """The directory. If it is missing it is made under another name and renamed, so that it is never incomplete."""
    if not directory.is_dir():
        partial = directory.with_name(directory.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.parent.mkdir(parents=True, exist_ok=True)
        make(partial)
        if not partial.is_dir():
            raise CannotSetUp(f"nothing was written to {directory.name}")
        os.replace(partial, directory)
    return str(directory)


def describe(engine: Engine, model: str) -> str:
    """The weights in words."""
    if model in SHAPES:
        return engine.weights.format(quantization=SHAPES[model].quantization)
    found = re.search(r"[-.](q\d\w*)\.gguf$", CATALOG[model].file, re.IGNORECASE)
    return engine.weights.format(quantization=found[1].upper() if found else "").strip()
