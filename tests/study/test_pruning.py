"""Pruning keeps the channels that the text uses and the rest of the model, and the student fits its teacher."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import transformers

from tests.moments import show_ways_back
from tests.short_files import short_files
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.methods import OverFill
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.checkpoints.tokenizer import Tokenizer
from twostroke.study import pruning
from twostroke.study.pruning import mlp_of, observe, prune

TEXT = "the quick brown fox jumps over the lazy dog and then the cat jumps over the quick dog " * 4
FAMILIES = ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"]


def rounded(values: np.ndarray) -> np.ndarray:
    """Values rounded to bfloat16, as they are written."""
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_taken_away_is_the_model(family: str, tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    prune(open_checkpoint(str(tiny_directory(family))), TEXT, tmp_path / "same", 0, 0)
    before, after = (open_checkpoint(str(path)) for path in (tiny_directory(family), tmp_path / "same"))
    assert after.config == before.config
    for name in before.names():
        assert (after.tensor(name).dequantize() == rounded(before.tensor(name).dequantize())).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_student_of_its_teacher(family: str, tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """It opens with its teacher, shares the teacher's KV, and the hand-over runs."""
    teacher = str(tiny_directory(family))
    kept = prune(open_checkpoint(teacher), TEXT, tmp_path / "student", 0.5, 0.3)
    assert (kept.hidden_size, mlp_of(kept).intermediate_size) == (32, 64)
    llm = LLM(teacher, student=str(tmp_path / "student"), kv_bytes=16 << 20, threads=1)
    assert llm.engine.models["student"].pool is llm.pool
    assert len(llm.generate([TEXT], method=OverFill(), max_tokens=8, ignore_eos=True)[0].tokens) == 8


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_what_stays_is_what_the_text_uses(family: str, tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """By transformers' activations. The same channels are removed in all tensors."""
    checkpoint = open_checkpoint(str(tiny_directory(family)))
    tokenizer = Tokenizer.from_source(checkpoint.tokenizer_source)
    tokens = tokenizer.encode(TEXT)
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_directory(family), dtype=torch.float32)
    normed, gated = [], []
    for layer in model.model.layers:
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.register_forward_hook(lambda _, __, out: normed.append(out[0].abs().double().sum(0)))
        layer.mlp.down_proj.register_forward_pre_hook(lambda _, args: gated.append(args[0][0].abs().double().sum(0)))
    with torch.no_grad():
        model.model(torch.tensor([tokens]))
    seen = observe(checkpoint, tokenizer, tokens)
    torch.testing.assert_close(torch.from_numpy(seen.hidden), sum(normed), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(seen.intermediate), torch.stack(gated), rtol=1e-4, atol=1e-4)
    prune(checkpoint, TEXT, tmp_path / "student", 0.5, 0.3)
    student = open_checkpoint(str(tmp_path / "student"))
    channels = torch.stack(normed).sum(0).topk(32).indices.sort().values.numpy()
    inner = gated[1].topk(64).indices.sort().values.numpy()
    for name, rows, columns in [("up", inner, channels), ("down", channels, inner), ("k", None, channels)]:
        whole = checkpoint.tensor(f"layers.1.{name}").dequantize()
        expected = (whole if rows is None else whole[rows])[:, columns]
        assert (student.tensor(f"layers.1.{name}").dequantize() == rounded(expected)).all()


def test_from_a_gguf_file(tmp_path: Path) -> None:
    """The directory has the tokenizer and the geometry of the GGUF file."""
    checkpoint = open_checkpoint("smollm2-135m")
    prune(checkpoint, TEXT, tmp_path / "student", 0.9, 0.9, max_tokens=32)
    llm = LLM(checkpoint, student=str(tmp_path / "student"), kv_bytes=64 << 20)
    student = llm.engine.models["student"]
    assert student.pool is llm.pool
    messages = [{"role": "user", "content": "Hello!"}]
    assert student.tokenizer.encode_chat(messages) == llm.tokenizer.encode_chat(messages)
    assert student.tokenizer.encode("Hello!") == llm.tokenizer.encode("Hello!")
    assert student.tokenizer.eos_ids == llm.tokenizer.eos_ids
    assert len(llm.chat(messages, method=OverFill(), max_tokens=4, ignore_eos=True).tokens) == 4


@pytest.mark.parametrize(
    ("family", "change", "message"),
    [
        ("llama", {"hidden": 1.0}, "hidden must be from 0 to below 1"),
        ("llama", {"intermediate": -0.1}, "intermediate must be from 0"),
        ("llama", {"text": "a b"}, "at least 32 tokens"),
        ("gemma3", {}, "gemma3 cannot be pruned"),
    ],
)
def test_what_cannot_be_is_said(
    family: str, change: dict[str, Any], message: str, tiny_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(str(tiny_directory(family)))
    arguments: dict[str, Any] = {"text": TEXT, "directory": tmp_path / "student", "hidden": 0.5, "intermediate": 0.5}
    with pytest.raises(InvalidRequest, match=message):
        prune(checkpoint, **(arguments | change))
    assert not (tmp_path / "student").exists()
    with pytest.raises(InvalidRequest, match="exists already"):
        prune(open_checkpoint(str(tiny_directory("llama"))), TEXT, tmp_path, 0.5, 0.5)


def test_a_full_disk_is_said(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_directory("llama")))
    with short_files(1000), pytest.raises(InvalidRequest, match=r"model.safetensors cannot be written: .*too large"):
        prune(checkpoint, TEXT, tmp_path / "student", 0.5, 0.3)
    assert not (tmp_path / "student").exists()  # so it can be tried again


@pytest.mark.skipif(sys.version_info < (3, 12), reason="Python does not tell of ways back, and a `try` covers them")
def test_ctrl_c_leaves_nothing(tiny_directory: Callable[[str], Path], tmp_path: Path) -> None:
    """At each way back to the start of a loop, once."""
    checkpoint, pressed = open_checkpoint(str(tiny_directory("llama"))), set[tuple[CodeType, int]]()

    def press(frame: FrameType, event: str, _: Any) -> None:
        place = frame.f_code, frame.f_lasti
        if event == "jump" and frame.f_code.co_filename == pruning.__file__ and place not in pressed:
            pressed.add(place)
            raise KeyboardInterrupt

    def interrupted() -> bool:
        show_ways_back(press)
        sys.setprofile(press)
        try:
            prune(checkpoint, TEXT, tmp_path / "student", 0.5, 0.3)
        except KeyboardInterrupt:
            return True
        finally:
            sys.setprofile(None)
            show_ways_back(None)
        return False

    while interrupted():
        assert not (tmp_path / "student").exists()
    assert len(pressed) > 3
