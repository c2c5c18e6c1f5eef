"""Checks of weights: values that no model has, and changed bytes where a digest is known."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from twostroke.api.llm import LLM
from twostroke.cli.app import app
from twostroke.errors import DamagedCheckpoint
from twostroke.models.checkpoints import file_digests, verify
from twostroke.models.checkpoints.catalog import CATALOG
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.formats.encode import Encoder
from twostroke.models.tensor_shapes import is_weight_matrix

Open = Callable[[], Checkpoint]


@pytest.fixture
def copy(tiny_directory: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of its own with the tiny model, and an empty home."""
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    shutil.copytree(tiny_directory("qwen2"), tmp_path / "model")
    return tmp_path / "model"


def flip(path: Path, at: int = -5) -> None:
    """Change one byte in place."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def changed(checkpoint: Checkpoint, name: str, format: str, offset: int, bits: int) -> Checkpoint:
    """With the matrices in a format, and 16 bits of the tensor's third block (or number) replaced."""
    encoder = Encoder(format, 1)
    stored = {
        key: encoder(tensor) if is_weight_matrix(key, tensor.shape) else tensor
        for key, tensor in checkpoint.stored.items()
    }
    data = stored[name].data.copy()
    data[2, offset : offset + 2] = np.array([bits], np.uint16).view(np.uint8)
    return replace(checkpoint, stored=stored | {name: replace(stored[name], data=data)})


def test_a_sound_model(copy: Path) -> None:
    found = verify.verify(open_checkpoint(str(copy)))
    assert (found.problems, found.compared) == ((), ())
    assert found.tensors == len(open_checkpoint(str(copy)).stored)
    assert [path.name for path in found.unknown] == ["model.safetensors"]
    assert "all values are finite" in found.text
    assert "no digest of model.safetensors is known" in found.text
    assert LLM(str(copy), check=True, kv_bytes=1 << 20).verified is not None
    assert LLM(str(copy), kv_bytes=1 << 20).verified is None


@pytest.mark.parametrize("format", ["Q8_0", "Q4_1", "BF16"])
@pytest.mark.parametrize(
    ("bits", "said"), [(0x7E00, "nan"), (0x7C00, "inf|nan|e\\+"), (0xFC00, "inf|nan|e\\+"), (0x7BFF, "")]
)
def test_scales_and_numbers(bits: int, said: str, format: str, copy: Path) -> None:
    """NaN, infinity and the largest half. The line names the file's tensor."""
    bits = {0x7E00: 0x7FC0, 0x7C00: 0x7F80, 0xFC00: 0xFF80, 0x7BFF: 0x7F7F}[bits] if format == "BF16" else bits
    broken = changed(open_checkpoint(str(copy)), "layers.1.up", format, 0, bits)
    (problem,) = verify.verify(broken).problems
    assert "model.layers.1.mlp.up_proj.weight: damaged: " in problem
    assert "\n" not in problem
    with pytest.raises(DamagedCheckpoint, match=r"up_proj.weight: damaged"):
        LLM(broken, check=True, kv_bytes=1 << 20)
    if said:
        assert any(word in problem.lower() for word in ("nan", "inf", "e+")), problem


def test_vectors(copy: Path) -> None:
    checkpoint = open_checkpoint(str(copy))
    norm = checkpoint.stored["layers.0.attn_norm"]
    for value, sound in ((math.nan, False), (math.inf, False), (1e30, False), (300.0, True)):
        data = norm.data.copy()
        data.view("<f4")[0, 7] = value
        made = replace(checkpoint, stored={**checkpoint.stored, "layers.0.attn_norm": replace(norm, data=data)})
        problems = verify.verify(made).problems
        assert [f"[7] is {value:g}" in problem for problem in problems] == ([] if sound else [True])


