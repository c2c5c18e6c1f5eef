"""Pages for each layer: the same bits as together, and no page where no head of a layer sees an entry."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.any_schedule import PROMPT, AnySchedule
from tests.engine.test_entries_by_head import NEXT, PARAMS, check_schedules, chosen, needs_native
from tests.engine.test_kv_bits import CODED, KINDS
from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native.library import variants
from twostroke.backends.reference import operations
from twostroke.backends.reference.attention_tiles import TILE_KEYS
from twostroke.backends.reference.operations import numbers_of
from twostroke.engine.strokes import Decode, Prefill, Program
from twostroke.errors import GeometryMismatch, InvalidRequest, KVError
from twostroke.kv.cache import KVCache
from twostroke.kv.entries_by_head import NO_ENTRY
from twostroke.methods import method

DTYPES = ("bfloat16", *CODED)
APART = {dtype: AnySchedule(KINDS["plain"], dtype, "layers") for dtype in DTYPES}
TOGETHER = {dtype: AnySchedule(KINDS["plain"], dtype) for dtype in DTYPES}


def fewer(llm: LLM, length: int, count: int, seed: int = 0) -> np.ndarray:
    """Indices as of `chosen`, of which the second layer keeps a quarter, and the first layer's first head a half."""
    indices = chosen(llm, length, count, seed)
    indices[1, :, : 3 * count // 4] = indices[0, 0, : count // 2] = NO_ENTRY
    return indices


def behind(llm: LLM, kv: KVCache, tokens: list[int] = NEXT) -> np.ndarray:
    tail = llm.prefill(tokens, after=kv).tail
    assert tail is not None
    assert tail.logits is not None
    return tail.logits


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_layers_together(dtype: str) -> None:
    """Where pages are left out, another one is read for nothing: a long chunk writes into it, and no bit follows."""
    made: list[list[object]] = []
    whole = 0
    for llm in (TOGETHER[dtype].model(), APART[dtype].model()):
        kv = llm.prefill(PROMPT)
        indices = fewer(llm, len(kv) - 1, 150)
        one = kv[:-1].gather(indices)
        two = (one + kv[:100].gather(fewer(llm, 100, 70)).at(400)) + kv[-1:].at(600)
        made.append([*llm.decode(one + kv[-1:], params=PARAMS), *llm.decode(two, params=PARAMS)])
        made[-1] += [behind(llm, two, tokens).tobytes() for tokens in (NEXT, NEXT * 12)]
        made[-1].append(behind(llm, two[60:140]).tobytes())
        if llm.pool.num_groups == 1:
            whole = one.nbytes
        else:  # of 10 pages the second of three layers needs the last 3
            assert one.nbytes == (2 * 150 + 38) * whole // 450
            assert one.num_pages == 10 + 3 + 10
    assert made[0] == made[1]


def holing(llm: LLM, length: int, count: int) -> Callable[[], Program]:
    """A program that keeps fewer entries in some layers, cuts and joins, and goes on."""
    indices = fewer(llm, length - 4, count, seed=count)

    def program() -> Program:
        kv: KVCache = yield Prefill(PROMPT[:length])
        kept = (kv[:-4].gather(indices) + kv[-4:])[5:]
        kept += kept[: count // 2].at(kept.next_position + 3)  # whose last pages are left out in the second layer
        kv = yield Prefill(NEXT, after=kept)
        yield Decode(kv)  # the request's result would hold pages

    return program


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_under_every_schedule(dtype: str) -> None:
    """Alone, batched, in chunks, with a prefix index, preempted where pages are few."""
    programs = [holing(APART[dtype].model(), *one) for one in ((120, 90), (77, 60), (60, 40), (120, 90))]
    check_schedules(APART[dtype], programs, few=52)


@needs_native
def test_such_a_value_is_a_value(tmp_path: Path) -> None:
    llm = APART["bfloat16"].model()
    kv = llm.prefill(PROMPT)
    kept = kv[:-1].gather(fewer(llm, len(kv) - 1, 150)) + kv[-1:]
    assert kept.complete
    expected = list(llm.decode(kept, params=PARAMS))
    kept.save(tmp_path / "kv")
    for value in (KVCache.load(tmp_path / "kv", llm), kept.to("host"), kept[:40] + kept[40:], kept.copy_to(llm.pool)):
        assert (value.nbytes, value.num_pages) == (kept.nbytes, kept.num_pages)
        assert list(llm.decode(value, params=PARAMS)) == expected
    again = kept.gather(np.broadcast_to(np.arange(len(kept)), (3, 2, len(kept))))
    assert (again.nbytes, list(llm.decode(again, params=PARAMS))) == (kept.nbytes, expected)
    assert kept.bias is not None
    with pytest.raises(KVError, match="shows entries that heads did not see"):
        kept.with_bias(np.zeros_like(kept.bias))
    with pytest.raises(GeometryMismatch, match="groups"):
        _ = kv + TOGETHER["bfloat16"].model().prefill(NEXT).at(400)


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", variants())
def test_pages_of_which_a_head_sees_nothing_are_not_read(dtype: str, variant: str) -> None:
    """NaN there changes no bit. Each head's first visible entry is in another page, also of a split."""
    path, backend = TOGETHER[dtype].directory(), f"native-{variant}"
    with LLM(path, backend=backend, kv_dtype=dtype, kv_bytes=8 << 20, threads=1) as llm:
        kv = llm.prefill(PROMPT)
        bias = np.zeros((3, 2, len(kv)), np.float32)
        firsts = {(0, 0): 40, (0, 1): 176, (1, 0): 0, (1, 1): 130}
        for at, first in firsts.items():
            bias[*at, :first] = -np.inf
        hidden = kv.with_bias(bias)
        expected = [behind(llm, hidden, tokens).tobytes() for tokens in (NEXT[:1], NEXT * 8)]
        shown = llm.pool.memory.read(0, llm.pool.frames_of(kv.table[:, 3]), np.zeros(len(kv.table), int)).copy()
        for (layer, head), first in firsts.items():
            pages = np.repeat(llm.pool.frames_of(kv.table[: first // 16, 3]), 16)
            slots = np.tile(np.arange(16), first // 16)
            entries = llm.pool.memory.read(0, pages, slots).copy()
            entries[layer, :, :, head].view(np.uint8)[:] = 255
            llm.pool.memory.write(0, pages, slots, entries)
        after = llm.pool.memory.read(0, llm.pool.frames_of(kv.table[:, 3]), np.zeros(len(kv.table), int))
        assert after.tobytes() != shown.tobytes()
        assert [behind(llm, hidden, tokens).tobytes() for tokens in (NEXT[:1], NEXT * 8)] == expected


def test_budgets_by_layer_take_memory_by_layer(tmp_path: Path) -> None:
    """As the reference computes them, too."""
    path, answers = str(write_model("llama", tmp_path)), []
    asked = method("key-norms", budget=40, budgets="pyramid")
    for kv_groups in ("auto", "layers"):
        with LLM(path, backend="reference", kv_groups=kv_groups, kv_bytes=16 << 20, threads=1) as llm:
            answers.append(llm.generate([PROMPT], PARAMS, method=asked)[0].tokens)
    assert answers[0] == answers[1]


def test_the_reference_reads_no_tile_that_no_head_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def numbers(*given: Any) -> Any:
        read.append(1)
        return numbers_of(*given)

    monkeypatch.setattr(operations, "numbers_of", numbers)
    with LLM(str(write_model("llama", tmp_path)), backend="reference", kv_bytes=16 << 20, threads=1) as llm:
        kv, counts = llm.prefill(PROMPT * 3), list[int]()
        bias = np.zeros((len(llm.pool.geometry.kv_layers), llm.pool.geometry.kv_heads or 0, len(kv)), np.float32)
        for first in (0, TILE_KEYS):
            bias[0, :, :first] = -np.inf
            read.clear()
            behind(llm, kv.with_bias(bias), NEXT[:1])
            counts.append(len(read))
    assert counts == [2 * len(bias), 2 * len(bias) - 1]


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_models_whose_heads_hold_the_same_entries_are_refused_in_one_line(tmp_path: Path, family: str) -> None:
    with pytest.raises(InvalidRequest, match="kv_groups=layers needs a model whose layers attend to all entries"):
        LLM(str(write_model(family, tmp_path)), backend="reference", kv_groups="layers")
    with pytest.raises(InvalidRequest, match="kv_groups must be one of auto, layers"):
        LLM(str(write_model(family, tmp_path)), backend="reference", kv_groups="heads")
