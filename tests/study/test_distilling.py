"""Distillation: the student computes what it computes in the engine, learns, and is written in the same form."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from twostroke.api.llm import LLM
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import InvalidRequest
from twostroke.methods import OverFill
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.sampling.params import SamplingParams
from twostroke.study import distilling
from twostroke.study.pruning import prune

TEXT = "the quick brown fox jumps over the lazy dog and then the cat jumps over the quick dog " * 30
Directory = Callable[[str], Path]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distilling, "WINDOW", 48)


def pruned(family: str, directories: Directory, student: Path, share: float = 0.5) -> Checkpoint:
    """The teacher of a student in a directory of that name."""
    teacher = open_checkpoint(str(directories(family)))
    prune(teacher, TEXT, student, share, share)
    return teacher


@pytest.mark.parametrize("family", ["llama", "llama3-rope", "mistral", "qwen2", "qwen3"])
def test_it_reads_what_the_engine_reads(family: str, tiny_directory: Directory, tmp_path: Path) -> None:
    """The teacher's logits and entries, and the student's logits after them, equal the reference backend's."""
    teacher = pruned(family, tiny_directory, tmp_path / "student")
    (window, *_) = distilling.windows_of(teacher, TEXT)
    expected, kv = distilling.WindowModel(teacher, learning=False)(window)
    said, _ = distilling.WindowModel(open_checkpoint(str(tmp_path / "student")), learning=True)(
        window[20:], kv[:, :, :20]
    )
    llm = LLM(teacher, student=str(tmp_path / "student"), backend="reference", dtype="float32", kv_bytes=16 << 20)

    def program() -> Program:
        before = yield Prefill(window[:20].tolist())  # held here, since windows give entries back
        whole = yield Prefill(window.tolist(), logits="all")
        behind = yield Prefill(window[20:].tolist(), before.with_tail(None), model="student", logits="all")
        return whole.logits, whole.kv.entries(), behind.logits

    request = llm.engine.submit(Request(program, SamplingParams(), llm.tokenizer))
    llm.engine.finish([request])
    for mine, theirs in zip((expected, kv, said), request.result, strict=True):
        there = ~np.isnan(theirs)
        assert there[..., -20:, :, :].all() if theirs.ndim == 5 else there.all()
        torch.testing.assert_close(mine.detach()[there], torch.from_numpy(theirs[there]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_student_learns_and_stays_a_student(family: str, tiny_directory: Directory, tmp_path: Path) -> None:
    teacher = pruned(family, tiny_directory, tmp_path / "student")
    before = open_checkpoint(str(tmp_path / "student")).config
    steps: list[int] = []
    windows = distilling.windows_of(teacher, TEXT)
    made = distilling.distill(teacher, tmp_path / "student", windows, 12, progress=lambda done, _: steps.append(done))
    assert steps == list(range(1, 13))
    assert len(made.losses) == 12
    assert sum(made.losses[-3:]) < 0.95 * sum(made.losses[:3])
    assert made.after < 0.95 * made.before
    assert sorted(path.name for path in (tmp_path / "student").glob("model*")) == ["model.safetensors"]
    llm = LLM(teacher, student=str(tmp_path / "student"), kv_bytes=16 << 20, threads=1)
    assert llm.engine.models["student"].config == before
    assert len(llm.generate([TEXT[:200]], method=OverFill(), max_tokens=8, ignore_eos=True)[0].tokens) == 8


def test_a_seed_makes_one_student(tiny_directory: Directory, tmp_path: Path) -> None:
    made: list[bytes] = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        teacher = pruned("llama", tiny_directory, tmp_path / name)
        distilling.distill(teacher, tmp_path / name, distilling.windows_of(teacher, TEXT), 2, seed=seed)
        made.append((tmp_path / name / "model.safetensors").read_bytes())
    assert made[0] == made[1] != made[2]


def test_nothing_taken_away_leaves_nothing_to_learn(tiny_directory: Directory, tmp_path: Path) -> None:
    """Except for bfloat16 rounding, and for AdamW's steps, whose size does not depend on that of gradients."""
    teacher = pruned("llama", tiny_directory, tmp_path / "student", share=0)
    made = distilling.distill(teacher, tmp_path / "student", distilling.windows_of(teacher, TEXT), 20)
    assert made.before < 1e-3
    assert made.after < 1e-2


def test_what_cannot_be_is_said(tiny_directory: Directory, tmp_path: Path) -> None:
    teacher = open_checkpoint(str(tiny_directory("llama")))
    with pytest.raises(InvalidRequest, match="at least 96 tokens of text, not "):
        distilling.windows_of(teacher, TEXT, 95)
    windows = distilling.windows_of(teacher, TEXT)
    for steps, rate in ((0, 1e-3), (5, 0.0), (5, 2.0)):
        with pytest.raises(InvalidRequest, match=f"between 0 and 1, not {steps} at {rate}"):
            distilling.distill(teacher, tmp_path, windows, steps, learning_rate=rate)
