"""Sampling on the device against sampling/ and the noise of native/noise.h."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter as interpreter

from twostroke.backends.native import library
from twostroke.backends.native.backend import NativeBackend
from twostroke.backends.triton import sampling
from twostroke.backends.triton.kernels.launch import kernel
from twostroke.backends.triton.kernels.numbers import INTERPRET
from twostroke.backends.triton.kernels.sampling import gumbel
from twostroke.backends.triton.sampling import SUPPORTED, DeviceSampler, supports, supports_report
from twostroke.fields import number
from twostroke.sampling import statistics
from twostroke.sampling.draw import Draw, Noise, mix_bits
from twostroke.sampling.draw import gumbel as gumbel_float64
from twostroke.sampling.params import SamplingParams
from twostroke.sampling.sampler import distribution, sample
from twostroke.sampling.statistics import NO_TOKEN

VOCAB = 2500  # several blocks, the last of them not whole
INF = math.inf


@pytest.fixture
def sampler(device: torch.device) -> DeviceSampler:
    return DeviceSampler(device)


def draws(count: int, first: int = 0, **fields: Any) -> list[Draw]:
    params = SamplingParams(**fields)
    noises = [Noise.of(params.temperature, b"key", first + i) for i in range(count)]
    return [Draw(params, own, i, np.arange(0), ()) for i, own in enumerate(noises)]


def rows(count: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (count, vocab)).astype(np.float32)


def drawn(sampler: DeviceSampler, logits: np.ndarray, some: list[Draw]) -> list[int]:
    return sampler.draw(torch.from_numpy(logits).to(sampler.device), some).tolist()


@kernel
def noise_kernel(key, out, BLOCK: tl.constexpr):  # pyright: ignore[reportMissingParameterType]
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + columns, gumbel(columns, tl.load(key)))


def rounds_once() -> bool:
    """Whether x y + z is rounded once, as by a GPU and in the interpreter from 3.9 on."""
    x, z = (interpreter.TensorHandle(np.full(1, one, np.float32), tl.float32) for one in (1 + 2.0**-12, -1 - 2.0**-11))
    return not INTERPRET.value or interpreter.interpreter_builder.create_fma(x, x, z).data[0] != 0


def fma(x: Any, y: Any, z: Any) -> Any:
    """x y + z in float32, rounded as the device does."""
    if not rounds_once():
        return x * y + z
    return (np.float64(x) * np.float64(y) + np.float64(z)).astype(np.float32)


def log16(x: np.ndarray) -> np.ndarray:
    """`log16` of native/noise.h."""
    bits, one = x.view(np.int32), 127 << 23
    n = (bits + (one - 0x3F3504F3)) >> 23
    f = (bits + (one - (n << 23))).view(np.float32) - np.float32(1)
    square, p = f * f, np.float32(8.7003596127e-2)
    for term in (
        -1.4267475903e-1,
        1.4914786816e-1,
        -1.6577586532e-1,
        1.996306181e-1,
        -2.5001338124e-1,
        3.3333909512e-1,
    ):
        p = fma(p, f, np.float32(term))
    p = fma(p, square * f, f - square * np.float32(0.5))
    return fma(n.astype(np.float32) - np.float32(127), np.float32(6.9314718e-1), p)


def cpu_noise(key: int, ids: np.ndarray) -> np.ndarray:
    """`gumbel` of native/noise.h."""
    bits = mix_bits(mix_bits(ids.astype(np.uint32) ^ np.uint32(key & 0xFFFFFFFF)) ^ np.uint32(key >> 32))
    low = (bits & np.uint32(0xFFFF)).astype(np.float32) + np.float32(0.5)
    u = ((bits >> np.uint32(16)).astype(np.float32) * np.float32(65536) + low) * np.float32(2.0**-32)
    u = np.minimum(u, np.float32(1 - 2.0**-24))
    rest = np.float32(1) - u
    return -log16(-(log16(rest) + ((np.float32(1) - rest) - u)))


@pytest.mark.parametrize("key", [0, 0xFEDCBA9876543210, 0x0123456789ABCDEF])
def test_noise_is_that_of_the_cpu(key: int, device: torch.device) -> None:
    out = torch.empty(1 << 16, dtype=torch.float32, device=device)
    noise_kernel[(4,)](torch.tensor([key - ((key >> 63) << 64)], device=device), out, 1 << 14)
    ids = np.arange(len(out))
    np.testing.assert_array_equal(out.cpu().numpy(), cpu_noise(key, ids))
    exact = gumbel_float64(key, ids)
    usual = exact > -2  # where u is near 1 single precision has few bits of it
    np.testing.assert_allclose(out.cpu().numpy()[usual], exact[usual], rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no native backend: {library.unavailable()}")
@pytest.mark.parametrize("temperature", [0.0, 0.7, 5.0])
def test_tokens_are_those_of_the_native_backend(temperature: float, sampler: DeviceSampler) -> None:
    logits, some = rows(4), draws(4, temperature=temperature)
    noises = [draw.noise for draw in some]
    expected = NativeBackend(1).statistics.draw(logits, noises)
    assert drawn(sampler, logits, some) == expected
    assert sampler.search(torch.from_numpy(logits).to(sampler.device), sampler.send(noises)).tolist() == expected


def test_the_lowest_of_equal_logits_is_taken(sampler: DeviceSampler) -> None:
    logits = np.full((3, VOCAB), -0.0, np.float32)
    logits[1, [700, 2100, 2300]] = 1.5
    logits[2, 1] = 0.0
    assert drawn(sampler, logits, draws(3)) == [0, 700, 0]


def test_no_token_where_logits_are_not_finite(sampler: DeviceSampler) -> None:
    logits = rows(7)
    logits[0, 2000] = math.nan
    logits[1, 3] = INF
    logits[2] = -INF
    logits[3] = -math.nan
    logits[4, 1000:] = -INF
    logits[5] = np.where(logits[5] > 0, -INF, -3e38)
    logits[6, 5] = 3.4e38
    filtered = {"temperature": 0.5, "top_k": 5, "top_p": 0.9, "min_p": 0.01}
    options: list[dict[str, Any]] = [{}, {"temperature": 1e-3}, filtered]
    for fields in options:
        some = draws(7, **fields)
        if "top_k" in fields:
            logits[5] /= 1e37  # so large that noise makes no difference in single precision
        expected = [sampled.id for sampled in sample(logits, some)]
        assert expected[:4] == [NO_TOKEN] * 4
        assert drawn(sampler, logits, some) == expected, fields


def test_rows_do_not_depend_on_others_nor_on_memory(sampler: DeviceSampler) -> None:
    logits = torch.from_numpy(rows(5)).to(sampler.device)
    apart = torch.full((5, VOCAB + 9), INF, device=sampler.device)[:, :VOCAB].copy_(logits)
    mixed = [draws(5, temperature=0.8)[0], *draws(5, temperature=0.9, top_p=0.8)[1:3], *draws(5)[3:]]
    words, buffers, out = sampler.send(mixed), sampler.buffers(5, VOCAB), torch.empty(5, dtype=torch.int32)
    for part in (buffers.values, buffers.columns, buffers.sums, buffers.cuts, buffers.found):
        part.fill_(77)
    ids = sampler.search(apart, words, True, out.to(sampler.device), buffers).tolist()
    assert ids == [sampler.search(logits[i : i + 1], words[i : i + 1], True).tolist()[0] for i in range(5)]
    found, numbers = sampler.statistics(apart, buffers=buffers)
    for i in range(5):
        alone = sampler.statistics(logits[i : i + 1])
        assert found[i] == alone[0][0]
        assert torch.equal(numbers[i], alone[1][0])


FILTERS = [
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 9999},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.9},
    {"top_k": 40, "top_p": 0.9, "min_p": 0.2},
    {"top_p": 0.95, "min_p": 1e-3},
]


@pytest.mark.parametrize("fields", FILTERS, ids=lambda fields: ",".join(f"{k}={v}" for k, v in fields.items()))
@pytest.mark.parametrize("block", [128, 4096], ids=["blocks", "one block"])
def test_filters_keep_the_same_ids(
    block: int, fields: dict[str, Any], sampler: DeviceSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distinct logits; logits of which many are equal; a flat row; one that is nearly all -inf."""
    monkeypatch.setattr(sampling, "CUT_BLOCK", block)
    logits = np.concatenate([rows(1, 700), np.round(rows(1, 700, 1.5, 1) * 2) / 2, rows(2, 700, 0.0)])
    logits[3] = np.where(np.arange(700) % 211 == 5, logits[0], -INF)
    some, buffers = draws(4, temperature=0.7, **fields), sampler.buffers(4, 700)
    ids = sampler.search(
        torch.from_numpy(logits).to(sampler.device), sampler.send(some), True, buffers=buffers
    ).tolist()
    assert ids == [sampled.id for sampled in sample(logits, some)]
    for row, draw, (least, last) in zip(logits, some, buffers.cuts.tolist(), strict=True):
        chances, left = distribution(row, draw.params)
        kept = (row > least) | ((row == least) & (np.arange(700) <= last))
        np.testing.assert_array_equal(np.flatnonzero(kept & (row > -INF)), np.sort(left[chances > 0]))


