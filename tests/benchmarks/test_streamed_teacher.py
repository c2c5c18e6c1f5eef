"""Teacher and student of the benchmark share KV, and one behind the other answers."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.streamed_teacher import STUDENT, TEACHER, answer, write_model
from twostroke.backends.native import library
from twostroke.models.checkpoints.resolve import open_checkpoint


@pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
def test_a_streamed_teacher_prefills_for_its_student(tmp_path: Path) -> None:
    small = {"layers": 2, "kv_heads": 2, "head_dim": 32, "vocab": 320}
    sizes = [
        write_model(replace(shape, hidden=hidden, heads=hidden // 32, mlp=64, **small), tmp_path / str(hidden))
        for shape, hidden in ((TEACHER, 128), (STUDENT, 64))
    ]
    assert [
        sum(one.nbytes for one in open_checkpoint(str(tmp_path / name)).stored.values()) for name in ("128", "64")
    ] == sizes
    facts = answer(tmp_path / "128", f"{tmp_path / '64'}@int8", 40, True, None, 1)
    assert facts["ttft_s"] > 0
    assert facts["peak_rss_bytes"] > 0
