"""gpt-oss with experts in MXFP4, from both kinds of files: transformers' values, and in their own bits."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers.utils.quantization_config import Mxfp4Config

from tests.models.checkpoints.test_families_in_gguf import CONVERTED, convert
from tests.models.test_against_transformers import all_logits, tokens
from tests.tiny import VOCAB, write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.model import NativeModel
from twostroke.errors import CheckpointError
from twostroke.models.checkpoints.gguf.opening import open_gguf
from twostroke.models.checkpoints.huggingface.directory import open_huggingface

EXPERTS, CHOSEN, WIDTH, HIDDEN = 5, 3, 64, 96
STACKS = {"gate_up_proj": (2 * WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}  # outputs, inputs


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss whose experts are random blocks."""
    directory = write_model("gpt_oss", tmp_path_factory.mktemp("packed"), intermediate_size=WIDTH)
    found, generator = load_file(directory / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in found if name.endswith(tuple(STACKS))]:
        rows, columns = STACKS[name.rpartition(".")[2]]
        shape = EXPERTS, rows, columns // 32
        del found[name]
        found[f"{name}_blocks"] = generator.integers(0, 256, (*shape, 16), np.uint8)
        found[f"{name}_scales"] = generator.integers(121, 125, shape, np.uint8)
    save_file(found, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def in_gguf(directory: Path, path: Path) -> Any:
    theirs = open_huggingface(directory)
    return replace(open_gguf(convert(directory, path, CONVERTED["gpt_oss"])), tokenizer_source=theirs.tokenizer_source)


def test_both_files_have_the_same_blocks(packed: Path, tmp_path: Path) -> None:
    theirs, mine = open_huggingface(packed), in_gguf(packed, tmp_path / "a.gguf")
    assert mine.names() == theirs.names()
    experts = [name for name in mine.matrices() if ".experts." in name]
    assert len(experts) == 3 * 3 * EXPERTS
    assert {one.format for name in experts for one in (mine.matrices()[name], theirs.matrices()[name])} == {"MXFP4"}
    for name in mine.names():
        assert np.array_equal(mine.tensor(name).data, theirs.tensor(name).data) or "experts" not in name, name
        assert np.array_equal(mine.tensor(name).dequantize(), theirs.tensor(name).dequantize()), name
    stored = sum(theirs.stored[name].nbytes for name in experts)
    assert stored == sum(mine.stored[name].nbytes for name in experts) == 3 * EXPERTS * 3 * WIDTH * HIDDEN // 32 * 17


@pytest.mark.parametrize("count", [1, 17, 600])
def test_logits_of_transformers(count: int, packed: Path) -> None:
    quantized = Mxfp4Config(dequantize=True)
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        packed, quantization_config=quantized, dtype=torch.float32
    )
    ids = tokens(count, VOCAB, seed=count)
    with torch.no_grad():
        expected = reference.float()(torch.tensor([ids])).logits[0].numpy()
    found = all_logits(LLM(str(packed), backend="reference", kv_bytes=16 << 20), ids)
    assert np.abs(found - expected).max() < 1e-3


@pytest.mark.parametrize("variant", library.VARIANTS)
def test_in_their_own_bits(variant: str, packed: Path, tmp_path: Path) -> None:
    if reason := library.unavailable(variant):
        pytest.skip(reason)
    ids = tokens(90, VOCAB, seed=4)
    files = packed, in_gguf(packed, tmp_path / "a.gguf")
    first, second = (LLM(one if not isinstance(one, Path) else str(one), backend=f"native-{variant}") for one in files)
    found = all_logits(first, ids)
    assert np.abs(found - all_logits(second, ids)).max() < 1e-4  # numbers of config.json are float32 in the file
    expected = all_logits(LLM(str(packed), backend="reference", kv_bytes=16 << 20), ids)
    off = np.linalg.norm(found - expected, axis=-1) / np.linalg.norm(expected, axis=-1)
    assert np.median(off) < 0.1
    compiled = first.model.compiled
    assert isinstance(compiled, NativeModel)
    sizes = [matrix.nbytes for matrix in compiled.weights.matrices[-3 * EXPERTS :]]
    assert sum(sizes) <= 1.15 * 3 * EXPERTS * WIDTH * HIDDEN * 17 / 32  # scales of a panel fill whole lines


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gate_up_proj_blocks", lambda blocks: blocks[:, :, 0], "is not a stack of experts"),
        ("gate_up_proj_scales", lambda scales: scales[:, :-1], "does not fit scales of MXFP4"),
        ("down_proj_scales", None, "does not fit scales of MXFP4"),
        ("down_proj_bias", lambda bias: bias[0], "is not a stack of experts"),
        ("down_proj_bias", lambda bias: bias[:-1], "the tensor .*experts.4.down_proj.bias is missing"),
        ("gate_up_proj_bias", lambda bias: bias[:, 2:], "shape .* where layers.0.experts.0.gate_bias must have"),
    ],
)
def test_damaged_stacks(
    name: str, change: Callable[[np.ndarray], np.ndarray] | None, message: str, packed: Path, tmp_path: Path
) -> None:
    for file in packed.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    found = load_file(packed / "model.safetensors")
    key = f"model.layers.0.mlp.experts.{name}"
    changed = None if change is None else np.ascontiguousarray(change(found[key]))
    found = {one: tensor for one, tensor in found.items() if one != key} | ({} if changed is None else {key: changed})
    save_file(found, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        open_huggingface(tmp_path)
    assert "\n" not in str(caught.value)


def test_stacks_whose_halves_are_gate_and_up(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """Qwen3.5's own files: the same tensors as of one for each expert."""
    directory = shutil.copytree(tiny_directory("qwen3_5moe"), tmp_path / "a")
    tensors = load_file(directory / "model.safetensors")
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for i in range(3):
        experts = [f"model.layers.{i}.mlp.experts.{e}" for e in range(7)]
        both = [np.concatenate([tensors[f"{one}.{part}_proj.weight"] for part in ("gate", "up")]) for one in experts]
        prefix = f"model.layers.{i}.mlp.experts"
        stacked[f"{prefix}.gate_up_proj"] = np.stack(both)
        stacked[f"{prefix}.down_proj"] = np.stack([tensors[f"{one}.down_proj.weight"] for one in experts])
    save_file(stacked, directory / "model.safetensors")
    found, expected = open_huggingface(directory), open_huggingface(tiny_directory("qwen3_5moe"))
    assert found.names() == expected.names()
    for name in expected.names():
        assert np.array_equal(found.tensor(name).dequantize(), expected.tensor(name).dequantize()), name