def test_statistics(sampler: DeviceSampler) -> None:
    logits = rows(5)
    logits[1, 5:2100] = -INF
    logits[2, 7] = math.nan
    logits[3, 7] = INF
    logits[4] = -INF
    found, numbers = sampler.statistics(torch.from_numpy(logits).to(sampler.device))
    expected = statistics.summarize(logits[:2])
    assert found[:2].tolist() == expected.best
    np.testing.assert_allclose(
        numbers[:2].cpu(), np.stack([expected.top, expected.logsumexp, expected.entropy], 1), rtol=2e-6
    )
    assert numbers[2:].isnan().all()


def test_the_likeliest_in_falling_order(sampler: DeviceSampler) -> None:
    logits = np.round(rows(3, 300))
    logits[1, 10:] = -INF
    logits[2] = np.where(np.arange(300) % 2, 0.0, -0.0)
    ids, values = sampler.likeliest(torch.from_numpy(logits).to(sampler.device), 20)
    expected = np.stack([np.lexsort((np.arange(300), -row))[:20] for row in logits])
    np.testing.assert_array_equal(ids.cpu(), expected)
    np.testing.assert_array_equal(values.cpu(), np.take_along_axis(logits, expected, 1))
    taken = torch.tensor([3, NO_TOKEN, 299], dtype=torch.int32, device=sampler.device)
    own = sampler.at(torch.from_numpy(logits).to(sampler.device), taken).tolist()
    assert own == [logits[0, 3], logits[1, 0], logits[2, 299]]


