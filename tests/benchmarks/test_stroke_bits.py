"""The benchmark of weights by stroke, on a tiny model."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.stroke_bits import continued, main, rows
from twostroke.api.llm import LLM
from twostroke.backends.native import library


@pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
def test_the_first_weights_prefill_and_the_second_enter_the_rest(native_directory: Path) -> None:
    ids = list(range(2, 42))
    with LLM(str(native_directory), student="int2", kv_bytes=8 << 20, prefix_index="off") as llm:
        found = continued(llm, ids, 30, ("stored", "int2"))
        values = {"stored": llm.prefill(ids[:30]), "int2": llm.prefill(ids[:30], model="student")}
        for (first, second), logits in found.items():
            assert logits.shape == (9, llm.config.vocab_size)
            kv = llm.prefill(ids[30:-1], values[first], model="student" if second == "int2" else None)
            assert kv.tail is not None
            assert kv.tail.logits is not None
            assert (kv.tail.logits == logits[-1]).all()


def test_rows() -> None:
    weights = ("stored", "int3")
    kl = dict(zip(product(weights, weights), (0.0, 0.5, 0.2, 0.6), strict=True))
    made = rows({("bfloat16", a, b): np.array([[1 + one, one]] * 3) for (a, b), one in kl.items()}, weights)
    assert made[1] == {"kv": "bfloat16", "prefill": "stored", "decode": "int3", "kl": [0.5] * 3, "surprise": [0.5] * 3}
    assert made[-1]["decode_less_prefill"] == pytest.approx([0.3] * 3)


@pytest.mark.parametrize("words", ["--weights=stored", "--weights=bf16,int4,int3,int2", "--kv=int8", "--texts=0"])
def test_what_cannot_be_compared_is_refused(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["stroke_bits", "--model=nowhere", words])
    with pytest.raises(SystemExit):
        main()
    assert "two or three --weights, bfloat16 first in --kv" in capsys.readouterr().err
