"""The catalog's entries, and how `open_checkpoint` resolves names."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import gguf
import huggingface_hub
import numpy as np
import pytest

from twostroke.errors import CheckpointError, FetchError, TwostrokeError, UnknownModel
from twostroke.models.checkpoints import hub
from twostroke.models.checkpoints.catalog import CATALOG, DEFAULT_MODEL
from twostroke.models.checkpoints.fetch import model_path
from twostroke.models.checkpoints.resolve import open_checkpoint


def tiny_gguf(path: Path) -> Path:
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_context_length(16)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-6)
    norms = {"attn_norm": 32, "ffn_norm": 32, "attn_q_norm": 16, "attn_k_norm": 16}
    for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
        writer.add_tensor(f"blk.0.{name}.weight", np.ones((32, 32), np.float32))
    for name, size in norms.items():
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(size, np.float32))
    writer.add_tensor("token_embd.weight", np.ones((8, 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(hub, "hub_trouble", lambda _: "the hub cannot be reached: no network in tests")
    monkeypatch.chdir(tmp_path)


def test_entries_are_whole() -> None:
    assert DEFAULT_MODEL in CATALOG
    for name, entry in CATALOG.items():
        assert name == entry.name
        assert re.fullmatch(r"[0-9a-f]{64}", entry.sha256)
        assert entry.file.endswith(".gguf")
        assert entry.size > 1 << 20
        assert entry.packages
        assert len(set(entry.packages)) == len(entry.packages)
        assert all(re.fullmatch(r"[\w.-]+==[\d.]+", requirement) for requirement in entry.packages)
        assert re.compile(entry.member)
        assert entry.description
        assert "\n" not in entry.description
        assert entry.licence


def test_a_catalog_name_opens_what_was_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = tiny_gguf(tmp_path / "a.gguf").read_bytes()
    entry = replace(CATALOG[DEFAULT_MODEL], size=len(data), sha256=hashlib.sha256(data).hexdigest())
    monkeypatch.setitem(CATALOG, DEFAULT_MODEL, entry)
    model_path(entry).parent.mkdir(parents=True)
    model_path(entry).write_bytes(data)
    checkpoint = open_checkpoint(DEFAULT_MODEL)
    assert checkpoint.name == DEFAULT_MODEL
    assert checkpoint.files == (model_path(entry),)
    assert checkpoint.weights_id == open_checkpoint(str(tmp_path / "a.gguf")).weights_id


def test_paths_to_files_and_folders(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(CheckpointError, match=r"holds neither a config\.json nor a GGUF file"):
        open_checkpoint(str(folder))
    tiny_gguf(folder / "one.gguf")
    for typed in (str(folder / "one.gguf"), "folder/one.gguf", "./folder", str(folder)):
        checkpoint = open_checkpoint(typed)
        assert checkpoint.name == "one"
        assert checkpoint.config.tied
    (folder / "config.json").write_text("{}")
    assert open_checkpoint(str(folder)).name == "one"
    tiny_gguf(folder / "two.gguf")
    with pytest.raises(CheckpointError, match=r"name one of its models: one\.gguf, two\.gguf"):
        open_checkpoint(str(folder))


@pytest.mark.parametrize(
    ("typed", "error", "message"),
    [
        ("smolm2-135m", UnknownModel, "did you mean smollm2-135m"),
        ("Qwen2.5-Coder", UnknownModel, "did you mean qwen2.5-coder-"),
        ("zzz", UnknownModel, "unknown model 'zzz': the catalog has smollm2-135m, qwen2.5-coder-0.5b"),
        ("", UnknownModel, "unknown model ''"),
        ("z" * 5000, UnknownModel, "unknown model"),
        ("nope.gguf", UnknownModel, "nope.gguf: there is no such file or directory"),
        ("./nope", UnknownModel, "./nope: there is no such file or directory"),
        ("/no/such/place", UnknownModel, "there is no such file or directory"),
        ("org/model.gguf", UnknownModel, "there is no such file or directory"),
        ("a/b/c", UnknownModel, "there is no such file or directory"),
        (
            "org/name",
            FetchError,
            "org/name: not a local path, not cached, and not available: the hub cannot be reached",
        ),
        ("org/name:x.gguf", FetchError, "org/name:x.gguf: not a local path, not cached"),
    ],
)
def test_what_is_not_there_is_said_in_one_line(
    typed: str, error: type[TwostrokeError], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(error, match=re.escape(message)) as caught:
        open_checkpoint(typed)
    assert "\n" not in str(caught.value)


def fake_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, files: list[str]) -> list[object]:
    """A reachable hub whose repositories all have the files in `folder`."""
    asked: list[object] = []
    siblings = [SimpleNamespace(rfilename=name, size=1) for name in files]

    def snapshot(repository: str, *, allow_patterns: list[str]) -> str:
        asked.append(allow_patterns)
        return str(folder)

    def download(repository: str, file: str) -> str:
        asked.append(file)
        return str(folder / file)

    monkeypatch.setattr(hub, "hub_trouble", lambda _: None)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(
        model_info=lambda repository, files_metadata: SimpleNamespace(siblings=siblings)
    ))  # fmt: skip
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    return asked


def test_hub_repositories_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_gguf(tmp_path / "a-q4.gguf")
    asked = fake_hub(monkeypatch, tmp_path, ["README.md", "a-q4.gguf"])
    checkpoint = open_checkpoint("org/name")
    assert checkpoint.name == "org/name"
    fake_hub(monkeypatch, tmp_path, ["a-q4.gguf", "a-q8.gguf"])
    with pytest.raises(CheckpointError, match=r"several GGUF models; name one as org/name:FILE of a-q4\.gguf, a-q8"):
        open_checkpoint("org/name")
    assert open_checkpoint("org/name:a-q4.gguf").name == "org/name:a-q4.gguf"
    fake_hub(monkeypatch, tmp_path, ["README.md", "pytorch_model.bin"])
    with pytest.raises(CheckpointError, match="holds neither safetensors with a"):
        open_checkpoint("org/name")
    assert asked == ["a-q4.gguf"]


def test_hub_safetensors_are_preferred_and_only_needed_files_are_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "a.gguf",
             "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json", "onnx/model.onnx",
             "consolidated.safetensors", "original/model.safetensors", "pytorch_model.bin", "merges.txt"]  # fmt: skip
    asked = fake_hub(monkeypatch, tmp_path, files)
    with pytest.raises(CheckpointError, match="holds neither a config"):  # our folder is empty
        open_checkpoint("org/name")
    assert asked == [["config.json", "merges.txt", "model-00001-of-00002.safetensors",
                      "model-00002-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json",
                      "tokenizer_config.json"]]  # fmt: skip
