"""On processors with AMX: its instructions in software give the same bits as the processor."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.backends.test_native import odd_columns, raw_tensor
from tests.software import kernels
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import backend as native
from twostroke.backends.native import library
from twostroke.backends.native import weights as packed
from twostroke.sampling.params import SamplingParams

pytestmark = pytest.mark.skipif(
    "amx" not in library.variants() or library.VARIANTS["amx"] == kernels.NEEDED["amx"],
    reason="no AMX here to compare with",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernels.compile_into(tmp_path_factory.mktemp("software"), "amx")


@pytest.fixture
def go_soft(monkeypatch: pytest.MonkeyPatch, built: Path) -> Iterator[Callable[[], None]]:
    """A function after whose call kernels use the instructions in software."""

    def go() -> None:
        monkeypatch.setattr(library, "VARIANTS", library.VARIANTS.copy())
        monkeypatch.setattr(library, "PLACES", library.PLACES.copy())
        library.load.cache_clear()
        kernels.use(built, "amx")

    yield go
    library.load.cache_clear()


@pytest.mark.parametrize("rows", [5, 21, 70])
@pytest.mark.parametrize("name", packed.FORMATS)
def test_products(name: str, rows: int, go_soft: Callable[[], None]) -> None:
    raw = raw_tensor(name, 64, odd_columns(name))
    x = np.random.default_rng(2).standard_normal((rows, raw.shape[1]), np.float32)
    x[3, :64] *= 1e-30  # so small that AMX flushes them to 0
    expected = packed.PackedMatrix(native.NativeBackend(1, "amx").team, raw).multiply(x)
    go_soft()
    assert np.array_equal(packed.PackedMatrix(native.NativeBackend(1, "amx").team, raw).multiply(x), expected)


def test_answers(go_soft: Callable[[], None], tmp_path: Path) -> None:
    directory = str(write_model("gemma3", tmp_path, head_dim=64))
    prompts = [[3 + (i * 7 + n) % 90 for i in range(n)] for n in (1, 30, 140)]

    def answers() -> list[list[tuple[int, float | None]]]:
        llm = LLM(directory, backend="native-amx", weights="int8", threads=2, kv_bytes=16 << 20)
        done = llm.generate(prompts, params=SamplingParams(max_tokens=20, logprobs=1, ignore_eos=True))
        return [[(token.id, token.logprob) for token in one.tokens] for one in done]

    expected = answers()
    go_soft()
    assert answers() == expected
