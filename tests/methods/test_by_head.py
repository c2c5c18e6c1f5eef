"""Techniques by head: what each head keeps, by the papers' formulas one entry at a time, and who refuses."""

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.methods.kvpress_indices import CASES, FAMILIES, RECORDED, TOKENS
from tests.methods.watching import PROMPT, needs_native, queried, runs_of
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest, OutOfPages
from twostroke.kv.attention import attention_weights
from twostroke.methods import (
    RKV,
    ChunkKV,
    CriticalKV,
    CurDKV,
    ExpectedAttention,
    Finch,
    HeavyHitters,
    KeyDiff,
    KeyNorms,
    KVzip,
    LagKV,
    Method,
    Plain,
    QFilters,
    Snap,
    Tova,
    TriAttention,
    method,
)
from twostroke.methods.by_head import RankedByHead, best
from twostroke.sampling.params import SamplingParams

Native = Callable[..., LLM]
LONG = PROMPT * 4
BY_HEAD: list[RankedByHead] = [
    *(Tova(), KeyDiff(), KeyNorms(), LagKV(lag=8), CurDKV(), ExpectedAttention(), HeavyHitters(), ChunkKV(), KVzip()),
    *(QFilters(), TriAttention(), CriticalKV()),
]
Head = Callable[[LLM, int, int], list[float]]  # a layer and a KV head: the worth of each entry


def tova(llm: LLM, layer: int, head: int) -> list[float]:
    made = queried(llm, LONG, 1)
    return list(attention_weights(made.kv, made.queries))[layer][:, 0].mean(0).tolist()


def entries_of(llm: LLM, layer: int, head: int) -> np.ndarray:
    return llm.prefill(LONG).entries(layer)[:, :, head].astype(float)


def keydiff(llm: LLM, layer: int, head: int) -> list[float]:
    keys = entries_of(llm, layer, head)[0]
    anchor = np.mean([key / math.hypot(*key) for key in keys], 0)
    return [-float(key @ anchor) / math.hypot(*key) / math.hypot(*anchor) for key in keys]


def key_norms(llm: LLM, layer: int, head: int) -> list[float]:
    return [-math.hypot(*key) for key in entries_of(llm, layer, head)[0]]


