"""The benchmark of K and V in fewer bits, on a tiny model and made-up articles."""

from pathlib import Path

import pytest

from benchmarks import distances, kv_bits
from twostroke.api.llm import LLM
from twostroke.backends.native import library


@pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
def test_rows(native_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distances, "articles", lambda: (f"{i} the quick brown fox" * 40 for i in range(9)))
    path = str(native_directory)
    llms = {name: LLM(path, kv_dtype=name, kv_bytes=8 << 20, prefix_index="off") for name in ("bfloat16", "int8")}
    (row,) = kv_bits.distances(llms, 150, 3)
    assert (row["kv_dtype"], row["texts"]) == ("int8", 3)
    assert 0 < row["kl"] < 0.01
    low, high = row["kl_interval"]
    assert low <= row["kl"] <= high
    rows = list(kv_bits.times(llms, 150, [1, 3], 1))
    assert [(row["kv_dtype"], row["sequences"]) for row in rows] == [
        ("bfloat16", 1),
        ("int8", 1),
        ("bfloat16", 3),
        ("int8", 3),
    ]
    wide, narrow, *_ = rows
    dim = llms["int8"].config.head_dim
    assert narrow["bytes"] * 2 * dim == wide["bytes"] * (dim + 4)
    assert all(row["prefill_s"] > 0 for row in rows)
    (itself,) = kv_bits.distances({"bfloat16": llms["bfloat16"], "int8": llms["bfloat16"]}, 150, 1)
    assert (itself["kl"], itself["top1"]) == (0, 1)
