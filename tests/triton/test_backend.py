"""The Triton backend beside the reference: every family, formats of weights, placeholders, and what it refuses."""

from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
import torch

from tests.backends.test_step_in_flight import batch
from tests.engine.test_queries import run
from tests.study.explain.test_states import asked
from twostroke.api.llm import LLM
from twostroke.backends.lazy_logits import StoredLogits
from twostroke.backends.triton import backend as gpu
from twostroke.engine.strokes import Prefill, Prefilled, Program
from twostroke.errors import InvalidRequest
from twostroke.kv.cache import KVCache
from twostroke.sampling.draw import NO_NOISE, Draw, Noise
from twostroke.sampling.params import SamplingParams

TinyLLM = Callable[..., LLM]


@pytest.fixture
def on_gpu(tiny_llm: TinyLLM, device: torch.device) -> TinyLLM:
    def open_tiny(family: str, **options: object) -> LLM:
        return tiny_llm(family, backend="triton", device=str(device), **options)

    return open_tiny


def ids(count: int) -> list[int]:
    return [3 + i * 37 % 370 for i in range(count)]


def distance(mine: np.ndarray, theirs: np.ndarray) -> float:
    mine, theirs = mine.astype(np.float32), theirs.astype(np.float32)
    assert (np.isnan(mine) == np.isnan(theirs)).all()  # what windowed layers have given back
    mine, theirs = np.nan_to_num(mine), np.nan_to_num(theirs)
    return float(np.linalg.norm(mine - theirs) / np.linalg.norm(theirs))


LATENT = "no kernel for latent entries"
REFUSED = {
    "falcon_h1": "attention and states beside each other",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite"), LATENT),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), "MLPs without a gate"),
}


def test_every_family(family: str, tiny_llm: TinyLLM, on_gpu: TinyLLM) -> None:
    """K, V and logits are the reference's up to bfloat16's rounding: windows, norms, scales, biases, experts, RoPE."""
    if family in REFUSED:
        with pytest.raises(InvalidRequest, match=REFUSED[family]):
            on_gpu(family)
        return
    llm = on_gpu(family)
    # Past windows and scales, else past a page.
    prompt = ids(34 if llm.pool.geometry.windowed or family == "ministral3" else 18)
    mine, theirs = llm.prefill(prompt), tiny_llm(family).prefill(prompt)
    assert mine.tail is not None
    assert theirs.tail is not None
    if "moe" not in family and family not in (
        "mixtral",
        "gpt_oss",
        "qwen3_next",
        "granite4-hybrid",
    ):  # rounding may choose another expert, in which one entry differs wholly
        made = [i for i, one in llm.config.attention_layers.items() if one.source is None]
        assert all(distance(mine.entries(layer), theirs.entries(layer)) < 0.03 for layer in made)
    logits, expected = mine.tail.logits, theirs.tail.logits
    assert logits is not None
    assert expected is not None
    # Rounding grows from layer to layer in Gemma 4, whose random weights are far from a trained model's.
    assert distance(logits, expected) < (0.12 if family == "gemma4" else 0.05)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("gemma2", "k8v4"),
        ("gemma4", "bfloat16"),
        *(
            pytest.param(*one, marks=pytest.mark.nightly)
            for one in product(("olmo3", "gemma4-12b"), ("bfloat16", "int8"))
        ),
    ],
)
def test_a_step_of_layers_of_many_kinds(family: str, dtype: str, tiny_llm: TinyLLM, on_gpu: TinyLLM) -> None:
    """One token behind a value whose tiles many programs share, and its queries, which differ in width."""
    llm, reference = on_gpu(family, kv_dtype=dtype), tiny_llm(family, kv_dtype=dtype)
    known = reference.prefill(ids(140))

    def step(one: LLM, kv: KVCache) -> Prefilled:
        def program() -> Program:
            return (yield Prefill([7], after=kv, queries=1))

        return run(one, program).result

    mine, theirs = step(llm, known.copy_to(llm.pool)), step(reference, known)
    assert mine.kv.tail is not None
    assert theirs.kv.tail is not None
    assert mine.kv.tail.logits is not None
    assert theirs.kv.tail.logits is not None
    assert distance(mine.kv.tail.logits, theirs.kv.tail.logits) < 0.03
    assert distance(mine.queries.rows, theirs.queries.rows) < 0.03


@pytest.mark.parametrize(("family", "count"), [("gemma3", 4), ("llama", 30), ("gemma4", 4)])
def test_hidden_states(family: str, count: int, tiny_llm: TinyLLM, on_gpu: TinyLLM) -> None:
    """Before, between and after the layers, where products are added at once and where they are added in parts."""
    llm = on_gpu(family)
    mine, theirs = asked(llm, ids(count), 3), asked(tiny_llm(family), ids(count), 3)
    assert mine.states is not None
    assert theirs.states is not None
    assert distance(mine.states[0], theirs.states[0]) < 0.01  # the table in bfloat16
    for layer, (states, expected) in enumerate(zip(mine.states, theirs.states, strict=True)):
        assert distance(states, expected) < 0.05, layer
    tail = mine.kv.tail
    assert tail is not None
    assert tail.logits is not None
    assert np.array_equal(llm.model.compiled.rows_of(mine.states[-1, -1:]).read()[0], tail.logits)


