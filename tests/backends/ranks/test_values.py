"""A value has one form, whatever the number of ranks: in files, in tiers, and in a pool that models share."""

import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.backends.ranks.scenario import PROMPT, bits
from tests.cluster.wire.pairs import Pair, local
from tests.engine.tiered import make_eager
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.kv.cache import KVCache
from twostroke.methods import method

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
Open = Callable[..., LLM]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 192}
    return write_model("llama", tmp_path_factory.mktemp("llama"), **sizes)


def opened(path: Path, tp: int, **options: Any) -> LLM:
    return LLM(str(path), backend="native", threads=1, kv_bytes=16 << 20, tp=tp, **options)


def test_saved_and_loaded(path: Path, tmp_path: Path) -> None:
    """Saved by two ranks, loaded by one process, by three and by four, and continued there; and the other way."""
    with opened(path, 1) as one, opened(path, 2) as two, opened(path, 3) as three, opened(path, 4) as four:
        made = two.prefill(PROMPT)
        assert bits(made) == bits(one.prefill(PROMPT))
        made.save(tmp_path / "two.kv")
        files = [(tmp_path / "two.kv").read_bytes()]
        expected = [token.id for token in two.decode(made, max_tokens=6, ignore_eos=True)]
        for llm in (one, three, four):
            there = KVCache.load(tmp_path / "two.kv", llm)
            assert bits(there) == bits(made)
            assert there.canonical_length(llm.model.id) == len(PROMPT)
            assert [token.id for token in llm.decode(there, max_tokens=6, ignore_eos=True)] == expected
            llm.prefill(PROMPT).save(tmp_path / "again.kv")
            files.append((tmp_path / "again.kv").read_bytes())
        assert len(files) == 4
        assert len(set(files)) == 1
        assert ((made[:20] + made[33:]).to("host").to("pool").entries() == (made[:20] + made[33:]).entries()).all()


def test_a_tier_of_several_degrees(path: Path, tmp_path: Path) -> None:
    """Prefixes that three ranks have left on disk are found by one process and by two."""
    options: dict[str, Any] = {"kv_disk": tmp_path / "kv", "kv_disk_bytes": 64 << 20}
    with opened(path, 3, **options) as llm:
        make_eager(llm)
        (expected,) = llm.generate([PROMPT], max_tokens=6, ignore_eos=True)
    for tp in (1, 2):
        with opened(path, tp, **options) as llm:
            make_eager(llm)
            (found,) = llm.generate([PROMPT], max_tokens=6, ignore_eos=True)
            assert [token.id for token in found.tokens] == [token.id for token in expected.tokens]
            assert llm.tiers.by_name["disk"].counters.read().hits == len(PROMPT) // 16


def test_over_the_wire(path: Path) -> None:
    """Two ranks prefill, three decode."""
    options: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "temperature": 0.9, "seed": 2, "logprobs": 1}
    with opened(path, 2) as two, opened(path, 3) as three, contextlib.closing(Pair(two, three)) as pair:
        assert pair.moved(PROMPT, **options) == local(two, PROMPT, **options)


def test_companions(path: Path) -> None:
    """A student shares the pool of its model's ranks; a draft guesses."""
    answers: list[list[int]] = []
    for tp in (1, 2):
        with opened(path, tp, student="int4", draft="int8") as llm:
            for technique in (method("overfill"), method("speculative")):
                (made,) = llm.generate([PROMPT], method=technique, max_tokens=8, ignore_eos=True)
                answers.append([token.id for token in made.tokens])
            value = llm.prefill(PROMPT, model="student")
            answers.append([token.id for token in llm.decode(value, max_tokens=5, ignore_eos=True)])
    half = len(answers) // 2
    assert answers[:half] == answers[half:]


PEAK = """
import sys
from twostroke.api.llm import LLM
from twostroke.system.machine import peak_rss_bytes
from pathlib import Path
before = peak_rss_bytes()
llm = LLM(sys.argv[1], backend="native", threads=1, tp=int(sys.argv[2]), kv_bytes=16 << 20, weights="int8")
print(sum(matrix.nbytes for matrix in llm.model.compiled.weights.matrices), llm.model.compiled.sketch_bytes)
for pid in () if llm.backend.ranks is None else llm.backend.ranks.followers.pids:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    print(int(status["RssAnon"].split()[0]) << 10)
"""


def test_each_rank_has_its_part_of_the_weights(tmp_path: Path) -> None:
    directory = write_model("llama", tmp_path, hidden_size=512, intermediate_size=1536, vocab_size=8192, head_dim=64)

    def measured(tp: int) -> list[int]:
        command = [sys.executable, "-c", PEAK, str(directory), str(tp)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return [int(word) for word in done.stdout.split()]

    whole, whole_sketch = measured(1)
    part, sketch, *_ = measured(2)
    assert whole / 2 * 0.9 < part < whole / 2 * 1.1
    assert whole_sketch / 2 * 0.9 < sketch < whole_sketch / 2 * 1.1