def test_what_is_reported_of_a_token(sampler: DeviceSampler) -> None:
    logits = np.round(rows(6, 300), 1)
    logits[1, 10:] = -INF
    logits[2, 3] = math.nan
    some = [
        *draws(4, temperature=0.9, logprobs=12),
        *draws(1, 7, temperature=0.8, top_p=0.9),
        *draws(1, logprobs=0),
    ]
    some[0].stats = some[2].stats = True
    made = sampler.report(torch.from_numpy(logits).to(sampler.device), some)
    for own, other in zip(made, sample(logits, some), strict=True):
        assert own.id == other.id
        assert [id for id, _ in own.top or ()] == [id for id, _ in other.top or ()]
        for one, two in [(own.logprob, other.logprob), (own.entropy, other.entropy)]:
            assert one == (None if two is None else pytest.approx(two, abs=1e-5))
        assert [value for _, value in own.top or ()] == pytest.approx([value for _, value in other.top or ()], abs=1e-5)
        assert (own.top is None) == (other.top is None)
        assert own.top_probability == (None if other.top_probability is None else pytest.approx(other.top_probability))


def test_what_is_drawn_on_the_device() -> None:
    drawn: list[dict[str, Any]] = [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3}, {"top_k": 3}]
    others: list[dict[str, Any]] = [{"logprobs": 0}, {"logit_bias": {1: 1.0}}, {"frequency_penalty": 1.0}]
    for fields in drawn + others:
        assert supports(draws(1, **fields)[0]) == (fields in drawn)
    stats, kept = draws(2)
    stats.stats = kept.keep_logits = True
    assert not supports(stats)
    assert not supports(kept)
    assert supports_report(stats)
    assert not supports_report(kept)


@dataclass(frozen=True)
class WithTopA(SamplingParams):
    """A filter that the device does not know."""

    top_a: float = number(0.0, least=0)

    @property
    def filters(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.top_a > 0 or super().filters


def test_a_filter_that_is_new_is_not_ignored_on_the_device() -> None:
    for params in (WithTopA(temperature=1.0, top_a=0.5), WithTopA(temperature=1.0, top_a=0.5, top_k=3)):
        draw = Draw(params, Noise.of(1.0, b"key", 0), 0, np.arange(0), ())
        assert params.filters
        assert not supports_report(draw)
        assert not supports(draw)
    assert supports(Draw(WithTopA(temperature=1.0), Noise.of(1.0, b"key", 0), 0, np.arange(0), ()))


def test_every_parameter_is_known_to_be_drawn_on_the_device_or_not() -> None:
    """A new parameter is decided on: it is in `SUPPORTED`, or here."""
    hosts = {"repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "constraint"}
    hosts |= {"allowed_token_ids", "bad_words"}
    assert {field.name for field in dataclasses.fields(SamplingParams)} == SUPPORTED | hosts


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_search_draws_what_a_direct_one_draws(sampler: DeviceSampler) -> None:
    logits, buffers, out = (
        torch.empty(4, VOCAB).cuda(),
        sampler.buffers(4, VOCAB),
        torch.empty(4, dtype=torch.int32).cuda(),
    )
    words = sampler.send(draws(4))
    sampler.search(logits.zero_(), words, True, out, buffers)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sampler.search(logits, words, True, out, buffers)
    for seed in range(20):
        own = torch.from_numpy(rows(4, seed=seed)).cuda()
        some = sampler.send(draws(4, 4 * seed, temperature=0.9, top_k=50, top_p=0.9))
        logits.copy_(own)
        words.copy_(some)
        graph.replay()
        assert out.tolist() == sampler.search(own, some, True).tolist()
