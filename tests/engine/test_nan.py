"""A model with NaN or infinity in its weights: a typed error ends the requests concerned, and no others."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.tiny import write_model
from twostroke.api.llm import LLM
from twostroke.backends.native import library
from twostroke.engine.request import Request
from twostroke.engine.strokes import Prefill, Program
from twostroke.errors import NotFinite
from twostroke.methods import method
from twostroke.models.checkpoints.checkpoint import Checkpoint
from twostroke.models.checkpoints.resolve import open_checkpoint
from twostroke.models.formats.encode import Encoder
from twostroke.models.tensor_shapes import is_weight_matrix
from twostroke.sampling.params import SamplingParams

VARIANTS = ["reference", *([] if library.unavailable() else ["native"])]
NAMES = [
    "embed",
    "norm",
    *(f"layers.1.{name}" for name in ("attn_norm", "q", "k", "v", "o", "mlp_norm", "gate", "up", "down")),
]
SOUND, DAMAGED = [7, 9, 11] * 4, [7, 9, 200, 11]  # prompts without and with the damaged row of the embedding
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    {"top_k": 3, "temperature": 1, "seed": 2},
    {"min_p": 0.1, "temperature": 1, "seed": 2},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"logprobs": 3},
    {"logit_bias": {5: 3.0}, "min_tokens": 2},
]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A tiny model that the native backend runs. Its embedding is not its head."""
    sizes: dict[str, Any] = {"head_dim": 64, "num_attention_heads": 2, "tie_word_embeddings": False}
    return open_checkpoint(str(write_model("llama", tmp_path_factory.mktemp("nan"), **sizes)))


def damaged(checkpoint: Checkpoint, name: str, value: float, row: int = 0, format: str = "Q8_0") -> Checkpoint:
    """The checkpoint with its matrices in a format, and one number of a tensor replaced: of a block, its scale."""
    encoder = Encoder(format, 1)
    stored = {
        key: encoder(tensor) if is_weight_matrix(key, tensor.shape) else tensor
        for key, tensor in checkpoint.stored.items()
    }
    tensor = stored[name]
    data = tensor.data.copy()
    if tensor.format == "F32":
        data.view("<f4")[0, 5] = value
    else:
        data[row, :2] = np.array([value], np.float16).view(np.uint8)
    return replace(checkpoint, stored=stored | {name: replace(tensor, data=data)})


@pytest.fixture
def opened() -> Iterator[Callable[[Checkpoint, str], LLM]]:
    """Opens a model; at the end no page may be lost."""
    models: list[LLM] = []

    def open_model(checkpoint: Checkpoint, backend: str, **options: Any) -> LLM:
        models.append(LLM(checkpoint, backend=backend, threads=1, kv_bytes=4 << 20, prefix_index="off", **options))
        return models[-1]

    yield open_model
    assert all(llm.pool.num_used == 0 for llm in models)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("backend", VARIANTS)
@pytest.mark.parametrize("name", [*NAMES, "head"])
@pytest.mark.parametrize("format", ["Q8_0", "Q4_1"])
def test_any_tensor(format: str, name: str, backend: str, sound: Checkpoint, opened: Callable[..., LLM]) -> None:
    """Wherever the number is: kernels that quantize activations must not hide it."""
    for value in (math.nan, math.inf):
        llm = opened(
            damaged(sound, name, value, 7, format) if name == "embed" else damaged(sound, name, value, format=format),
            backend,
        )
        for prompt in (SOUND[:3], SOUND):
            with pytest.raises(
                NotFinite, match="computes NaN: its file may be damaged; check it with --check"
            ) as caught:
                llm.generate([prompt], max_tokens=4, ignore_eos=True)
            assert "\n" not in str(caught.value)


@pytest.mark.thinned
@pytest.mark.parametrize("backend", VARIANTS)
@pytest.mark.parametrize("sampling", SAMPLING, ids=repr)
def test_only_the_requests_concerned(
    sampling: dict[str, Any], backend: str, sound: Checkpoint, opened: Callable[..., LLM]
) -> None:
    """A damaged row of the embedding concerns prompts with that token; others in the same steps do not change."""
    params = SamplingParams(max_tokens=6, ignore_eos=True, **sampling)
    healthy = opened(damaged(sound, "embed", 0.5, 383), backend)
    expected = [token.id for token in healthy.generate([SOUND], params)[0].tokens]
    if 200 in expected:
        pytest.skip("the answer itself has the damaged token")
    llm = opened(damaged(sound, "embed", math.nan, 200), backend)
    good, bad = (llm.engine.submit(llm.request(prompt, params)) for prompt in (SOUND, DAMAGED))
    with pytest.raises(NotFinite):
        llm.engine.finish([bad])
    llm.engine.finish([good])
    assert [token.id for token in good.events] == expected
    assert all(token.logprob is None or math.isfinite(token.logprob) for token in good.events)
    assert not bad.events


@pytest.mark.parametrize("backend", VARIANTS)
def test_pages_with_nan_do_not_reach_others(backend: str, sound: Checkpoint, opened: Callable[..., LLM]) -> None:
    """Freed pages are used again, and kernels multiply unused slots of a page by 0."""
    llm = opened(damaged(sound, "embed", math.nan, 200), backend)
    expected = llm.generate([SOUND], max_tokens=6, ignore_eos=True)[0].text
    for count in (3, 40, 100):
        with pytest.raises(NotFinite):
            llm.generate([[200] * count], max_tokens=3)
        for _ in range(2):
            assert llm.generate([SOUND], max_tokens=6, ignore_eos=True)[0].text == expected


@pytest.mark.parametrize("backend", VARIANTS)
def test_techniques_and_scores(backend: str, sound: Checkpoint, opened: Callable[..., LLM]) -> None:
    llm = opened(damaged(sound, "embed", math.nan, 200), backend, student="int8")
    techniques = ["plain", "repeat", "best-of", "speculative", "overfill", "refresh", "drop", "snap", "student"]
    for name in techniques:
        with pytest.raises(NotFinite):
            llm.generate([DAMAGED], method=method(name), max_tokens=8)
    with pytest.raises(NotFinite):
        llm.generate([DAMAGED], method=method("refresh", when="probe", every=2), max_tokens=8)

    def scoring() -> Program:
        return (yield Prefill(DAMAGED, logits="all"))

    request = Request(scoring, SamplingParams(), llm.tokenizer)
    with pytest.raises(NotFinite):
        llm.engine.finish([llm.engine.submit(request)])
    kv = llm.prefill(DAMAGED)
    with pytest.raises(NotFinite):
        list(llm.decode(kv))
    del kv
    request = None
    assert len(llm.generate([SOUND], max_tokens=3, ignore_eos=True, logit_bias={200: -100.0})[0].tokens) == 3
