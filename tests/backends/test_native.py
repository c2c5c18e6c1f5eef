"""The native backend: GGUF's bits are kept, products are correct, and a row's bits do not depend on other rows."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.test_against_transformers import all_logits
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import backend as native
from twostroke.backends.native import library
from twostroke.backends.native import weights as packed
from twostroke.backends.native.model import NativeModel
from twostroke.engine.scheduler import SchedulerConfig
from twostroke.errors import CheckpointError, InvalidRequest
from twostroke.models.formats.blocks import FORMATS
from twostroke.models.formats.tensor import RawTensor
from twostroke.sampling.draw import NO_NOISE, Noise, gumbel
from twostroke.sampling.statistics import MIN_LOGIT, draw, likeliest, log_softmax, summarize, weigh

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")


def raw_tensor(name: str, rows: int, cols: int, seed: int = 0, size: float = 0.01) -> RawTensor:
    """A random tensor. Any bytes are valid blocks, except for float16 scales, which are set to a finite size."""
    generator, kind = np.random.default_rng(seed), FORMATS[name]
    if name == "BF16":
        values = (generator.standard_normal((rows, cols)) * size).astype(ml_dtypes.bfloat16)
        return RawTensor("w", name, (rows, cols), values.view(np.uint8), "test")
    blocks = generator.integers(0, 256, (rows * cols // kind.block_size, kind.block_bytes), dtype=np.uint8)
    if name == "MXFP4":  # an exponent instead
        blocks[:, 0] = generator.integers(-1, 1, len(blocks)) + 127 + round(np.log2(size or 1))
        blocks[:, 1:] *= size > 0
        return RawTensor("w", name, (rows, cols), blocks.reshape(rows, -1), "test")
    halves = (generator.standard_normal((len(blocks), 2)) * size).astype(np.float16).view(np.uint8)
    if name == "Q6_K":
        blocks[:, 208:210] = halves[:, :2]
    else:
        width = 4 if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
        blocks[:, :width] = halves[:, :width]
    return RawTensor("w", name, (rows, cols), blocks.reshape(rows, -1), "test")


def odd_columns(name: str) -> int:
    """Columns with an odd number of groups, if blocks have one group: some kernels take two at a time."""
    return 544 if FORMATS[name].block_size <= 32 else 512


@pytest.mark.parametrize("name", packed.FORMATS)
def test_no_bit_of_a_weight_is_lost(name: str, kernels: native.NativeBackend) -> None:
    raw = raw_tensor(name, 48, 768)
    matrix = packed.PackedMatrix(kernels.team, raw)
    expected = gguf.dequantize(raw.data, gguf.GGMLQuantizationType[name])
    table = packed.EmbeddingTable(kernels.team, raw)
    for rows in (matrix, table):
        assert (np.stack([rows.row(i) for i in range(48)]) == expected).all()
    assert matrix.nbytes <= 1.03 * raw.nbytes


NIBBLES = {"Q4_1": 4, "Q5_1": 8, "Q4_K": 16, "Q5_K": 48}  # offset in a block, for formats with minima
FIFTH_BITS = {"Q5_1": 4, "Q5_K": 16}  # offset in a block


def rounds_minima(name: str, variant: str) -> bool:
    """Whether minima, relative to the middle quant, and their factors are rounded to bfloat16."""
    return variant == "avx512bf16" and name in NIBBLES


def minima(raw: RawTensor) -> np.ndarray:
    """The minimum of each group relative to the middle quant: [rows, groups]."""
    blocks = raw.data.reshape(-1, FORMATS[raw.format].block_bytes).copy()
    fifth, nibbles = FIFTH_BITS.get(raw.format), NIBBLES[raw.format]
    blocks[:, nibbles:] = 0x88 if fifth is None else 0
    blocks[:, fifth or nibbles : nibbles] = 0xFF
    return replace(raw, data=blocks.reshape(raw.data.shape)).dequantize().astype(np.float64)[:, ::32]


def rounded(x: np.ndarray, weights: str, variant: str) -> np.ndarray:
    """Activations as kernels round them: bfloat16 with AMX and for bfloat16 weights, else int8 per group of 32."""
    if weights == "BF16" or variant == "amx":
        return to_bfloat16(x)
    groups = x.reshape(len(x), -1, 32)
    step = np.abs(groups).max(-1, keepdims=True) / 127
    if variant == "avx512bf16":  # a mantissa of four bits
        mantissa, exponent = np.frexp(step)
        step = np.ldexp(np.ceil(mantissa * 32) / 32, exponent)
    with np.errstate(invalid="ignore"):  # a step of 0
        return (np.nan_to_num((groups / step).round()) * step).reshape(x.shape).astype(np.float64)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


def products(x: np.ndarray, raw: RawTensor, variant: str) -> np.ndarray:
    """The products of the kernels, without float32 rounding."""
    seen = rounded(x, raw.format, variant)
    made = seen @ raw.dequantize().astype(np.float64).T
    if rounds_minima(raw.format, variant):
        sums, lowest = seen.reshape(len(x), -1, 32).sum(-1), minima(raw)
        made += to_bfloat16(sums) @ to_bfloat16(lowest).T - sums @ lowest.T
    return made


@pytest.mark.thinned(2)
@pytest.mark.parametrize("size", [0, 1e-6, 0.01, 50])
@pytest.mark.parametrize("name", packed.FORMATS)
def test_products(name: str, size: float, kernels: native.NativeBackend) -> None:
    cols = odd_columns(name)
    raw = raw_tensor(name, 64, cols, size=size)
    x = torch.randn(21, cols, generator=torch.Generator().manual_seed(0)).numpy()  # as when the bounds were found
    x[3] = 0
    x[4, 32:64] = 0
    mine = packed.PackedMatrix(kernels.team, raw).multiply(x)
    expected = products(x, raw, kernels.variant)
    # A value between two steps may be rounded either way, so bits may differ. AMX rounds weights, and for these two
    # formats also a minimum that is not stored.
    tolerance = 2e-3 if kernels.variant == "amx" and name != "BF16" else 2e-4
    if kernels.variant == "amx" and name in ("Q5_0", "Q6_K"):
        tolerance = 2.3e-3
    assert np.linalg.norm(mine - expected) <= tolerance * np.linalg.norm(expected)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("fill", [0x00, 0x7F, 0xFF])
@pytest.mark.parametrize("name", [name for name in packed.FORMATS if name != "BF16"])
def test_the_largest_products_fit(name: str, fill: int, kernels: native.NativeBackend) -> None:
    """Extreme quants times extreme activations: sums in few bits must not overflow."""
    if kernels.variant == "amx":
        pytest.skip("adds up float32")
    raw = raw_tensor(name, 64, 512)
    blocks = raw.data.reshape(-1, FORMATS[name].block_bytes)
    starts = {"MXFP4": 1, "Q4_1": 4, "Q5_1": 4, "Q4_K": 16, "Q5_K": 16, "Q6_K": 0}
    blocks[:, starts.get(name, 2) : 192 if name == "Q6_K" else None] = fill
    x = np.ones((9, 512), np.float32)
    x[1::2] = -1
    mine = packed.PackedMatrix(kernels.team, raw).multiply(x)
    expected = products(x, raw, kernels.variant)
    assert np.linalg.norm(mine - expected) <= 1e-5 * np.linalg.norm(expected) + 1e-9


@pytest.mark.parametrize("name", packed.FORMATS)
def test_a_row_is_the_same_in_any_company(name: str, kernels: native.NativeBackend) -> None:
    cols = odd_columns(name)
    matrix = packed.PackedMatrix(
        kernels.team, raw_tensor(name, 80, cols)
    )  # five panels: some kernels take two at a time
    x = np.random.default_rng(1).standard_normal((235, cols), np.float32)
    together = matrix.multiply(x)
    for start, stop in [(0, 1), (5, 6), (2, 5), (0, 15), (7, 23), (3, 36), (0, 49), (20, 68), (9, 130), (98, 235)]:
        assert (matrix.multiply(x[start:stop]) == together[start:stop]).all()


@pytest.mark.skipif(len(library.variants()) < 2, reason="no second variant here to compare with")
def test_variants_agree() -> None:
    """They differ visibly only in what they round to bfloat16."""

    def logits(variant: str) -> np.ndarray:
        llm = LLM("smollm2-135m", backend=f"native-{variant}", kv_bytes=1 << 28, prefix_index="off")
        return all_logits(llm, list(range(500, 640)))

    first, *others = (log_softmax(logits(variant)) for variant in library.variants())
    for other in others:
        assert (np.exp(first) * (first - other)).sum(-1).mean() < 0.02


@pytest.mark.parametrize("name", ["smollm2-135m"])
def test_close_to_the_reference(name: str) -> None:
    """The loss of int8 activations is a few hundredths of a nat where the reference is confident."""
    mine, theirs = (LLM(name, backend=b, kv_bytes=1 << 28, prefix_index="off") for b in ("native", "reference"))
    ids = mine.tokenizer.encode("The quick brown fox jumps over the lazy dog, and the cat looks on. " * 12)
    p, q = (log_softmax(all_logits(llm, ids)) for llm in (theirs, mine))
    divergence = (np.exp(p) * (p - q)).sum(-1)
    assert divergence.mean() < 0.02
    assert (p.argmax(-1) == q.argmax(-1)).mean() > 0.95


@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 160])
@pytest.mark.parametrize("variant", library.VARIANTS)
def test_head_sizes(head_dim: int, variant: str, tmp_path: Path) -> None:
    if variant not in library.variants():
        pytest.skip(f"the {variant} kernels cannot run here")
    path = str(write_model("llama", tmp_path, head_dim=head_dim, num_attention_heads=2))
    ids = [3 + i * 7 % 90 for i in range(150)]  # more keys than one split has
    mine, theirs = (
        all_logits(LLM(path, backend=b, weights="bf16", prefix_index="off", kv_bytes=16 << 20, page_size=16), ids)
        for b in (f"native-{variant}", "reference")
    )
    assert np.linalg.norm(mine - theirs) < 0.04 * np.linalg.norm(theirs)


@pytest.mark.parametrize("family", ["llama", "qwen2"])  # a tied embedding, and an untied one
@pytest.mark.parametrize("variant", library.VARIANTS)
def test_a_vocabulary_of_any_size(family: str, variant: str, tmp_path: Path) -> None:
    if variant not in library.variants():
        pytest.skip(f"the {variant} kernels cannot run here")
    path, ids = str(write_model(family, tmp_path, vocab_size=389, head_dim=32)), [5, 388, *range(300, 389), 7]
    mine, theirs = (
        LLM(path, backend=b, weights="bf16", prefix_index="off", kv_bytes=16 << 20, page_size=16)
        for b in (f"native-{variant}", "reference")
    )
    found, expected = all_logits(mine, ids), all_logits(theirs, ids)
    assert found.shape == expected.shape == (len(ids), 389)
    assert np.linalg.norm(found - expected) < 0.04 * np.linalg.norm(expected)
    (done,) = mine.generate([ids], max_tokens=40, temperature=3.0, seed=1, ignore_eos=True)
    (listed,) = mine.generate([ids], max_tokens=40, temperature=3.0, seed=1, ignore_eos=True, logprobs=389)
    assert [token.id for token in done.tokens] == [token.id for token in listed.tokens]
    assert max(len(token.top_logprobs or ()) for token in listed.tokens) == 389


def test_logits_do_not_depend_on_chunks_or_threads() -> None:
    ids = list(range(1000, 1180))  # more keys than one split
    whole = LLM("smollm2-135m", backend="native", threads=2, kv_bytes=1 << 28, prefix_index="off")
    expected = all_logits(whole, ids)
    for threads, chunk in [(1, 512), (2, 33), (3, 150)]:
        llm = LLM("smollm2-135m", backend="native", threads=threads, kv_bytes=1 << 28, prefix_index="off")
        llm.engine.config = SchedulerConfig(max_step_tokens=chunk)
        assert (all_logits(llm, ids) == expected).all()


@pytest.mark.parametrize("variant", library.VARIANTS)
def test_an_embedding_that_stays_in_its_file(variant: str, tmp_path: Path) -> None:
    if variant not in library.variants():
        pytest.skip(f"the {variant} kernels cannot run here")
    wide = write_model("qwen2", tmp_path / "wide", hidden_size=128)
    narrow = tmp_path / "narrow"
    shutil.copytree(wide, narrow)
    weights = narrow / "model.safetensors"
    values = load_file(weights).items()
    save_file({name: value.bfloat16() if value.dim() == 2 else value for name, value in values}, weights)

    def opened(path: Path, weights: str) -> LLM:
        return LLM(str(path), backend=f"native-{variant}", weights=weights, prefix_index="off", kv_bytes=16 << 20)

    ids = [3 + i * 7 % 90 for i in range(150)]
    in_memory, in_file = opened(wide, "bf16"), opened(narrow, "stored")
    expected = all_logits(in_memory, ids)
    assert (all_logits(in_file, ids) == expected).all()
    shutil.copytree(narrow, tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").replace(weights)  # another file of the same name
    assert (all_logits(in_file, ids) == expected).all()
    changed = opened(narrow, "stored")
    with weights.open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(CheckpointError, match=r"embed.*was changed while the model was in use: open it again"):
        all_logits(changed, ids)


def test_what_it_cannot_run_is_said() -> None:
    with pytest.raises(InvalidRequest, match="pages of 16 entries, not 8"):
        LLM("smollm2-135m", backend="native", page_size=8)
    with pytest.raises(InvalidRequest, match="float32 on a CPU, not in bfloat16"):
        LLM("smollm2-135m", backend="native", dtype="bfloat16")


@pytest.mark.parametrize("width", [16, 100, 4096, 10_001])
def test_summaries(kernels: native.NativeBackend, width: int) -> None:
    """The reference's figures for any width; the same bits alone, and in every variant and thread count."""
    logits = np.random.default_rng(width).standard_normal((5, width), np.float32) * 8
    logits[1, 3] = logits[1, -1] = 99.0  # several largest: the first wins
    logits[2] = -3.0
    logits[4, width // 2] = math.nan
    got, wanted = kernels.statistics.summarize(logits), summarize(logits)
    assert (got.best[:4], got.top[:4]) == (wanted.best[:4], wanted.top[:4])
    np.testing.assert_allclose(got.logsumexp[:4], wanted.logsumexp[:4], rtol=1e-6, atol=2e-6, equal_nan=False)
    np.testing.assert_allclose(got.entropy[:4], wanted.entropy[:4], rtol=1e-5, atol=1e-5, equal_nan=False)
    assert math.isnan(got.top[4])
    assert math.isnan(got.logsumexp[4])
    assert 0 <= got.best[4] < width
    one = native.NativeBackend(1).statistics
    for i in range(4):
        alone = one.summarize(logits[i : i + 1])
        assert (alone.logsumexp[0], alone.entropy[0]) == (got.logsumexp[i], got.entropy[i])


@pytest.mark.parametrize("width", [16, 100, 4096, 10_001])
def test_weights(kernels: native.NativeBackend, width: int) -> None:
    logits = np.random.default_rng(width).standard_normal((6, width), np.float32) * 8
    logits[1, ::3] = -math.inf
    logits[2] = -3.0
    tops, gains = logits.max(-1).tolist(), [1.0, 3.0, 0.4, 0.0, 1e30, 0.01]
    found = kernels.statistics.weigh(logits, tops, gains)
    assert found == pytest.approx(weigh(logits, tops, gains), rel=1e-5)
    assert found[3] == 0
    assert found[4] == (logits[4] == tops[4]).sum()
    for i in range(6):
        assert kernels.statistics.weigh(logits[i : i + 1], tops[i : i + 1], gains[i : i + 1]) == [found[i]]


@pytest.mark.parametrize("width", [16, 100, 4096, 10_001])
def test_draws(kernels: native.NativeBackend, width: int) -> None:
    """Samples equal the reference's, except in near ties; they depend only on the row; of equal ids the lowest wins."""
    logits = np.random.default_rng(width).standard_normal((400, width), np.float32) * 2
    logits[:50, ::3] = -math.inf
    logits[50:60] = -math.inf
    logits[np.arange(50, 60), width - 1 - np.arange(10)] = -40.0  # the only ids left, with very low logits
    noises = [Noise.of((0.0, 0.3, 1.0, 5.0)[i % 4], b"seed", i) for i in range(400)]
    found = kernels.statistics.draw(logits, noises)
    ids = np.arange(width)
    for row, noise, id in zip(logits, noises, found, strict=True):
        scores = row * np.float64(noise.gain) + (0 if noise.key is None else gumbel(noise.key, ids))
        assert scores[id] >= scores.max() - 1e-4 * noise.gain
    assert np.mean(np.array(found) == np.array(draw(logits, noises))) > 0.98
    assert found[50:60] == [width - 1 - i for i in range(10)]
    for i in range(0, 400, 37):
        assert kernels.statistics.draw(logits[i : i + 1], noises[i : i + 1]) == [found[i]]
    assert kernels.statistics.draw(np.zeros((1, width), np.float32), [NO_NOISE]) == [0]
    # The largest and the smallest possible noise: that of id 0 with these keys.
    for others, key, wins in ((8.0, 0, True), (30.0, 0, False), (-30.0, 0xD629356C00000000, True)):
        row = np.full((1, width), others, np.float32)
        row[0, 0] = 0
        assert (kernels.statistics.draw(row, [Noise(1.0, key)]) == [0]) is wins
    assert kernels.statistics.draw(np.full((1, width), math.nan, np.float32), noises[1:2])[0] in range(width)


@pytest.mark.parametrize("width", [1, 15, 100, 2049, 49152, 151936])
def test_the_likeliest(width: int, kernels: native.NativeBackend) -> None:
    """The exact ids: with ties, with few finite ones, with all equal, and above a floor."""
    counts = [0, 1, 2, 20, 50, 512, 4096, width]
    logits = np.random.default_rng(width).standard_normal((4 * len(counts), width), np.float32) * 3
    logits[1::4] = logits[1::4].round()
    logits[2::4, width // 3 :] = -math.inf
    logits[3::4] = 2.5
    counts = [min(width, count) for count in np.repeat(counts, 4).tolist()]
    for floors in ([MIN_LOGIT] * len(counts), np.resize([1.0, -2.0, 3.0], len(counts)).tolist()):
        expected = [
            np.flatnonzero((row >= np.sort(row)[-count]) & (row >= floor)) if count else []
            for row, count, floor in zip(logits, counts, floors, strict=True)
        ]
        for found in (kernels.statistics.likeliest(logits, counts, floors), likeliest(logits, counts, floors)):
            assert all(np.array_equal(some, others) for some, others in zip(found, expected, strict=True))


@pytest.mark.parametrize("variant", library.variants())
def test_summaries_that_a_head_makes(variant: str) -> None:
    """They equal those of its logits bitwise, for any number of rows."""
    model = LLM("smollm2-135m", backend=f"native-{variant}", kv_bytes=1 << 26, prefix_index="off").model.compiled
    assert isinstance(model, NativeModel)
    for count in (1, 7, 70):
        hidden = np.random.default_rng(count).standard_normal((count, 576), np.float32)
        logits, made = model.logits(hidden)
        assert made == model.statistics.summarize(logits)
        some = list(range(count // 3, count))
        assert made.of(some) == model.statistics.summarize(logits[some])


def test_a_variant_by_name() -> None:
    options: dict[str, Any] = {"kv_bytes": 1 << 26, "prefix_index": "off"}
    for variant in library.variants():
        assert LLM("smollm2-135m", backend=f"native-{variant}", **options).backend.label == f"native-{variant}"


def test_a_variant_that_the_processor_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "variants", lambda: ("avx2",))
    # By its name alone; the list of features would say nothing. The last one by a compiler without AMX.
    has_none = "(the processor has no|the operating system does not let this process use) AMX; it can run native-avx2$"
    reasons = f"{has_none}|it was not compiled"
    with pytest.raises(InvalidRequest, match=f"native-amx backend cannot run this: ({reasons})"):
        LLM("smollm2-135m", backend="native-amx", kv_bytes=1 << 26)