def curdkv(llm: LLM, layer: int, head: int) -> list[float]:
    sizes = (entries_of(llm, layer, head) ** 2).sum(-1)
    parts = [slice(i // 16 * 16, i // 16 * 16 + 16) for i in range(len(LONG))]
    return [float(np.prod([rows[i] / rows[part].sum() for rows in sizes])) for i, part in enumerate(parts)]


def lagkv(llm: LLM, layer: int, head: int, sinks: int = 4, lag: int = 8) -> list[float]:
    entries = entries_of(llm, layer, head)
    parts = (len(LONG) - sinks) // lag
    worth = [1.0] * len(LONG)
    for part in range(parts - 1):
        scores = np.zeros(lag)
        own, other = (slice(sinks + lag * at, sinks + lag * (at + 1)) for at in (part, part + 1))
        for rows in entries:
            least, most = rows[other].min(0), rows[other].max(0)
            spread = [math.exp(((row - least) / (most - least)).std(ddof=1)) for row in rows[own]]
            scores += np.array(spread) / sum(spread)
        for rank, index in enumerate(sorted(range(lag), key=lambda i: scores[i])):
            worth[sinks + lag * part + index] = rank / lag
    return worth


def expected_attention(llm: LLM, layer: int, head: int, sinks: int = 4, future: int = 9) -> list[float]:
    """By whole matrices, from attention that is a mean over positions."""
    made = queried(llm, LONG, len(LONG))
    keys, values = made.kv.entries(layer)[:, sinks:, head].astype(float)
    half, rope = keys.shape[-1] // 2, llm.pool.geometry.rope_of(layer)
    turns = rope.base ** (-np.arange(half) / half)

    def rotation(position: int) -> np.ndarray:
        cos, sin = np.diag(np.cos(position * turns)), np.diag(np.sin(position * turns))
        return np.block([[cos, -sin], [sin, cos]])

    ahead = np.mean([rotation(len(LONG) + step) for step in range(future)], 0)
    shares = []
    for rows in made.queries.rows[layer].swapaxes(0, 1).reshape(2, -1, len(LONG), 2 * half)[head].astype(float):
        before = np.array([rotation(position).T @ row for position, row in enumerate(rows)])[sinks:]
        mean, covariance = ahead @ before.mean(0), ahead @ np.cov(before.T, bias=True) @ ahead.T
        scores = np.array([key @ mean + key @ covariance @ key / 2 for key in keys])
        shares.append(np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum())
    worth = [share * math.hypot(*value) for share, value in zip(np.mean(shares, 0), values, strict=True)]
    return [0.0] * sinks + worth


def q_filters(llm: LLM, layer: int, head: int) -> list[float]:
    made = queried(llm, LONG, len(LONG))
    rows = made.queries.rows[layer].swapaxes(0, 1).reshape(2, -1, made.queries.rows.shape[-1])[head].astype(float)
    direction = np.linalg.svd(rows, full_matrices=False)[2][0]
    sign = 1 if (rows @ direction).mean() > 0 else -1
    return (entries_of(llm, layer, head)[0] @ (sign * direction)).tolist()


def triattention(llm: LLM, layer: int, head: int, future: int = 9) -> list[float]:
    """By the series of cosines, one pair at a time."""
    made = queried(llm, LONG, len(LONG))
    keys, half = entries_of(llm, layer, head)[0], made.queries.rows.shape[-1] // 2
    turns = llm.pool.geometry.rope_of(layer).base ** (-np.arange(half) / half)

    def before(row: np.ndarray, position: int) -> np.ndarray:
        return (row[:half] + 1j * row[half:]) * np.exp(-1j * position * turns)

    scores: list[np.ndarray] = []
    for rows in made.queries.rows[layer].swapaxes(0, 1).reshape(2, -1, len(LONG), 2 * half)[head].astype(float):
        queries = np.array([before(row, position) for position, row in enumerate(rows)])
        center, size = queries.mean(0), np.abs(queries).mean(0)
        own: list[float] = []
        for position, row in enumerate(keys):
            key = before(row, position)
            phase = np.angle(center) - np.angle(key)
            series = [
                float((abs(center) * abs(key) * np.cos(turns * (len(LONG) - 1 + ahead - position) + phase)).sum())
                for ahead in (1, 2, 4, 8)
                if ahead <= future
            ]
            own.append(float(np.mean(series)) + float(((size - abs(center)) * abs(key)).sum()))
        scores.append((np.array(own) - np.mean(own)) / np.std(own))
    return np.max(scores, 0).tolist()


def heavy_hitters(llm: LLM, layer: int, head: int) -> list[float]:
    made = queried(llm, LONG, len(LONG))
    weights = list(attention_weights(made.kv, made.queries))[layer]
    return weights.reshape(2, -1, len(LONG), len(LONG))[head].mean(0).sum(0).tolist()


def chunkkv(llm: LLM, layer: int, head: int, window: int = 6, chunk: int = 7) -> list[float]:
    made = queried(llm, LONG, window)
    weights = list(attention_weights(made.kv, made.queries))[layer].astype(float)
    chunks = [range(start, min(start + chunk, len(LONG))) for start in range(0, len(LONG), chunk)]
    means = [float(np.mean([weights[:, :, i].sum() for i in one])) for one in chunks]
    return [mean for mean, one in zip(means, chunks, strict=True) for _ in one]


def kvzip(llm: LLM, layer: int, head: int) -> list[float]:
    asked = llm.tokenizer.encode("\n\nRepeat the previous context exactly.", add_bos=False)
    again = [*asked, *llm.tokenizer.encode("\n", add_bos=False), *LONG]
    made = queried(llm, LONG + again, len(again))
    weights = list(attention_weights(made.kv, made.queries))[layer]
    return weights.reshape(2, -1, len(made.kv))[head].max(0)[: len(LONG)].tolist()


def by_hand(worth: list[float], count: int, sinks: int, newest: int) -> list[int]:
    always = [*range(sinks), *range(len(worth) - newest, len(worth))]
    others = sorted(range(sinks, len(worth) - newest), key=lambda i: -worth[i])
    return sorted([*always, *others[: count - len(always)]])


@needs_native
@pytest.mark.parametrize(
    ("technique", "formula"),
    [
        (Tova(budget=20), tova),
        (Tova(ratio=0.3, sinks=2, newest=5), tova),
        (KeyDiff(budget=20), keydiff),
        (KeyNorms(ratio=0.25, sinks=1), key_norms),
        (CurDKV(budget=23, sinks=3), curdkv),
        (ExpectedAttention(budget=20, future=9), expected_attention),
        (HeavyHitters(budget=20, recent=0), heavy_hitters),
        (HeavyHitters(budget=21, sinks=1, recent=0.3, newest=2), heavy_hitters),
        (ChunkKV(budget=6 + 2 * 7 + 3, newest=6, chunk=7), chunkkv),  # 76 = 10 chunks and 6
        (KVzip(budget=20, sinks=1), kvzip),
        (QFilters(budget=20, sinks=2), q_filters),
        (TriAttention(budget=20, newest=3, future=9), triattention),
        (LagKV(budget=4 + 2 * 8 + 16, lag=8), lagkv),  # 76 - 4 = 9 parts of 8: 8 keep 2, the last all
    ],
    ids=lambda one: getattr(one, "name", "") or one.__name__,
)
def test_what_each_head_keeps(technique: RankedByHead, formula: Head, native_llm: Native) -> None:
    llm = native_llm()
    count = technique.budget or int(technique.ratio * len(LONG))
    newest = 6 if isinstance(technique, HeavyHitters) and technique.recent else technique.newest
    made, (run,), _ = runs_of(llm, technique, LONG)
    assert run.kv.head_positions is not None
    layers, heads, length = run.kv.head_positions.shape
    assert length == count + 39, "and nothing decoded is dropped"
    stays = [
        [by_hand(formula(llm, layer, head), count, technique.sinks, newest) for head in range(heads)]
        for layer in range(layers)
    ]
    assert run.kv.head_positions[..., :count].tolist() == stays
    assert len({tuple(row) for layer in stays for row in layer}) > 1, "heads differ"
    kept = llm.prefill(LONG).gather(np.array(stays))
    assert made == [token.id for token in llm.decode(kept, max_tokens=40, ignore_eos=True)]
    assert made != runs_of(llm, Plain(), LONG)[0]


@needs_native
@pytest.mark.parametrize("technique", [*BY_HEAD, Snap(per="head"), Finch(), RKV()], ids=lambda one: one.name)
@pytest.mark.parametrize("prompt", [LONG, [7]], ids=len)
def test_room_for_everything_is_the_plain_request(technique: Method, prompt: list[int], native_llm: Native) -> None:
    llm = native_llm()
    made, (run,), _ = runs_of(llm, method(technique.name, budget=len(LONG)), prompt)
    expected, (plain,), _ = runs_of(llm, Plain(), prompt)
    assert made == expected
    assert run.kv.head_positions is None
    assert (run.kv.entries() == plain.kv.entries()).all()


@needs_native
@pytest.mark.parametrize("pool", ["max", "mean"])
def test_snap_by_head(pool: str, native_llm: Native) -> None:
    llm, window, budget, kernel = native_llm(), 5, 24, 3
    _, (run,), _ = runs_of(llm, Snap(window=window, budget=budget, kernel=kernel, pool=pool, per="head"), LONG)
    made, stays = queried(llm, LONG, window), []
    before = len(LONG) - window
    for weights in attention_weights(made.kv, made.queries):
        for head in weights.reshape(2, -1, len(LONG)):
            mass = [0.0, *head.mean(0)[:before].tolist(), 0.0]
            near = [mass[i : i + kernel] for i in range(before)]
            worth = [max(some) if pool == "max" else sum(some) for some in near] + [0.0] * window
            stays.append(by_hand(worth, budget, 0, window))
    assert run.kv.head_positions is not None
    assert run.kv.head_positions[..., :budget].reshape(-1, budget).tolist() == stays


@needs_native
def test_lagkv_of_a_short_prompt_keeps_the_newest(native_llm: Native) -> None:
    _, (run,), _ = runs_of(native_llm(), LagKV(budget=10), LONG)
    kept = [0, 1, 2, 3, *range(len(LONG) - 6, len(LONG))]
    assert run.kv.head_positions is not None
    assert (run.kv.head_positions[..., :10] == kept).all()


@needs_native
def test_after_repetition_the_last_copy_is_chosen_from(native_llm: Native) -> None:
    llm, n = native_llm(), len(PROMPT)
    _, (run,), _ = runs_of(llm, KeyDiff(times=2, keep="last", sinks=2, budget=9), PROMPT)
    assert run.kv.head_positions is not None
    chosen = run.kv.head_positions[..., :9]
    assert (chosen[..., :2] == [0, 1]).all()
    assert (chosen[..., 2:] >= n).all()
    assert (chosen[..., -1] == 2 * n - 1).all()


@needs_native
def test_what_no_head_keeps_is_freed(native_llm: Native) -> None:
    llm, long = native_llm(), [5] * 400 + LONG
    used = [llm.pool.num_used for _ in llm.stream(long, method=Tova(budget=8), max_tokens=9, ignore_eos=True)]
    assert max(used) <= 8 + 2


@needs_native
def test_without_room_beside_the_prompt_the_request_ends_and_others_go_on(native_llm: Native) -> None:
    page = native_llm().pool.page_bytes
    small, options = native_llm(kv_bytes=6 * page), SamplingParams(max_tokens=4, ignore_eos=True)
    with pytest.raises(OutOfPages, match="3 more KV pages are needed"):
        small.generate([LONG], params=options, method=Tova())
    assert small.pool.num_used == 0
    (fits,) = small.generate([LONG], params=options, method=Tova(budget=16))
    (large,) = native_llm().generate([LONG], params=options, method=Tova(budget=16))
    assert [token.id for token in fits.tokens] == [token.id for token in large.tokens]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
@pytest.mark.parametrize("technique", [*BY_HEAD, Snap(per="head"), Finch(), RKV()], ids=lambda one: one.name)
def test_models_with_windows_or_states_are_refused(family: str, technique: Method, tiny_llm: Native) -> None:
    """Before work starts; a choice per sequence runs."""
    llm = tiny_llm(family)
    with pytest.raises(InvalidRequest, match=f"method {technique.name} cannot run with model .*attend to all") as error:
        llm.request(PROMPT, SamplingParams(), technique)
    assert "\n" not in str(error.value)
    assert len(llm.generate([PROMPT], method=Snap(), max_tokens=4, ignore_eos=True)[0].tokens) == 4


def test_the_earlier_of_equals_stays() -> None:
    worth = np.array([[0, 1, 1, 0, 1, 9.0], [2, 2, 2, 2, 2, 2]])
    assert best(worth, 3).tolist() == [[1, 2, 5], [0, 1, 2]]


@pytest.mark.parametrize(
    ("name", "parameters", "message"),
    [
        ("tova", {"ratio": 0}, "ratio must be a number above 0 and at most 1"),
        ("keydiff", {"budget": 4, "sinks": 4}, r"budget must be an integer of at least 5 \(sinks \+ newest\)"),
        ("key-norms", {"newest": 0}, "newest must be an integer of at least 1"),
        ("curdkv", {"part": 0}, "part must be an integer of at least 1"),
        ("expected-attention", {"future": 0}, "future must be an integer from 1 to 65536"),
        ("expected-attention", {"epsilon": -1}, "epsilon must be a number of at least 0"),
        ("heavy-hitters", {"recent": 2}, "recent must be a number from 0 to 1"),
        ("triattention", {"budgets": "ada"}, "budgets must be equal"),
        ("critical-kv", {"kernel": 4}, "kernel must be odd"),
        ("critical-kv", {"by": "keydiff"}, "by must be one of snap, tova"),
        ("chunkkv", {"chunk": 0}, "chunk must be an integer of at least 1"),
        ("chunkkv", {"newest": 65}, "newest must be an integer from 1 to 64"),
        ("kvzip", {"part": 0}, "part must be an integer of at least 1"),
        ("lagkv", {"lag": 1}, "lag must be an integer of at least 2"),
        ("snap", {"per": "layer"}, "per must be one of sequence, head"),
        ("snap", {"pool": "sum"}, "pool must be one of max, mean"),
    ],
)
def test_bad_parameters(name: str, parameters: dict[str, float | str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        method(name, **parameters)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("name", "options"), [case[:2] for case in CASES], ids=[case[0] for case in CASES])
def test_what_kvpress_keeps(family: str, name: str, options: dict[str, Any], tiny_llm: Native) -> None:
    """Head by head. Its scores of K and V may drop the last entry, which stays here in place of their worst."""
    _, (run,), _ = runs_of(tiny_llm(family), method(name.partition("+")[0], **options), TOKENS, max_tokens=1)
    last, ranked = len(TOKENS) - 1, json.loads(RECORDED.read_text())[family][name]
    assert run.kv.head_positions is not None
    slots = run.kv.head_positions
    sees = np.ones(slots.shape, bool) if run.kv.bias is None else run.kv.bias == 0
    kept = [[head[own].tolist() for head, own in zip(*layer, strict=True)] for layer in zip(slots, sees, strict=True)]
    assert kept == [[sorted(head if last in head else [*head[:-1], last]) for head in layer] for layer in ranked]