def test_flipped_bits_of_a_scale_are_of_no_plausible_size(copy: Path) -> None:
    """The highest bit of the exponent makes any scale 65536 times as large; codes cannot be told from others."""
    checkpoint = open_checkpoint(str(copy))
    sound = changed(checkpoint, "layers.1.up", "Q8_0", 4, 0)
    scale = int(sound.stored["layers.1.up"].data[2, :2].view(np.uint16)[0])
    (problem,) = verify.verify(changed(checkpoint, "layers.1.up", "Q8_0", 0, scale ^ 0x4000)).problems
    assert "up_proj.weight: damaged" in problem
    assert verify.verify(sound).problems == (), "legal codes"


def test_a_digest_beside_the_file(copy: Path) -> None:
    weights = copy / "model.safetensors"
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    for name, text in (
        ("model.safetensors.sha256", digest + "\n"),
        ("model.safetensors.sha256", f"{digest}  model.safetensors\n"),
        ("SHA256SUMS", f"{'0' * 64}  other\n\n{digest.upper()} *model.safetensors\n"),
    ):
        (copy / name).write_text(text)
        found = verify.verify(open_checkpoint(str(copy)))
        assert (found.problems, found.compared, found.unknown) == ((), ((weights, f"in {name}"),), ())
        flip(weights)
        (problem,) = verify.verify(open_checkpoint(str(copy))).problems
        assert "model.safetensors: damaged: its sha256 is" in problem
        with pytest.raises(DamagedCheckpoint, match=f"in {name}"):
            LLM(str(copy), check=True, kv_bytes=1 << 20)
        flip(weights)
        (copy / name).unlink()


def test_the_hubs_cache_names_files_by_digest(copy: Path, tmp_path: Path) -> None:
    weights, blobs = copy / "model.safetensors", tmp_path / "blobs"
    blobs.mkdir()
    blob = blobs / hashlib.sha256(weights.read_bytes()).hexdigest()
    weights.rename(blob)
    weights.symlink_to(blob)
    assert verify.verify(open_checkpoint(str(copy))).compared == ((weights, "that the hub gives"),)
    flip(blob)
    assert "that the hub gives" in verify.verify(open_checkpoint(str(copy))).text


def test_what_it_was_when_it_was_last_opened(copy: Path) -> None:
    """A digest is kept when a file is checked or opened, also of one that is changed without a trace."""
    weights = copy / "model.safetensors"
    verify.verify(open_checkpoint(str(copy)))
    before = weights.stat()
    assert verify.verify(open_checkpoint(str(copy))).compared == (
        (weights, "of the last time that it was opened here"),
    )
    flip(weights)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert "of the last time that it was opened here" in verify.verify(open_checkpoint(str(copy))).problems[0]
    flip(weights)
    assert verify.verify(open_checkpoint(str(copy))).problems == ()
    assert file_digests.recorded_digest(weights) == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_a_copy_of_the_catalogs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One flipped bit anywhere in a file of the catalog is found, wherever the file is."""
    original = open_checkpoint("smollm2-135m").files[0]
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    path = tmp_path / "any.gguf"
    shutil.copyfile(original, path)
    entry = CATALOG["smollm2-135m"]
    assert verify.known_digest(path) == (entry.sha256, "of smollm2-135m in the catalog")
    with path.open("r+b") as stream:
        stream.seek(entry.size - 1000)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))
    result = CliRunner().invoke(app, ["models", "check", str(path), "--json"])
    facts = json.loads(result.stdout.splitlines()[-1])
    assert result.exit_code == 1
    assert [f"{path}: damaged: its sha256 is" in problem for problem in facts["problems"]] == [True]
    result = CliRunner().invoke(app, ["generate", "--model", str(path), "--check", "--prompt", "a"])
    assert result.exit_code == 1
    assert result.stdout == ""


def test_the_command(copy: Path) -> None:
    runner = CliRunner()
    result = runner.invoke(app, ["models", "check", str(copy)])
    assert result.exit_code == 0
    assert result.stdout.startswith("checked ")
    assert len(result.stdout.splitlines()) == 1
    result = runner.invoke(app, ["generate", "--model", str(copy), "--check", "--prompt", "a", "--max-tokens", "2"])
    assert result.exit_code == 0
    assert "has the sha256 of the last time that it was opened here" in result.stderr
