"""K and V of 8 and 4 bits: fewer bytes, the same promises. No schedule, cut, fork, file, tier or rank changes a bit."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.any_schedule import ENDS, INDEXES, PROMPT, AnySchedule, Asked, asked_lists
from tests.engine.test_windows import write as write_windowed
from tests.engine.tiered import make_eager
from tests.thinning import examples
from tests.tiny import write_model
from twostroke.api.completion import Completion
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.errors import GeometryMismatch, InvalidRequest, KVError
from twostroke.kv.cache import KVCache
from twostroke.models.kv_formats import Codes, kv_format, rotated

needs_native = pytest.mark.skipif(library.unavailable() is not None, reason="no native backend")
KINDS: dict[str, Callable[[Path], Path]] = {
    "plain": lambda directory: write_model("qwen2", directory, head_dim=64),
    "windowed": write_windowed,
    "recurrent": lambda directory: write_model("qwen3_5", directory),
}
CODED = ["int8", "k8v4"]
ANY = {(kind, dtype): AnySchedule(write, dtype) for kind, write in KINDS.items() for dtype in CODED}
ASKED: dict[str, Any] = {"max_tokens": 6, "ignore_eos": True, "logprobs": 2}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(KINDS["plain"](tmp_path_factory.mktemp("plain")))


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix."""
    return np.array([[1]]) if size == 1 else np.kron([[1, 1], [1, -1]], hadamard(size // 2))


@pytest.mark.parametrize(("bits", "width"), [(8, 68), (4, 36)])
def test_codes_and_scales(bits: int, width: int) -> None:
    codes = Codes(bits)
    numbers = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    numbers[0, 0], numbers[1, 1, 7], numbers[2, 2] = 0, 1000, np.nan
    stored = codes.encode(numbers)
    assert (stored.dtype, stored.shape) == (np.uint8, (3, 5, width))
    found = codes.decode(stored)
    assert np.isnan(found[2, 2]).all()
    numbers[2, 2] = found[2, 2] = 0
    assert (found[0, 0] == 0).all()
    turned, back = rotated(numbers), rotated(found)
    top = np.abs(turned).max(-1, keepdims=True)
    assert (np.abs(back - turned) <= top / codes.max_code * 0.502).all()
    assert np.array_equal(codes.encode(numbers[1:2, 1:2]), codes.encode(numbers)[1:2, 1:2])  # whatever is beside it


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
def test_a_rotation_is_a_product_with_a_hadamard_matrix(dim: int) -> None:
    numbers = np.random.default_rng(0).integers(-99, 99, (3, dim)).astype(np.float32)  # so that sums are exact
    block = dim & -dim
    matrix = np.kron(np.eye(dim // block), hadamard(block))
    assert np.array_equal(rotated(numbers), numbers @ matrix)
    assert np.array_equal(rotated(rotated(numbers)), numbers * block)


def test_a_large_column_costs_the_others_little() -> None:
    numbers = np.random.default_rng(0).standard_normal((100, 64)).astype(np.float32)
    numbers[:, 7] = 100
    codes = Codes(8)
    error = np.abs(codes.decode(codes.encode(numbers)) - numbers)[:, np.arange(64) != 7]
    assert np.sqrt(np.square(error).mean()) < 0.25 * (100 / 127) / np.sqrt(12)  # what one scale costs without rotation


@needs_native
@pytest.mark.thinned
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(5), deadline=None)
@given(
    asked=asked_lists([1, 24, 63, 64, 90, 150]),
    chunk=st.sampled_from([1, 7, 16, 64, 512]),
    place=st.sampled_from([("off", 110, 2), ("radix", 110, 2), ("radix", 1000, 1), ("radix", 110, 1)]),
)
def test_any_schedule(kind: str, dtype: str, asked: list[Asked], chunk: int, place: tuple[str, int, int]) -> None:
    ANY[kind, dtype].check(asked, chunk, place)


@needs_native
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("kind", ["plain", "recurrent"])
@settings(max_examples=examples(5), deadline=None)
@given(ends=ENDS, more=st.integers(0, 60), index=INDEXES)
def test_cuts_and_forks_have_the_bits_of_a_fresh_prefill(
    kind: str, dtype: str, ends: list[int], more: int, index: str
) -> None:
    ANY[kind, dtype].check_cuts(
        ends, more, index, lambda kv, other: kv.entries().tobytes() == other.entries().tobytes()
    )


@pytest.mark.parametrize(("dtype", "value_bytes", "most"), [("int8", 64 + 4, 0.05), ("k8v4", 32 + 4, 0.3)])
@pytest.mark.parametrize("backend", [pytest.param("native", marks=needs_native), "reference"])
def test_what_is_stored_of_a_layer(plain: str, backend: str, dtype: str, value_bytes: int, most: float) -> None:
    """The first layer's entries depend on no attention: they are those in 16 bits, as `KVFormat.encode` has them."""
    options: dict[str, Any] = {"backend": backend, "weights": "int8", "kv_bytes": 8 << 20}
    with LLM(plain, **options) as wide, LLM(plain, kv_dtype=dtype, **options) as llm:
        kv, whole = llm.prefill(PROMPT), wide.prefill(PROMPT)
        halves = whole.entries(0).astype(ml_dtypes.bfloat16)
        stored = kv_format(dtype)
        assert np.array_equal(kv.entries(0), stored.decode(stored.encode(halves)))
        assert np.array_equal(kv.keys(0), kv.entries(0)[0])
        for layer in range(1, llm.config.num_layers):
            exact = whole.entries(layer).astype(np.float32)
            assert np.linalg.norm(kv.entries(layer) - exact) < most * np.linalg.norm(exact)
        heads = llm.config.num_layers * llm.config.num_kv_heads
        assert kv.nbytes == len(PROMPT) * heads * (64 + 4 + value_bytes)
        assert llm.model.id != wide.model.id
        with pytest.raises(GeometryMismatch, match="kv_dtype"):
            whole.copy_to(llm.pool)


@needs_native
@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("count", [1, 15, 17, 200, 700])
def test_the_kernels_compute_what_the_reference_does(plain: str, count: int, dtype: str) -> None:
    """Behind the same entries: those that each computes differ where a rounded number meets another code."""
    options: dict[str, Any] = {"kv_dtype": dtype, "weights": "bf16", "kv_bytes": 8 << 20}
    with LLM(plain, backend="native", **options) as llm, LLM(plain, backend="reference", **options) as reference:
        kv = llm.prefill((3 * PROMPT)[:count])
        mine, theirs = llm.prefill([5], kv).tail, reference.prefill([5], kv.copy_to(reference.pool)).tail
        assert mine is not None
        assert theirs is not None
        assert mine.logits is not None
        assert theirs.logits is not None
        most = 0.02 if dtype == "int8" or count > 1 else 0.1  # the last entry is half of all
        assert np.linalg.norm(mine.logits - theirs.logits) < most * np.linalg.norm(theirs.logits)


@needs_native
@pytest.mark.parametrize("dtype", CODED)
def test_a_value_goes_through_files_and_tiers(plain: str, dtype: str, tmp_path: Path) -> None:
    with LLM(plain, backend="native", kv_dtype=dtype, kv_bytes=8 << 20) as llm:
        kv = llm.prefill(PROMPT)
        expected = list(llm.decode(kv, **ASKED))
        kv.save(tmp_path / "value")
        host = kv.to("host")
        for value in (
            KVCache.load(tmp_path / "value", llm),
            host,
            host.to("pool"),
            kv[:30] + kv[30:],
            kv[:16] + kv[16:],
        ):
            assert (value.nbytes, value.entries().tobytes()) == (kv.nbytes, kv.entries().tobytes())
            assert list(llm.decode(value, **ASKED)) == expected


@needs_native
def test_a_prompt_comes_from_disk(plain: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"backend": "native", "kv_bytes": 8 << 20, "kv_disk": tmp_path}

    def answer(kv_dtype: str) -> Completion:
        with LLM(plain, kv_dtype=kv_dtype, **options) as llm:
            make_eager(llm)
            answer = llm.generate([PROMPT], **ASKED)[0]
            llm.tiers.flush()
            return answer

    cold, hit = answer("int8"), answer("int8")
    assert hit.cached_tokens > 100
    assert list(hit.tokens) == list(cold.tokens)
    assert answer("bfloat16").cached_tokens == 0  # another model, to the tier


@needs_native
@pytest.mark.parametrize("dtype", CODED)
def test_ranks(plain: str, dtype: str) -> None:
    with LLM(plain, backend="native", kv_dtype=dtype, threads=1, kv_bytes=8 << 20) as one:
        expected, kv = one.generate([PROMPT], **ASKED)[0], one.prefill(PROMPT)
        with LLM(plain, backend="native", kv_dtype=dtype, threads=1, kv_bytes=8 << 20, tp=2) as two:
            assert list(two.generate([PROMPT], **ASKED)[0].tokens) == list(expected.tokens)
            assert two.prefill(PROMPT).entries().tobytes() == kv.entries().tobytes()


def test_what_cannot_be_is_one_line(plain: str) -> None:
    with pytest.raises(InvalidRequest, match="kv_dtype must be one of auto, float32, bfloat16, int8, k8v4, not 'int5'"):
        LLM(plain, kv_dtype="int5")
    if library.unavailable() is None:
        with pytest.raises(InvalidRequest, match="it stores K and V in bfloat16 or int8 or k8v4, not in float32"):
            LLM(plain, backend="native", kv_dtype="float32")


@pytest.mark.parametrize("dtype", CODED)
@pytest.mark.parametrize("kind", ["plain", "windowed"])
def test_a_value_is_converted(kind: str, dtype: str, tmp_path: Path) -> None:
    path, stored = str(KINDS[kind](tmp_path)), kv_format(dtype)
    options: dict[str, Any] = {"backend": "reference", "kv_bytes": 8 << 20}
    with LLM(path, kv_dtype="float32", **options) as exact, LLM(path, kv_dtype=dtype, **options) as llm:
        kv = exact.prefill(PROMPT)
        free = llm.pool.num_free
        small = kv[3:].to_dtype(llm)
        layers = range(llm.config.num_layers)
        for layer in layers:
            expected = stored.decode(stored.encode(kv[3:].entries(layer)))
            assert np.array_equal(small.entries(layer), expected, equal_nan=True)
        assert small.nbytes < 0.4 * kv.nbytes
        assert (small.tokens, small.positions) == (kv.tokens[3:], kv.positions[3:])
        assert small.canonical_length(llm.model.id) == 0
        assert len(list(llm.decode(llm.prefill([5], small), **ASKED))) == 6
        back = small.to_dtype(exact)
        assert all(np.array_equal(back.entries(i), small.entries(i), equal_nan=True) for i in layers)
        assert kv.to_dtype(exact) is kv
        del small
        assert llm.pool.num_free == free
        assert len(KVCache.empty(exact.pool).to_dtype(llm)) == 0


def test_a_recurrent_value_is_not_converted(tmp_path: Path) -> None:
    path, options = str(KINDS["recurrent"](tmp_path)), dict[str, Any](backend="reference", kv_bytes=8 << 20)
    with LLM(path, kv_dtype="float32", **options) as exact, LLM(path, kv_dtype="int8", **options) as llm:
        kv = exact.prefill(PROMPT)
        with pytest.raises((GeometryMismatch, KVError), match="cannot be converted"):
            kv.to_dtype(llm)


@needs_native
def test_heads_too_large_for_sums_of_32_bits_are_refused(tmp_path: Path) -> None:
    path = str(write_model("qwen2", tmp_path, head_dim=544, num_attention_heads=2, num_key_value_heads=1))
    with pytest.raises(InvalidRequest, match="int8 for heads of at most 512 numbers, not 544"):
        LLM(path, backend="native", kv_dtype="int8", kv_bytes=8 << 20)
    with LLM(path, backend="native", kv_bytes=8 << 20) as llm:
        assert len(llm.generate([PROMPT[:20]], **ASKED)[0].tokens) == 6


@needs_native
@pytest.mark.parametrize("dtype", CODED)
def test_the_largest_heads(tmp_path: Path, dtype: str) -> None:
    """All numbers of a head as large as they may be: sums of 32 bits have room for them."""
    path = str(write_model("qwen2", tmp_path, head_dim=512, num_attention_heads=2, num_key_value_heads=1))
    options: dict[str, Any] = {"kv_dtype": dtype, "weights": "bf16", "kv_bytes": 8 << 20}
    with LLM(path, backend="native", **options) as llm, LLM(path, backend="reference", **options) as reference:
        kv = llm.prefill(PROMPT)
        mine, theirs = llm.prefill([5], kv).tail, reference.prefill([5], kv.copy_to(reference.pool)).tail
        assert mine is not None
        assert theirs is not None
        assert mine.logits is not None
        assert theirs.logits is not None
        assert np.linalg.norm(mine.logits - theirs.logits) < 0.02 * np.linalg.norm(theirs.logits)
