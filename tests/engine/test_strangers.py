"""Valid values from outside that no program would make: a stroke answers, or raises a clear error."""

import hashlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.errors import TwostrokeError
from twostroke.kv.cache import KVCache

COUNT = 40
VOCAB = 384
POSITIONS = [0, 5, 2047, 2048, 100_000, 2**31 - 100]
TOKENS = [0, VOCAB - 1, VOCAB, 2**31 - 1]
BACKENDS: list[dict[str, Any]] = [{"backend": "reference"}, {"backend": "native", "weights": "bf16"}]


def changed(header: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A random other value over the same pages."""
    header = json.loads(json.dumps(header)) | {"stretches": [[COUNT, None, []]]}
    for field in rng.choices(["position", "token", "next", "pending", "spans"], k=rng.randint(1, 3)):
        if field == "position":
            rng.choice(header["spans"])[3] = rng.choice([*POSITIONS, rng.randrange(3000)])
        elif field == "token":
            header["tokens"][rng.randrange(COUNT)] = rng.choice(TOKENS)
        elif field == "next":
            header["next_position"] = rng.choice([*POSITIONS, 2**31 - 1])
        elif field == "pending":
            header["tail"]["pending"] = rng.choice(TOKENS)
        else:  # a page in parts
            parts = [(0, 0, 16), (1, 0, 8), (1, 8, 16), (2, 0, 8)]
            header["spans"] = [[*part, rng.randrange(100)] for part in rng.sample(parts, len(parts))]
    return header


@pytest.mark.parametrize("options", BACKENDS, ids=["reference", "native"])
def test_a_stroke_answers_or_says_why_not(
    tiny_llm: Callable[..., LLM], options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if options["backend"] == "native" and library.unavailable() is not None:
        pytest.skip("no native backend here")
    llm = tiny_llm("qwen3", prefix_index="off", **options)
    monkeypatch.setenv("TWOSTROKE_HOME", str(tmp_path))
    path, rng = tmp_path / "value", random.Random(0)
    llm.prefill(list(range(100, 100 + COUNT))).save(path)
    good = path.read_bytes()
    size = int.from_bytes(good[16:24], "little")
    answered, told = 0, set[str]()
    for _ in range(170):
        text = json.dumps(changed(json.loads(good[24 : 24 + size]), rng)).encode()
        head = len(text).to_bytes(8, "little") + text + hashlib.sha256(text).digest()
        path.write_bytes(good[:16] + head + good[24 + size + 32 :])
        for use in (decode, penalized, prefill):
            try:
                use(llm, KVCache.load(path, llm))
                answered += 1
            except TwostrokeError as error:
                told.add(str(error))
        assert llm.pool.num_used == 0
    assert answered > 60
    assert any(one.startswith(f"token ids must be from 0 to {VOCAB - 1}, not ") for one in told)


def decode(llm: LLM, kv: KVCache) -> None:
    assert 1 <= len(list(llm.decode(kv, max_tokens=3, ignore_eos=True))) <= 3  # fewer at the end of the context


def penalized(llm: LLM, kv: KVCache) -> None:
    tokens = list(llm.decode(kv.to("host"), max_tokens=3, ignore_eos=True, repetition_penalty=1.2, logprobs=1))
    assert 1 <= len(tokens) <= 3


def prefill(llm: LLM, kv: KVCache) -> None:
    assert len(llm.prefill([5, 6], after=kv)) >= COUNT + 2
