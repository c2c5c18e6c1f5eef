"""A model's identity has everything that determines an entry's bits, so values of other models are not canonical."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.backends.native.backend import NativeBackend
from twostroke.engine.model_loader import model_identity
from twostroke.kv.cache import KVCache
from twostroke.models.rope import Rope

RUNNABLE: tuple[str, ...] = library.variants() if library.unavailable() is None else ()
VARIANTS = tuple(dict.fromkeys(map(library.same_bits, RUNNABLE)))  # one of those with the same bits
TEXT = "In the beginning the engine read the prompt, all of it, at once; and then it wrote, a token at a time. " * 5


def scores(llm: LLM, tokens: list[int]) -> list[float | None]:
    """Log-probabilities of the greedy continuation."""
    made = llm.generate([tokens], max_tokens=6, ignore_eos=True, logprobs=1)[0].tokens
    return [token.logprob for token in made]


@pytest.mark.skipif(len(VARIANTS) < 2, reason="this processor has one native variant, or none")
@pytest.mark.parametrize("variant", VARIANTS[:-1])
def test_a_value_of_another_variant_is_usable_and_not_canonical(variant: str, tmp_path: Path) -> None:
    """Entries computed after it are not canonical either: a later request gets the same bits as a cold one."""
    theirs = LLM("smollm2-135m", backend=f"native-{variant}", kv_bytes=1 << 26)
    ids = theirs.tokenizer.encode(TEXT)
    theirs.prefill(ids[:105]).save(tmp_path / "a.kv")
    llm = LLM("smollm2-135m", backend=f"native-{VARIANTS[-1]}", kv_bytes=1 << 26)
    assert llm.model.id != theirs.model.id
    cold = scores(llm, ids[:110])
    assert llm.model.index is not None
    llm.model.index.clear()

    kv = KVCache.load(tmp_path / "a.kv", llm)
    assert len(kv) == 105
    assert kv.canonical_length(theirs.model.id) == 105
    assert kv.canonical_length(llm.model.id) == 0
    longer = llm.prefill(ids[105:130], after=kv)
    assert longer.tokens == ids[:130], "usable"
    assert longer.canonical_length(llm.model.id) == 0
    assert len(list(llm.decode(longer, max_tokens=3, ignore_eos=True))) == 3
    assert llm.model.index.num_pages == 0
    assert scores(llm, ids[:110]) == cold


def test_variants_and_builds_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {NativeBackend(1, variant).arithmetic for variant in VARIANTS}
    assert len(made) == len(VARIANTS)
    monkeypatch.setattr(library, "digest", lambda variant: "another build")
    assert made.isdisjoint(NativeBackend(1, variant).arithmetic for variant in VARIANTS)


@pytest.mark.reference
def test_everything_that_bits_depend_on_counts(tiny_llm: Callable[..., LLM]) -> None:
    made = [
        tiny_llm(backend="reference"),
        tiny_llm(backend="reference", dtype="bfloat16"),
        tiny_llm(backend="reference", page_size=8),
        tiny_llm(backend="reference", weights="int8"),
        tiny_llm("qwen3", backend="reference"),
    ]
    assert len({llm.model.id for llm in made}) == len(made)
    assert tiny_llm(backend="reference").model.id == made[0].model.id


def test_kv_of_other_bits_is_another_identity() -> None:
    class Kernels:
        arithmetic, kv_dtype = "some", "float32"

    class Narrow(Kernels):
        kv_dtype = "bfloat16"

    class Checkpoint:
        weights_id = "these"
        config = SimpleNamespace(attentions=[SimpleNamespace(rope=Rope(1e4), head_dim=64)])

    ids = {model_identity(Checkpoint(), kernels(), 16) for kernels in (Kernels, Narrow)}  # pyright: ignore[reportArgumentType]
    assert len(ids) == 2