def test_embeddings(tiny_llm: TinyLLM, on_gpu: TinyLLM) -> None:
    """Of the last token, in chunks and behind a hit too."""
    llm = on_gpu("llama", max_step_tokens=16)
    texts = [ids(30), ids(7)]
    cold, warm = llm.embed(texts), llm.embed(texts)
    assert distance(cold, tiny_llm("llama").embed(texts)) < 0.05
    assert distance(warm, cold) < 1e-3


@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_packed_weights(weights: str, tiny_directory: Callable[[str], object], on_gpu: TinyLLM) -> None:
    llm = on_gpu("qwen2", weights=weights)
    theirs = LLM(str(tiny_directory("qwen2")), backend="reference", weights=weights, threads=1, kv_bytes=16 << 20)
    mine, expected = llm.prefill(ids(20)).tail, theirs.prefill(ids(20)).tail
    assert mine is not None
    assert expected is not None
    assert mine.logits is not None
    assert expected.logits is not None
    assert distance(mine.logits, expected.logits) < 0.05


def test_answers_in_chunks_and_beside_others(on_gpu: TinyLLM) -> None:
    """As text, greedy and drawn. On a GPU logits are compared too, to the bit (`test_bits.py`)."""
    alone, together = on_gpu("llama", max_step_tokens=64), on_gpu("llama", max_step_tokens=7)
    prompts = [ids(11), ids(18)[::-1]]  # within a page, and past it
    for params in (
        SamplingParams(max_tokens=2, ignore_eos=True),
        SamplingParams(max_tokens=2, ignore_eos=True, temperature=0.8, seed=4, top_p=0.9),
    ):
        expected = [alone.generate([prompt], params)[0].tokens for prompt in prompts]
        found = [answer.tokens for answer in together.generate(prompts, params)]
        assert [[token.id for token in tokens] for tokens in found] == [
            [token.id for token in tokens] for tokens in expected
        ]


def test_placeholders_are_the_tokens_that_were_drawn(on_gpu: TinyLLM) -> None:
    llm = on_gpu("llama")
    compiled, memory, nothing = llm.model.compiled, llm.pool.memory, np.zeros(0, np.int32)
    first = compiled.forward(batch([5, 6, 7], 0), memory).logits
    noises = [NO_NOISE, Noise.of(0.9, b"seed", 1), Noise.of(1.5, b"seed", 2)]
    drawn = compiled.sample(
        [first[i : i + 1] for i in range(3)], [Draw(SamplingParams(), one, 0, nothing, []) for one in noises]
    )
    tokens = [sampled.id for sampled in drawn.read()]
    known = compiled.forward(batch([tokens[2], 9, tokens[0]], 1), memory).logits
    expected = known.read().copy()
    found = compiled.forward(batch([-3, 9, -1], 1, drawn=drawn), memory).logits
    assert np.array_equal(found.read(), expected)
    waited = compiled.sample([], [])
    assert (len(waited), waited.read()) == (0, [])


def test_stored_logits_beside_rows_of_a_step(on_gpu: TinyLLM) -> None:
    """Each row is drawn from its own logits; what else is asked of a row does not change its token."""
    llm = on_gpu("llama")
    compiled, nothing = llm.model.compiled, np.zeros(0, np.int32)
    rows = compiled.forward(batch([5, 6, 7], 0), llm.pool.memory).logits
    logits = rows.read()
    stored = StoredLogits(np.roll(logits[:1], 1, -1))
    best = [int(row.argmax()) for row in (logits[0], logits[1], stored.logits[0])]
    some = [rows[0:1], rows[1:2], stored]
    for noise in (NO_NOISE, Noise.of(0.9, b"seed", 3)):
        tokens: list[list[int]] = []
        for params in (SamplingParams(), SamplingParams(logprobs=2), SamplingParams(logit_bias={3: 0.0})):
            draws = [Draw(params, noise, 0, nothing, []) for _ in some]
            found = compiled.sample(some, draws).read()
            tokens.append([sampled.id for sampled in found])
            assert all((sampled.logprob is not None) == (params.logprobs is not None) for sampled in found)
        assert all(ids == tokens[0] for ids in tokens)
        assert noise.key is not None or tokens[0] == best


def test_what_it_refuses(tiny_directory: Callable[[str], object], monkeypatch: pytest.MonkeyPatch) -> None:
    name = str(tiny_directory("llama"))
    with pytest.raises(InvalidRequest, match="it computes in bfloat16"):
        LLM(name, backend="triton", dtype="float32")
    monkeypatch.setattr(gpu, "INTERPRET", type(gpu.INTERPRET)(False))
    with pytest.raises(InvalidRequest, match=r"it computes on a GPU \(--device cuda\), not on cpu"):
        LLM(name, backend="triton", device="cpu")
    if not torch.cuda.is_available():
        with pytest.raises(InvalidRequest, match="PyTorch finds no CUDA device"):
            LLM(name, backend="triton", device="cuda")
