"""More threads than cores: members often lose their core, their pieces are computed again, and they are late.

There are few pages, so that pages of one answer are soon reused by the next: a late write would change another answer.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

PROMPTS = [[3 + (i * 7 + n) % 90 for i in range(n)] for n in (1, 30, 140)]  # the last has more keys than one split
SAMPLING = SamplingParams(max_tokens=40, temperature=0.8, seed=5, ignore_eos=True)


@pytest.mark.thinned
@pytest.mark.parametrize("variant", library.variants())
# Biases; norms of heads and after layers, windows; norms over all heads; biases of MLPs; a shared expert;
# norms of experts; sink logits and biases of experts.
@pytest.mark.parametrize("family", ["qwen2", "gemma3", "olmo2", "granite", "qwen2moe", "gemma4-moe", "gpt_oss"])
def test_late_members_change_nothing(family: str, variant: str, tmp_path: Path) -> None:
    path = str(write_model(family, tmp_path, head_dim=32))
    options: dict[str, Any] = {
        "backend": f"native-{variant}",
        "weights": "int8",
        "prefix_index": "off",
        "page_size": 16,
    }
    alone = LLM(path, threads=1, kv_bytes=16 << 20, **options)
    expected = [done.tokens for done in alone.generate(PROMPTS, params=SAMPLING)]
    for _ in range(2):  # also tests closing a model while members are late
        crowded = LLM(path, threads=5, kv_bytes=16 * alone.pool.block_bytes, **options)
        for _ in range(5):
            assert [done.tokens for done in crowded.generate(PROMPTS, params=SAMPLING)] == expected
            assert [crowded.generate([one], params=SAMPLING)[0].tokens for one in PROMPTS] == expected


# The team is one file, which all variants compile.
@pytest.mark.parametrize(
    "variant",
    [pytest.param(one, marks=pytest.mark.nightly if i else []) for i, one in enumerate(library.variants())],
)
def test_uneven_shares_change_nothing(variant: str) -> None:
    """Members' shares of a prompt's rows depend on their earlier speeds, which always differ for five on two cores."""
    options: dict[str, Any] = {"backend": f"native-{variant}", "prefix_index": "off", "kv_bytes": 32 << 20}
    alone, crowded = (LLM("smollm2-135m", threads=threads, **options) for threads in (1, 5))
    prompt = [1000 + 13 * i for i in range(400)]

    def answer(model: LLM) -> list[tuple[int, float | None]]:
        (done,) = model.generate([prompt], max_tokens=4, logprobs=1, ignore_eos=True)
        return [(token.id, token.logprob) for token in done.tokens]

    expected = answer(alone)
    for _ in range(5):
        assert answer(crowded) == expected


def test_calls_from_several_threads_take_turns() -> None:
    """Reading a tail's logits while a step runs changes neither result."""
    llm = LLM("smollm2-135m", backend="native", kv_bytes=64 << 20, prefix_index="off", threads=2)
    kv = llm.prefill(list(range(100, 140)))
    assert kv.tail is not None
    alone = kv.tail.logits
    expected = [token.id for token in llm.generate([list(range(200, 260))], max_tokens=12, ignore_eos=True)[0].tokens]
    assert alone is not None
    with ThreadPoolExecutor(3) as pool:
        tail = kv.tail
        readings = [pool.submit(lambda: [tail.logits for _ in range(20)]) for _ in range(3)]
        found = [
            [token.id for token in llm.generate([list(range(200, 260))], max_tokens=12, ignore_eos=True)[0].tokens]
            for _ in range(3)
        ]
    assert found == [expected] * 3
    assert all(
        logits is not None and np.array_equal(logits, alone) for reading in readings for logits in reading.result()
    )
