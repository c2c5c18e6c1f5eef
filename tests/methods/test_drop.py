"""Dropping entries: the entries kept, by hand; memory; and dropping after repetition."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.methods.watching import PROMPT, needs_native, queried, runs_of
from twostroke.api.llm import LLM
from twostroke.errors import InvalidRequest
from twostroke.kv.attention import attention_weights
from twostroke.methods import Drop, Plain, Repeat, method
from twostroke.methods.repeat import chosen

Native = Callable[..., LLM]
LONG = PROMPT * 4


@needs_native
@pytest.mark.parametrize("by", ["window", "key-norm", "attention"])
def test_room_for_everything_is_the_plain_request(by: str, native_llm: Native) -> None:
    llm = native_llm()
    assert runs_of(llm, Drop(by=by, window=400, every=3), LONG)[0] == runs_of(llm, Plain(), LONG)[0]


@needs_native
def test_sinks_and_window(native_llm: Native) -> None:
    """A stretch starts from the first and the last entries, at their original positions."""
    llm, n = native_llm(), len(LONG)
    made, runs, _ = runs_of(llm, Drop(sinks=3, window=20, every=6), LONG, max_tokens=30)
    kv, text = llm.prefill(LONG), []
    for run in runs:
        decoding = llm.decode(kv[:3] + kv[-20:], max_tokens=6, ignore_eos=True)
        text += [token.id for token in decoding]
        kv = decoding.kv
        assert run.kv.positions == kv.positions
        assert (run.kv.entries() == kv.entries()).all()
    assert text == made
    assert kv.positions == [0, 1, 2, *range(n + 23 - 20, n + 29)]
    assert made != runs_of(llm, Plain(), LONG, max_tokens=30)[0]


@needs_native
def test_least_key_norms(native_llm: Native) -> None:
    llm = native_llm()
    kv = llm.prefill(LONG)
    kept = chosen(kv, Drop(by="key-norm", sinks=2, window=30).staying(kv, np.zeros(len(kv))))
    keys = kv.entries()[:, 0].astype(np.float32)
    norms = np.array([[np.linalg.norm(k) for k in entry.reshape(-1, entry.shape[-1])] for entry in keys.swapaxes(0, 1)])
    order = sorted(range(2, len(LONG) - 1), key=lambda i: norms[i].mean())
    assert kept.positions == [0, 1, *sorted(order[:29]), len(LONG) - 1]
    assert kept.tail is kv.tail
    assert (kept.entries() == kv.entries()[:, :, kept.positions]).all()


@needs_native
@pytest.mark.parametrize(("window", "observed"), [(20, 8), (7, 64), (1, 1)])
def test_heavy_hitters(window: int, observed: int, native_llm: Native) -> None:
    """Half of the window is chosen by accumulated attention of the prompt's last tokens and all later ones."""
    llm = native_llm()
    technique = Drop(by="attention", sinks=3, window=window, every=6, observed=observed)
    made, runs, _ = runs_of(llm, technique, LONG, max_tokens=40)
    prefilled = queried(llm, LONG, observed)
    kv, queries, mass = prefilled.kv, prefilled.queries, dict.fromkeys(range(len(LONG) + 40), 0.0)
    for run in runs:
        weights = np.stack(list(attention_weights(kv, queries)))
        for position, column in zip(kv.positions, np.moveaxis(weights, -1, 0), strict=True):
            mass[position] += float(column.mean((0, 1)).sum())
        recent = kv.positions[-((window + 1) // 2) :]
        others = sorted(kv.positions[3 : -len(recent)], key=lambda position: -mass[position])
        stays = sorted([0, 1, 2, *others[: window - len(recent)], *recent])
        assert run.kv.positions[: len(stays)] == stays
        kv, queries = run.kv, run.queries
        assert len(queries) == len(kv) - len(stays)
    assert made != runs_of(llm, Drop(sinks=3, window=window, every=6), LONG, max_tokens=40)[0] or window == 1


@needs_native
@pytest.mark.parametrize("by", ["window", "key-norm", "attention"])
def test_memory_is_bounded(by: str, native_llm: Native) -> None:
    llm = native_llm()
    _, runs, _ = runs_of(llm, Drop(by=by, sinks=4, window=28, every=16), LONG, max_tokens=200)
    assert max(len(run.kv) for run in runs) == 4 + 28 + 16
    del runs
    used = []
    for _ in llm.stream(LONG, method=Drop(sinks=0, window=16), max_tokens=100, ignore_eos=True):
        used.append(llm.pool.num_used)
    assert max(used) <= 4  # 16 + 16 entries, with a partial page before and after


@needs_native
def test_after_repetition(native_llm: Native) -> None:
    """Dropping from the last copy and sinks of PTDO works as for any value."""
    llm, n = native_llm(), len(PROMPT)
    repeated = runs_of(llm, Repeat(2, sinks=4), PROMPT)[0]
    assert runs_of(llm, Drop(times=2, keep="last", window=100), PROMPT)[0] == repeated
    attended = Drop(times=2, keep="last", window=100, by="attention")
    assert runs_of(llm, attended, PROMPT)[0] == repeated
    made = runs_of(llm, Drop(times=2, keep="last", window=10, every=40), PROMPT)[0]
    twice = llm.prefill(PROMPT * 2)
    kept = twice[:4] + twice[2 * n - 10 :]
    assert made == [token.id for token in llm.decode(kept, max_tokens=40, ignore_eos=True)]


@needs_native
@pytest.mark.parametrize("indices", [[0], [5], [0, 1, 2], [1, 3, 5], [0, 1, 7, 8, 9, 18]])
def test_any_entries(indices: list[int], native_llm: Native) -> None:
    kv = native_llm().prefill(PROMPT)
    kept = chosen(kv, np.array(indices))
    assert kept.positions == indices
    assert (kept.entries() == kv.entries()[:, :, indices]).all()


def test_bad_parameters() -> None:
    for parameters, message in [
        ({"window": 0}, "window"),
        ({"every": 0}, "every"),
        ({"by": "luck"}, "by must be one"),
        ({"observed": 65}, "from 1 to 64"),
        ({"by": "attention", "every": 65}, "from 1 to 64"),
    ]:
        with pytest.raises(InvalidRequest, match=message):
            method("drop", **parameters)
