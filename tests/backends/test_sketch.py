"""A search finds the same tokens as all logits do, with or without the head's sketch."""

import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.backends.test_native import raw_tensor, rounds_minima
from twostroke.api.llm import LLM
from twostroke.backends.native import backend as native
from twostroke.backends.native import library
from twostroke.backends.native import model as native_pass
from twostroke.backends.native import weights as packed
from twostroke.backends.native.statistics import packed_noises
from twostroke.models.formats.encode import ENCODERS, Encoder
from twostroke.models.formats.tensor import RawTensor
from twostroke.sampling.draw import NO_NOISE, Noise, gumbel
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.statistics import sound
from twostroke.system.scratch import address

pytestmark = pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")

COLUMNS = 256


def head_of(kernels: native.NativeBackend, raw: RawTensor) -> native_pass.NativeModel:
    """A model without layers, whose embedding is its head."""
    sizes = dict.fromkeys(("embedding_scale", "residual_scale", "logit_scale"), 1)
    config: Any = SimpleNamespace(
        **sizes,
        hidden_size=raw.shape[1],
        norm_eps=1e-6,
        tied=True,
        head_tensor="embed",
        attentions=(),
        attention_layers={},
        state_layers={},
        token_inputs=0,
        takes_hidden=False,
        layers=(),
        num_layers=0,
        score_cap=None,
        logit_cap=None,
    )
    ones = np.ones(raw.shape[1], np.float32).view(np.uint8).reshape(1, -1)
    weights = {"embed": raw, "norm": RawTensor("norm", "F32", raw.shape[1:], ones, "norm")}
    return kernels.compile(config, weights.__getitem__)


def noises_of(x: np.ndarray) -> list[Noise]:
    """Noise that differs between rows; every fifth row has none."""
    return [Noise.of((1.0, 0.2, 0.0, 3.0, 1e-3)[i % 5], b"seed", i) for i in range(len(x))]


def draw_by_sketch(head: native_pass.NativeModel, x: np.ndarray, noises: list[Noise]) -> tuple[list[int], np.ndarray]:
    """Search with the sketch, even if it is not faster. At most SKETCH_ROWS rows.

    [W, hidden] -> W ids (-1 if logits are not finite), and [W, vocab / PANEL] upper bounds of logits plus noise in each
    panel.
    """
    ids, highest = np.empty(len(x), np.int32), np.empty((len(x), head.head.padded // packed.PANEL), np.float32)
    places = address(x), len(x), packed_noises(noises), address(ids), address(highest)
    head.library.twostroke_search(head.handle, *places)
    return ids.tolist(), highest


def same_by_all_logits(head: native_pass.NativeModel, x: np.ndarray) -> bool:
    """Whether likeliest and sampled tokens equal those of all logits, also with the sketch forced."""

    def same(noises: list[Noise]) -> bool:
        logits, _ = head.logits(x)
        expected = head.statistics.draw(logits, noises)
        if head.sketch_bytes and len(x) <= native_pass.SKETCH_ROWS:
            finite: Any = np.isfinite(logits).all(-1).tolist()
            found, _ = draw_by_sketch(head, x, noises)
            if found != [id if known else -1 for id, known in zip(expected, finite, strict=True)]:
                return False
        return head.search(x, noises) == sound(logits, expected)

    return all(same(noises) for noises in ([NO_NOISE] * len(x), noises_of(x), noises_of(x)[::-1]))


def slack(head: native_pass.NativeModel, x: np.ndarray) -> np.ndarray:
    """[R, panels]: the sketch's upper bound of a panel minus its largest logit."""
    return draw_by_sketch(head, x, [NO_NOISE] * len(x))[1] - head.logits(x)[0].reshape(len(x), -1, packed.PANEL).max(-1)


def noisy_slack(head: native_pass.NativeModel, x: np.ndarray) -> np.ndarray:
    """The same with noise, relative to the magnitude of the values."""
    logits, noises = head.logits(x)[0].astype(np.float64), [noise for noise in noises_of(x) if noise.gain < 100]
    kept = [i for i, noise in enumerate(noises_of(x)) if noise.gain < 100]
    ids = np.arange(logits.shape[1])
    added = [np.zeros(len(ids)) if n.key is None else gumbel(n.key, ids) for n in noises]
    scores = np.stack([logits[i] * n.gain + a for i, n, a in zip(kept, noises, added, strict=True)])
    gap = draw_by_sketch(head, x[kept], noises)[1] - scores.reshape(len(kept), -1, packed.PANEL).max(-1)
    return gap / np.abs(scores).max(-1, keepdims=True)


def stored(values: np.ndarray, name: str) -> RawTensor:
    return Encoder(name)(RawTensor("w", "F32", values.shape, values.view(np.uint8), "test"))


def noise(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize("name", packed.FORMATS)
def test_any_weights(name: str, kernels: native.NativeBackend) -> None:
    """With any number of rows, also more than a sketch supports, and an incomplete last chunk."""
    head = head_of(kernels, raw_tensor(name, 2 * 1024 + 48, COLUMNS))
    few = name.startswith(("Q4", "MXFP4"))
    assert (head.sketch_bytes > 0) == (not few and not rounds_minima(name, kernels.variant))
    for count in [*range(1, native_pass.SKETCH_ROWS + 2), 70]:
        x = noise(count, COLUMNS, seed=count)
        assert same_by_all_logits(head, x)
        assert not head.sketch_bytes or count > native_pass.SKETCH_ROWS or noisy_slack(head, x).min() > -1e-6


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", packed.FORMATS)
@pytest.mark.parametrize("vocab", [1, 17, 1025, 2100])
def test_any_vocabulary(vocab: int, name: str, kernels: native.NativeBackend) -> None:
    """Padding of the last panel has products of 0, larger than all logits, but is not a token."""
    below_zero = name in ENCODERS
    raw = stored(-np.abs(noise(vocab, COLUMNS)), name) if below_zero else raw_tensor(name, vocab, COLUMNS)
    head = head_of(kernels, raw)
    for count in (1, 3, 8, 30):
        x = np.abs(noise(count, COLUMNS, seed=count))
        logits, _ = head.logits(x)
        assert logits.shape == (count, vocab)
        normed, weights = x * (x**2).mean(-1, keepdims=True) ** -0.5, raw.dequantize().T
        error = np.linalg.norm(logits - normed @ weights)  # relative to the norm, as a single sum may be near 0
        assert error < 0.002 * np.linalg.norm(normed @ np.abs(weights))
        assert not below_zero or logits.max() < 0
        made = head.statistics.summarize(logits)
        assert made == head.statistics.summarize(logits.copy())
        assert same_by_all_logits(head, x)


@pytest.mark.parametrize("name", ["Q8_0", "BF16"])
def test_bounds_that_rule_most_out(name: str, kernels: native.NativeBackend) -> None:
    head, x = head_of(kernels, stored(noise(2048, COLUMNS), name)), noise(4, COLUMNS, seed=1)
    assert 0 < slack(head, x).min() <= slack(head, x).max() < 0.2 * COLUMNS  # of |weights| |x|


@pytest.mark.parametrize("name", ["Q8_0", "BF16"])
def test_rows_that_are_nearly_alike(name: str, kernels: native.NativeBackend) -> None:
    """Logits so close that only exact products find the largest, with one candidate in each panel.

    With fewer columns, errors of the sketch come closer to their bound.
    """
    for seed in range(60):
        rows = noise(1, 64, seed=seed) + 0.05 * noise(2048, 64, seed=100 + seed)
        rows[np.arange(2048) % packed.PANEL != seed % packed.PANEL] *= -1
        x = np.concatenate([noise(1, 64, seed=seed), noise(5, 64, seed=200 + seed)])
        head = head_of(kernels, stored(rows, name))
        assert same_by_all_logits(head, x)
        assert slack(head, x).min() >= 0


def test_activations_are_rounded_too(kernels: native.NativeBackend) -> None:
    """Weights of equal magnitude and mean 0 are exact in the sketch, so its only error is that of x."""
    for seed in range(60):
        x = noise(1, 64, seed=seed)
        small = np.where(noise(128, 64, seed=100 + seed) > 0.5 * np.abs(x), -1.0, 1.0)
        rows = np.zeros((2048, 64), np.float32)
        rows[seed % 15 :: packed.PANEL] = np.sign(x) * np.where(np.abs(x) < 0.3, small, 1.0)
        rows[1 + seed % 15 :: packed.PANEL] = -rows[seed % 15 :: packed.PANEL]
        head = head_of(kernels, stored(rows, "BF16"))
        assert same_by_all_logits(head, x)
        assert slack(head, x).min() >= 0


def test_the_first_of_equals(kernels: native.NativeBackend) -> None:
    raw = raw_tensor("Q8_0", 2048, COLUMNS)
    x = noise(2, COLUMNS)
    nothing = [NO_NOISE] * 2
    best = head_of(kernels, raw).search(x, nothing)[0]
    for copies in ([17, 900, 2047], [1000, 1040]):  # within a chunk and across
        data = raw.data.copy()
        data[copies] = data[best]
        head = head_of(kernels, replace(raw, data=data))
        assert head.search(x, nothing)[0] == min(best, *copies) == head.statistics.draw(head.logits(x)[0], nothing)[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_rows_that_are_not_finite(bad: float, kernels: native.NativeBackend) -> None:
    head = head_of(kernels, raw_tensor("Q8_0", 2048, COLUMNS))
    x = noise(4, COLUMNS)
    x[2, 5] = bad
    assert same_by_all_logits(head, x)


def test_weights_that_are_not_finite_have_no_sketch(kernels: native.NativeBackend) -> None:
    raw = raw_tensor("BF16", 2048, COLUMNS)
    data = raw.data.copy()
    data.view(np.uint16)[1234, 7] = 0x7FC0
    head, x = head_of(kernels, replace(raw, data=data)), noise(2, COLUMNS)
    assert head.sketch_bytes == 0
    assert same_by_all_logits(head, x)


@given(
    st.integers(0, 2**32 - 1), st.floats(0, 30), st.floats(0, 3), st.floats(0, 60), st.sampled_from(["Q8_0", "BF16"])
)
@settings(deadline=None, max_examples=60)
def test_weights_of_any_kind(seed: int, common: float, spread: float, outlier: float, name: str) -> None:
    """Similar rows, columns of very different sizes, single large weights, rows of zeros."""
    generator = np.random.default_rng(seed)
    rows = generator.standard_normal((512, 96)) * np.exp(spread * generator.standard_normal(96))
    rows += common * generator.standard_normal(96)
    rows[generator.integers(0, 512, 8), generator.integers(0, 96, 8)] *= outlier
    rows[generator.integers(0, 512, 4)] = 0
    raw = stored(rows.astype(np.float32).clip(-6e4, 6e4), name)
    x = (generator.standard_normal((5, 96)) * np.exp(spread * generator.standard_normal(96))).astype(np.float32)
    for variant in library.variants():
        head = head_of(native.NativeBackend(2, variant), raw)
        assert same_by_all_logits(head, x)
        assert slack(head, x).min() >= 0


@pytest.mark.parametrize("variant", library.variants())
def test_late_members_change_nothing(variant: str) -> None:
    """With more threads than cores, pieces are computed twice, and members join after a search is over."""
    head = head_of(native.NativeBackend(5, variant), raw_tensor("Q8_0", 16384, COLUMNS))
    xs = [noise(1 + i % (native_pass.SKETCH_ROWS + 8), COLUMNS, seed=i) for i in range(24)]
    expected = [head.statistics.draw(head.logits(x)[0], noises_of(x)) for x in xs]
    for _ in range(30):
        assert [head.search(x, noises_of(x)) for x in xs] == expected


@pytest.fixture(scope="module", params=library.variants())
def smollm_of_a_variant(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM("smollm2-135m", backend=f"native-{request.param}", kv_bytes=1 << 28) as llm:
        yield llm


@pytest.mark.thinned
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_an_answer_is_the_same_in_any_company(smollm_of_a_variant: LLM, temperature: float) -> None:
    """A request with log-probabilities or filters makes the whole step compute all logits."""
    llm = smollm_of_a_variant
    assert llm.model.index is not None
    llm.model.index.clear()
    prompts = [f"The history of {name} begins" for name in ("Rome", "bread", "the bicycle")]

    def tokens(which: list[str], **options: Any) -> list[list[int]]:
        made = llm.generate(which, max_tokens=6, ignore_eos=True, temperature=temperature, seed=5, **options)
        return [[token.id for token in one.tokens] for one in made]

    expected = tokens(prompts, logprobs=0)
    assert tokens(prompts) == [tokens([prompt])[0] for prompt in prompts] == expected
    beside = llm.engine.submit(
        llm.request(prompts[0], SamplingParams(max_tokens=100, temperature=1.0, seed=1, top_p=0.9, ignore_eos=True))
    )
    assert tokens(prompts) == expected
    assert not beside.done
    llm.engine.cancel(beside)
